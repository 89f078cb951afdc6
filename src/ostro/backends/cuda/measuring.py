"""Times matmuls of few rows on the device, on the model's own weights: each together with the norm or activation that
the choice affects, and over several layers in turn, so that no weight comes from the cache.
"""

import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ostro.backends.cuda.choices import Gpu, rows_to_try, to_try
from ostro.backends.cuda.driver import SPARE_SHARED_MEMORY
from ostro.backends.cuda.graphs import StepGraphs
from ostro.kernels.gpu.dot_linear import most_shared_memory
from ostro.kernels.gpu.epilogue import Epilogue
from ostro.kernels.gpu.mlp import activated
from ostro.kernels.gpu.norm import NormWeights, add_norm
from ostro.kernels.gpu.prologue import Prologue
from ostro.kernels.gpu.small_batch import UNUSABLE, norms_itself, small_linear
from ostro.kernels.gpu.tilings import Matmul, Multiprocessors, Tiling, binary_of
from ostro.models.architecture import Activation

_ROUNDS = 5
_FEWEST_CALLS, _MOST_CALLS = 4, 32

_log = logging.getLogger(__name__)


class Operand(NamedTuple):
    """The weight that a matmul multiplies by, and the bias that it adds."""

    weight: Tensor
    bias: Tensor | None


class Kind(NamedTuple):
    """One way to compute a matmul: with a tiling, or, without one, in the library."""

    matmul: Matmul
    tiling: Tiling | None


class _Scratch(NamedTuple):
    """What a matmul reads and writes."""

    x: Tensor
    stream: Tensor
    norm: NormWeights
    """The norm of its inputs or, if its result is added to the stream, of the stream."""


def this_gpu(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    memory = most_shared_memory(device) - SPARE_SHARED_MEMORY
    return Gpu(found.name, f"{found.major}.{found.minor}", Multiprocessors(found.multi_processor_count, memory))


def l2_cache_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


class DeviceClock:
    """The `Clock` of `choices.choose`."""

    def __init__(
        self,
        uses: Mapping[Matmul, Sequence[Operand]],
        activation: Activation,
        *,
        overlaps: bool,
        cache_bytes: int = 0,
    ) -> None:
        """`uses` has the matrices of each matmul; `cache_bytes` is the L2 cache's size, for timing."""
        self._uses, self._activation, self._overlaps, self._cache_bytes = uses, activation, overlaps, cache_bytes
        self._like = next(iter(uses.values()))[0].weight
        self._scratch: dict[tuple[Matmul, int], _Scratch] = {}

    def __call__(self, matmul: Matmul, rows: int, tried: Sequence[Tiling | None]) -> Sequence[float | None]:
        graphs = StepGraphs(self.run, idle=_nothing, most=rows, captured=rows)
        replays = [self._captured(graphs, rows, Kind(matmul, each)) for each in tried]
        times: list[list[float]] = [[] for _ in tried]
        # By turns, so that a change of the clock rate affects all alike.
        for _ in range(_ROUNDS):
            for replay, taken in zip(replays, times, strict=True):
                if replay is not None:
                    taken.append(_elapsed(replay))
        self._scratch.clear()
        return [statistics.median(taken) if taken else None for taken in times]

    def trials(self, matmuls: Iterable[Matmul], gpu: Gpu) -> Iterator[Callable[[], object]]:
        """Calls that compile what will be timed, each kernel once; those that cannot run do nothing."""
        jobs = {
            (binary_of(matmul, rows, tiling), self._uses[matmul][0].bias is None): partial(
                self._try, matmul, rows, tiling
            )
            for matmul in matmuls
            for rows in rows_to_try(matmul, gpu)
            for tiling in to_try(matmul, rows, gpu)
        }
        yield from jobs.values()

    def _try(self, matmul: Matmul, rows: int, tiling: Tiling) -> None:
        try:
            self._call(Kind(matmul, tiling), self._scratch_for(matmul, rows), self._uses[matmul][0])
        except UNUSABLE as error:
            _log.debug("%s cannot be used for %d rows of %s: %s", tiling, rows, matmul, error)

    def _captured(self, graphs: StepGraphs[Kind], rows: int, kind: Kind) -> Callable[[], None] | None:
        try:
            replay = graphs.get(rows, kind)
            replay()
        except UNUSABLE as error:
            _log.debug("%s cannot be used for %d rows of %s: %s", kind.tiling, rows, kind.matmul, error)
            return None
        return replay

    @torch.inference_mode()
    def run(self, rows: int, kind: Kind) -> None:
        """What is captured and timed: the matmul of several matrices, with the kernels around each."""
        scratch = self._scratch.get((kind.matmul, rows))
        if scratch is None:
            scratch = self._scratch[kind.matmul, rows] = self._scratch_for(kind.matmul, rows)
            scratch.x.normal_()
        matrices = self._uses[kind.matmul]
        enough = 2 * self._cache_bytes // kind.matmul.weight_bytes + 1
        for matrix in islice(cycle(matrices), min(_MOST_CALLS, max(_FEWEST_CALLS, enough))):
            self._call(kind, scratch, matrix)

    def _scratch_for(self, matmul: Matmul, rows: int) -> _Scratch:
        normed = matmul.outs if matmul.epilogue == "added" else matmul.in_features
        return _Scratch(
            self._like.new_zeros(rows, matmul.in_features),
            self._like.new_zeros(rows, matmul.outs),
            NormWeights(self._like.new_ones(normed), 1e-6, None),
        )

    def _call(self, kind: Kind, scratch: _Scratch, matrix: Operand) -> None:
        """Launches the same kernels as `fused`, so that the same ones overlap."""
        (matmul, tiling), (x, stream, norm), pdl = kind, scratch, self._overlaps
        weight, bias = matrix
        epilogue, prologue = self._epilogue(matmul, bias), Prologue(norm)
        if epilogue.adds:
            delta = None
            if tiling is None:
                delta = F.linear(x, weight, bias)
            else:
                small_linear(x, weight, epilogue=epilogue, residual=stream, tiling=tiling, pdl=pdl)
            add_norm(stream, delta, norm, pdl=pdl)
        elif len(x) == 1 or norms_itself(tiling, x.dtype):
            small_linear(x, weight, prologue, epilogue, tiling=tiling, pdl=pdl)
        else:
            read = add_norm(x, None, norm, pdl=pdl)
            if tiling is not None:
                small_linear(read, weight, epilogue=epilogue, tiling=tiling, pdl=pdl)
                return
            y = F.linear(read, weight, bias)
            if epilogue.activation is not None:
                activated(y, epilogue.activation, gated=epilogue.gated, pdl=pdl)

    def _epilogue(self, matmul: Matmul, bias: Tensor | None) -> Epilogue:
        activation = self._activation if matmul.epilogue in ("activated", "gated") else None
        return Epilogue(bias, activation, matmul.is_gated, adds=matmul.epilogue == "added")


def _elapsed(replay: Callable[[], None]) -> float:
    """The time of one replay, in milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _nothing() -> None:
    return None
