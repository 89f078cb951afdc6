"""The settings of a step's draws, as its program reads them and as sequences fill them in."""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from ostro.backends.jax.sampling import NUM_FLOATS, NUM_SETTINGS, DrawKind
from ostro.backends.sampling.edits import check_honoured
from ostro.backends.sampling.random_key import stream_keys
from ostro.engine.sequence import Sequence
from ostro.sampling_params import SamplingParams

_TINY = float(np.finfo(np.float32).tiny)
"""Replaces temperatures and shares that float32 would round to zero, since zero means something else."""

DRAWN = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Fields of SamplingParams that `DrawWriter` passes on."""

check_honoured("the JAX runner", DRAWN)

Draws = Seq[tuple[int, Sequence]]
"""Rows of logits, and the sequences that want a token from them."""


class DrawWriter:
    """Writes the array behind `DrawSettings`. From step to step, most draws are for the same sequences."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._asked: list[tuple[int, SamplingParams]] = []
        self._written, self._seeded, self._kind = np.zeros((NUM_SETTINGS, 0), np.int32), list[int](), DrawKind.PLAIN

    def write(self, draws: Draws, rows: int) -> tuple[npt.NDArray[np.int32], DrawKind]:
        """The settings, and the simplest kind of program that handles them."""
        asked = [(row, seq.request.params) for row, seq in draws]
        if asked != self._asked or rows != self._written.shape[1]:
            self._asked = asked
            self._seeded = [number for number, (_, params) in enumerate(asked) if not params.greedy]
            self._written, self._kind = self._unseeded(rows)
        packed = self._written.copy()
        if self._seeded:
            seqs = [draws[number][1] for number in self._seeded]
            keys = stream_keys([(seq.request.seed, seq.choice, seq.num_output) for seq in seqs])
            packed[2, self._seeded], packed[3, self._seeded] = keys >> 32, keys.astype(np.uint32).view(np.int32)
        return packed, self._kind

    def _unseeded(self, rows: int) -> tuple[npt.NDArray[np.int32], DrawKind]:
        """All settings but the keys of random streams."""
        packed = np.zeros((NUM_SETTINGS, rows), np.int32)
        floats, own = packed[-NUM_FLOATS:].view(np.float32), self._seeded
        floats[1] = 1.0
        packed[0, : len(self._asked)] = [row for row, _ in self._asked]
        params = [self._asked[number][1] for number in own]
        packed[1, own] = [each.top_k if 0 < each.top_k < self._vocab else 0 for each in params]
        floats[0, own] = np.maximum([each.temperature for each in params], _TINY)
        floats[1, own] = np.maximum([each.top_p for each in params], _TINY)
        floats[2, own] = [each.min_p for each in params]
        truncates = bool((packed[1] > 0).any() or (floats[1] < 1.0).any())
        return packed, DrawKind.TRUNCATED if truncates else DrawKind.PLAIN
