"""Which slot of the device's sampler each sequence has, and the edits to logits that the sampler itself cannot make.

A sequence keeps its slot while it is in every step. Once all its tokens are known, one that skipped a step gets a new
slot, and one that gained tokens without a draw is admitted to its slot again. One with drafts has a slot for each of
its rows, in the state that it would have there, and loses these slots after the step.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from ostro.backends import outcome as row_outcome
from ostro.backends.cuda.step_plan import SamplerKind
from ostro.backends.sampling.edits import cuts
from ostro.backends.sampling.score_edits import without_penalties
from ostro.engine.runner import NOT_FINITE, SampledToken
from ostro.engine.sequence import Sequence as EngineSequence
from ostro.kernels.gpu.sampling import ALL_BANNED, SamplerTables, SlotSettings, sample_tokens
from ostro.kernels.gpu.token_masks import WORD_BITS, ban_tokens
from ostro.sampling_params import MAX_CHOICES

_FAILURES = {ALL_BANNED: row_outcome.ALL_BANNED}


class Sampler:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.tables = SamplerTables(num_slots, vocab_size, device)
        self._slots: dict[int, int] = {}
        self._settings: dict[int, SlotSettings] = {}
        self._free = list(range(num_slots))
        # The latest sequences that kept their slots, and what `slots_for` said of them.
        self._latest: tuple[Sequence[EngineSequence], tuple[list[int], SamplerKind]] | None = None

    def slots_for(
        self, seqs: Sequence[EngineSequence], supposed: Sequence[EngineSequence] = ()
    ) -> tuple[list[int], SamplerKind]:
        """The slots of the sequences that this step samples for, then those of the `supposed` ones, which keep theirs
        for this step alone; the slots of all others are free again.
        """
        if self._latest is not None and not supposed and self._latest[0] == seqs:
            return self._latest[1]
        here = {seq.id for seq in seqs}
        for gone in [id for id in self._slots if id not in here]:
            self._free.append(self._slots.pop(gone))
            del self._settings[gone]
        new = [seq for seq in seqs if seq.id not in self._slots or _jumps(seq)]
        for seq in new:
            self._slots[seq.id] = slot = self._slots[seq.id] if seq.id in self._slots else self._free.pop()
            self._settings[seq.id] = _settings(seq, slot)
        once = [_settings(seq, slot) for seq, slot in zip(supposed, self._free[: len(supposed)], strict=True)]
        self.tables.admit([*(self._settings[seq.id] for seq in new), *once])
        settings = [*(self._settings[seq.id] for seq in seqs), *once]
        kind = SamplerKind(any(each.truncates for each in settings), any(each.penalises for each in settings))
        slots = [each.slot for each in settings]
        self._latest = None if supposed or any(map(_jumps, seqs)) else (seqs, (slots, kind))
        return slots, kind

    def draw(self, logits: Tensor, slots: Tensor, tokens: Tensor, errors: Tensor, kind: SamplerKind) -> None:
        sample_tokens(logits, slots, self.tables, tokens, errors, truncated=kind.truncated, penalties=kind.penalties)


class DrawnTokens:
    """The tokens that the latest step drew, on the device: the next step may read them before the host does."""

    def __init__(self, max_batch_seqs: int, device: torch.device) -> None:
        capacity = max_batch_seqs * (MAX_CHOICES + 1)
        self.tokens = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.errors = torch.zeros(capacity, dtype=torch.int8, device=device)
        self.rows: dict[int, int] = {}
        """The row of each sequence, by its id."""


def edited(logits: Tensor, seqs: Sequence[EngineSequence]) -> Tensor:
    """A copy of the logits after bias, bans, masks that are known and top-n-sigma, in fp32. Includes penalties only in
    rows with top-n-sigma; elsewhere the device applies them.
    """
    return without_penalties(logits.to(torch.float32, copy=True), seqs)


def failure(error: int) -> SampledToken:
    return SampledToken(-1, error=_FAILURES.get(error, NOT_FINITE))


def _jumps(seq: EngineSequence) -> bool:
    """Whether the sequence may have gained tokens that the device did not draw: then all its tokens are sent again."""
    return seq.matcher is not None and seq.request.constraint is not None and seq.request.constraint.jump_forward


def _settings(seq: EngineSequence, slot: int) -> SlotSettings:
    params = seq.request.params
    # For rows with top-n-sigma, `edited` has applied them already.
    penalised = () if cuts(seq) else ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return SlotSettings(
        slot=slot,
        seed=seq.request.seed,
        choice=seq.choice,
        temperature=0.0 if params.greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        **{name: getattr(params, name) for name in penalised},
        prompt_ids=seq.request.prompt_ids,
        output_ids=seq.output_ids,
    )


# ---- masks


class TokenMasks:
    """The masks of a step's sequences on the device, in fixed memory that graphs read: sent before a step samples, one
    row of words for each sequence with a mask. A step without any costs nothing, and allocates nothing.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows, self._num_words, self._device = max_rows, -(-vocab_size // WORD_BITS), device
        self._memory: tuple[Tensor, Tensor] | None = None
        self._staging: Iterator[_Staging] = iter(())

    def allocate(self) -> None:
        """Allocates the memory. Call it before a graph that reads it is captured."""
        if self._memory is None:
            words = torch.zeros(self._max_rows, self._num_words, dtype=torch.int32, device=self._device)
            self._memory = words, torch.full((self._max_rows,), -1, dtype=torch.int32, device=self._device)
            self._staging = cycle([_Staging(words), _Staging(words)])

    def send(self, seqs: Sequence[EngineSequence]) -> None:
        """Sends the masks without waiting for the device. Row i of the next logits belongs to seqs[i]."""
        self.allocate()
        assert self._memory is not None
        next(self._staging).send([seq.mask for seq in seqs], *self._memory)

    def ban(self, logits: Tensor) -> None:
        """Bans tokens in place, in the rows that masks were last sent for."""
        assert self._memory is not None
        words, rows = self._memory
        ban_tokens(logits, words, rows)


class _Staging:
    """Pinned memory that is reused: pinning another megabyte takes longer than a small model's step."""

    def __init__(self, words: Tensor) -> None:
        on_gpu = words.is_cuda
        self._words, self._rows = (
            torch.empty(shape, dtype=torch.int32, pin_memory=on_gpu) for shape in (words.shape, words.shape[:1])
        )
        self._words_array, self._rows_array = self._words.numpy(), self._rows.numpy()
        self._sent = torch.cuda.Event() if on_gpu else None

    def send(self, masks: Sequence[memoryview | None], words: Tensor, rows: Tensor) -> None:
        if self._sent is not None:
            # As a rule the copy is over: the other staging buffer has been used since.
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
