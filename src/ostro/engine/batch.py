"""One step's work: which tokens of which sequences are computed, and where a token is sampled. Knows no tensors."""

from dataclasses import dataclass

import msgspec

from ostro.engine.request import Task
from ostro.engine.sequence import Sequence


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens `start .. start + length` of one sequence."""

    seq: Sequence
    start: int
    length: int
    samples: tuple[Sequence, ...] = ()
    """Sequences that take their next token from this chunk's last position: the sequence itself once the chunk
    reaches its end, and the other choices of its request when they are about to fork from it."""

    scored: range = range(0)
    """Positions whose logits give the log-probability of the next token: a prompt token or a forced one."""

    drafts: tuple[int, ...] = ()
    """Guesses of the tokens that follow, computed with the chunk and not part of its length: the sequence, which is
    the only one to sample then, also samples after each of them. Only for runners with `RunnerSpec.max_sampled`."""

    draft_masks: tuple[memoryview | None, ...] = ()
    """The mask after each draft, as in `Sequence.mask`; empty if the sequence is not constrained."""

    is_predicted: bool = False
    """Whether the drafts come from the text that the request predicts."""

    captures: tuple[tuple[int, int], ...] = ()
    """(offset, slot) pairs, by offset: the state after so many of the chunk's tokens, 1 to `length`, is copied to the
    slot, while the chunk's own state goes on. Drafts are never part of it. Only for runners with states."""

    @property
    def state(self) -> int:
        """The slot of the sequence's recurrent state. The step starts from the state in it, which is the one after
        `start` tokens, or from zeros if `start` is 0, and leaves the state after `end` tokens there.

        With drafts, it leaves that state as well, and the runner keeps what it needs to apply the drafts. The next
        chunk starts behind those that were accepted, and applies them first. Writing to a slot by other means, which a
        copy, a capture and a chunk that starts at 0 are, makes the runner forget the drafts.
        """
        return self.seq.state

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens to list at each scored position, at most."""
        params, first_output = self.seq.request.params, self.seq.num_prompt - 1
        wanted = params.prompt_logprobs if self.scored.start < first_output else None
        return max(wanted or 0, (params.logprobs or 0) if self.scored.stop > first_output else 0)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_rows(self) -> int:
        """Tokens to compute, drafts included."""
        return self.length + len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute, drafts included."""
        return [*self.seq.token_ids[self.start : self.end], *self.drafts]

    @property
    def samplers(self) -> tuple[tuple[Sequence, ...], ...]:
        """Sequences that sample from each of the chunk's last rows: `samples`, then its own with drafts accepted."""
        if not self.samples:
            return ()
        masks = self.draft_masks or (None,) * len(self.drafts)
        supposed = ((self.seq.supposing(self.drafts[: at + 1], mask),) for at, mask in enumerate(masks))
        return (self.samples, *supposed)

    @property
    def asked(self) -> tuple[int, ...]:
        """Positions whose logits are needed."""
        return (*self.scored, self.end - 1) if self.samples else tuple(self.scored)

    @property
    def recomputed(self) -> int:
        """Tokens that a model without a KV cache computes: each position in `asked` takes a pass over all up to it."""
        if self.seq.request.one_pass or self.seq.request.task is not Task.GENERATE:
            return self.end
        return sum(position + 1 for position in self.asked)


@dataclass(frozen=True, slots=True)
class Batch:
    chunks: tuple[Chunk, ...]
    page_copies: tuple[tuple[int, int], ...] = ()
    """(from, to) pages to copy before anything is computed: the partly filled pages of forked sequences."""
    state_copies: tuple[tuple[int, int], ...] = ()
    """(from, to) state slots to copy before anything is computed, in order: a snapshot into the slot of a sequence that
    continues from it, or a forked sequence's state. None reads a slot that an earlier one wrote."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, drafts included."""
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def decodes(self) -> bool:
        """Whether the step only decodes: every chunk is one token, and is sampled from."""
        return all(chunk.length == 1 and chunk.samples for chunk in self.chunks)

    @property
    def sampled(self) -> list[Sequence]:
        return [seq for chunk in self.chunks for seq in chunk.samples]
