"""Which slot of the device's sampler each sequence has, and what must be done to logits that the sampler does not know.

A sequence keeps its slot while it is in every step; one that was away, or that gained tokens without a draw, begins
anew, when all its tokens are known.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ostro.engine.runner import NOT_FINITE, SampledToken, TokenLogprob
from ostro.engine.sequence import Sequence as EngineSequence
from ostro.kernels.gpu.sampling import ALL_BANNED, SamplerTables, SlotSettings, sample_tokens
from ostro.runner import outcome as row_outcome
from ostro.runner.edits import cuts
from ostro.runner.gpu.step_plan import SamplerKind
from ostro.runner.score_edits import without_penalties

_FAILURES = {ALL_BANNED: row_outcome.ALL_BANNED}


class Sampler:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.tables = SamplerTables(num_slots, vocab_size, device)
        self._slots: dict[int, int] = {}
        self._settings: dict[int, SlotSettings] = {}
        self._free = list(range(num_slots))

    def slots_for(self, seqs: Sequence[EngineSequence]) -> tuple[list[int], SamplerKind]:
        """The slots of the sequences that this step samples for; slots of all others are free again."""
        here = {seq.id for seq in seqs}
        for gone in [id for id in self._slots if id not in here]:
            self._free.append(self._slots.pop(gone))
            del self._settings[gone]
        new = [seq for seq in seqs if seq.id not in self._slots or _jumps(seq)]
        for seq in new:
            self._slots[seq.id] = slot = self._slots[seq.id] if seq.id in self._slots else self._free.pop()
            self._settings[seq.id] = _settings(seq, slot)
        self.tables.admit([self._settings[seq.id] for seq in new])
        settings = [self._settings[seq.id] for seq in seqs]
        kind = SamplerKind(any(each.truncates for each in settings), any(each.penalises for each in settings))
        return [each.slot for each in settings], kind

    def draw(self, logits: Tensor, slots: Tensor, tokens: Tensor, errors: Tensor, kind: SamplerKind) -> None:
        sample_tokens(logits, slots, self.tables, tokens, errors, truncated=kind.truncated, penalties=kind.penalties)


class DrawnTokens:
    """What the latest step drew, on the device: the next one may read it before the host does."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.tokens = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.errors = torch.zeros(capacity, dtype=torch.int8, device=device)
        self.rows: dict[int, int] = {}
        """By sequence."""


def edits(seqs: Iterable[EngineSequence]) -> bool:
    """Whether some sequence wants its logits changed in a way that only the host knows."""
    return any(
        seq.request.params.logit_bias or seq.request.bad_word_ids or seq.stops_banned or cuts(seq) for seq in seqs
    )


def edited(logits: Tensor, seqs: Sequence[EngineSequence]) -> Tensor:
    """A copy of the logits after bias, bans, masks that are known and top-n-sigma, in fp32; other rows' penalties are
    the device's own business.
    """
    return without_penalties(logits.to(torch.float32, copy=True), seqs)


def outcome(token_id: int, error: int, logprob: TokenLogprob | None = None) -> SampledToken:
    if error:
        return SampledToken(-1, error=_FAILURES.get(error, NOT_FINITE))
    return SampledToken(token_id, logprob)


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
