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
        self._staging: Iterator[_Staging] = iter(())

    def allocate(self) -> None:
        """Before a graph that reads them is captured."""
        if self._memory is None:
            words = torch.zeros(self._max_rows, self._num_words, dtype=torch.int32, device=self._device)
            self._memory = words, torch.full((self._max_rows,), -1, dtype=torch.int32, device=self._device)
            self._staging = cycle([_Staging(words), _Staging(words)])

    def send(self, seqs: Sequence[EngineSequence]) -> None:
        """Does not wait for the device. Row i of the logits that come next belongs to seqs[i]."""
        self.allocate()
        assert self._memory is not None
        next(self._staging).send([seq.mask for seq in seqs], *self._memory)

    def ban(self, logits: Tensor) -> None:
        """In place, in the rows that the masks were last sent for."""
        assert self._memory is not None
        words, rows = self._memory
        ban_tokens(logits, words, rows)


class _Staging:
    """Pinned memory that is reused: to pin a megabyte anew takes longer than a small model's step."""

    def __init__(self, words: Tensor) -> None:
        on_gpu = words.is_cuda
        self._words, self._rows = (
            torch.empty(shape, dtype=torch.int32, pin_memory=on_gpu) for shape in (words.shape, words.shape[:1])
        )
        self._words_array, self._rows_array = self._words.numpy(), self._rows.numpy()
        self._sent = torch.cuda.Event() if on_gpu else None

    def send(self, masks: Sequence[memoryview | None], words: Tensor, rows: Tensor) -> None:
        if self._sent is not None:
            # Over, as a rule: another staging was used since.
            self._sent.synchronize()
        self._rows_array.fill(-1)
        number, width = 0, self._words.shape[1]
        for row, mask in enumerate(masks):
            if mask is not None:
                self._words_array[number] = np.frombuffer(mask, np.int32, width)
                self._rows_array[row] = number
                number += 1
        rows.copy_(self._rows, non_blocking=True)
        if number:
            words[:number].copy_(self._words[:number], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def masked(seqs: Sequence[EngineSequence]) -> bool:
    """Whether some sequence has a mask."""
    return any(seq.mask is not None for seq in seqs)
