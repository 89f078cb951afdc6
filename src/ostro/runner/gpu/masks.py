"""The masks of a step's sequences on the device. A step without any costs nothing, and allocates nothing."""

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from ostro.engine.sequence import Sequence as EngineSequence
from ostro.kernels.gpu.token_masks import WORD_BITS, ban_tokens


class TokenMasks:
    """Fixed memory, which graphs read: sent before a step samples, one row of words for each sequence with a mask."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows, self._num_words, self._device = max_rows, -(-vocab_size // WORD_BITS), device
        self._memory: tuple[Tensor, Tensor] | None = None
        self._senders: Iterator[_Sender] = iter(())

    def allocate(self) -> None:
        """Before a graph that reads them is captured."""
        if self._memory is None:
            words = torch.zeros(self._max_rows, self._num_words, dtype=torch.int32, device=self._device)
            self._memory = words, torch.full((self._max_rows,), -1, dtype=torch.int32, device=self._device)
            self._senders = cycle([_Sender(words), _Sender(words)])

    def send(self, seqs: Sequence[EngineSequence]) -> None:
        """Does not wait for the device. Row i of the logits that come next belongs to seqs[i]."""
        self.allocate()
        assert self._memory is not None
        words, rows = self._memory
        masks = {row: seq.mask for row, seq in enumerate(seqs) if seq.mask is not None}
        numbers = np.full(self._max_rows, -1, dtype=np.int32)
        numbers[list(masks)] = np.arange(len(masks))
        rows.copy_(self._pinned(numbers), non_blocking=True)
        next(self._senders).send([np.frombuffer(mask, np.int32, self._num_words) for mask in masks.values()], words)

    def ban(self, logits: Tensor) -> None:
        """In place, in the rows that the masks were last sent for."""
        assert self._memory is not None
        words, rows = self._memory
        ban_tokens(logits, words, rows)

    def _pinned(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]") -> Tensor:
        host = torch.from_numpy(array)
        return host.pin_memory() if self._device.type == "cuda" else host


class _Sender:
    """Pinned memory of its own, which is reused: to pin a megabyte anew takes longer than a step of a small model."""

    def __init__(self, words: Tensor) -> None:
        self._is_cuda = words.is_cuda
        self._host = torch.empty(words.shape, dtype=words.dtype, pin_memory=self._is_cuda)
        self._array = self._host.numpy()
        self._sent = torch.cuda.Event() if self._is_cuda else None

    def send(self, masks: "Sequence[np.ndarray[tuple[int, ...], np.dtype[np.int32]]]", words: Tensor) -> None:
        if self._sent is not None:
            # Long over: another was sent since.
            self._sent.synchronize()
        for row, mask in enumerate(masks):
            self._array[row] = mask
        words[: len(masks)].copy_(self._host[: len(masks)], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def masked(seqs: Sequence[EngineSequence]) -> bool:
    """Whether some sequence has a mask."""
    return any(seq.mask is not None for seq in seqs)
