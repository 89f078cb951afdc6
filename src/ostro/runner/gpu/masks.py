"""The masks of a step's sequences on the device. A step without any costs nothing, and allocates nothing."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ostro.engine.sequence import Sequence as EngineSequence
from ostro.kernels.gpu.token_masks import WORD_BITS, ban_tokens


class TokenMasks:
    """Fixed memory, which graphs read: sent before a step runs, one row of words for each sequence that has a mask."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows, self._num_words, self._device = max_rows, -(-vocab_size // WORD_BITS), device
        self._memory: tuple[Tensor, Tensor] | None = None

    def allocate(self) -> None:
        """Before a graph that reads them is captured."""
        if self._memory is None:
            words = torch.zeros(self._max_rows, self._num_words, dtype=torch.int32, device=self._device)
            self._memory = words, torch.full((self._max_rows,), -1, dtype=torch.int32, device=self._device)

    def send(self, seqs: Sequence[EngineSequence]) -> None:
        """Does not wait for the device. Row i of the logits that come next belongs to seqs[i]."""
        self.allocate()
        assert self._memory is not None
        words, rows = self._memory
        masks = {row: seq.mask for row, seq in enumerate(seqs) if seq.mask is not None}
        numbers = np.full(self._max_rows, -1, dtype=np.int32)
        numbers[list(masks)] = np.arange(len(masks))
        sent = np.stack([np.frombuffer(mask, np.int32, self._num_words) for mask in masks.values()])
        words[: len(masks)].copy_(self._pinned(sent), non_blocking=True)
        rows.copy_(self._pinned(numbers), non_blocking=True)

    def ban(self, logits: Tensor) -> None:
        """In place, in the rows that the masks were last sent for."""
        assert self._memory is not None
        words, rows = self._memory
        ban_tokens(logits, words, rows)

    def _pinned(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]") -> Tensor:
        host = torch.from_numpy(array)
        return host.pin_memory() if self._device.type == "cuda" else host


def masked(seqs: Sequence[EngineSequence]) -> bool:
    """Whether some sequence has a mask."""
    return any(seq.mask is not None for seq in seqs)
