"""Which slot of the device's sampler each sequence has, and what must be done to logits that the sampler does not know.

A sequence keeps its slot while it is in every step; one that was away, or that gained tokens without a draw, begins
anew, when all its tokens are known. One with drafts has a slot for each of its rows, as it would be there, and loses
them with the step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ostro.backends import outcome as row_outcome
from ostro.backends.cuda.step_plan import SamplerKind
from ostro.backends.sampling.edits import cuts
from ostro.backends.sampling.score_edits import without_penalties
from ostro.engine.runner import NOT_FINITE, SampledToken
from ostro.engine.sequence import Sequence as EngineSequence
from ostro.kernels.gpu.sampling import ALL_BANNED, SamplerTables, SlotSettings, sample_tokens
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
        """The slots of the sequences that this step samples for, then those of the `supposed`, which are theirs for
        this step alone; slots of all others are free again.
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
    """What the latest step drew, on the device: the next one may read it before the host does."""

    def __init__(self, max_batch_seqs: int, device: torch.device) -> None:
        capacity = max_batch_seqs * (MAX_CHOICES + 1)
        self.tokens = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.errors = torch.zeros(capacity, dtype=torch.int8, device=device)
        self.rows: dict[int, int] = {}
        """By sequence."""


def edited(logits: Tensor, seqs: Sequence[EngineSequence]) -> Tensor:
    """A copy of the logits after bias, bans, masks that are known and top-n-sigma, in fp32; other rows' penalties are
    the device's own business.
    """
    return without_penalties(logits.to(torch.float32, copy=True), seqs)


def failure(error: int) -> SampledToken:
    return SampledToken(-1, error=_FAILURES.get(error, NOT_FINITE))


def _jumps(seq: EngineSequence) -> bool:
    """Whether it may have gained tokens that the device did not draw: then it is told of all of them again."""
    return seq.matcher is not None and seq.request.constraint is not None and seq.request.constraint.jump_forward


def _settings(seq: EngineSequence, slot: int) -> SlotSettings:
    params = seq.request.params
    # Of a row with top-n-sigma, `edited` has seen to them.
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
