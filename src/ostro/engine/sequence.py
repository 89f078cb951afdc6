"""One sequence: its token ids and counters. Knows no text, no tensors, and not which page comes from where."""

from copy import copy
from enum import StrEnum
from typing import Self

from ostro.engine.constraint import Matcher
from ostro.engine.drafter import Drafter
from ostro.engine.loops import LoopWatch
from ostro.engine.request import Request
from ostro.engine.results import TokenLogprob
from ostro.errors import SequenceFailed

PENDING = -1
"""Placeholder in token_ids for a token that is not known yet."""

# A structure may call for repetition, such as a table of zeros: only a far longer loop counts there.
_PATIENCE_IN_STRUCTURES = 8


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    """The output was stuck in a loop, and no max_tokens was set."""
    ABORT = "abort"
    ERROR = "error"


class Sequence:
    """One choice of a request, from its prompt to its last token.

    token_ids   p p p p p p p p | o o o o ?
                num_prompt ─────┘         └──── num_pending: being sampled, not known here yet
    computed    x x x x x x x x   x x x         keys and values are in pages, or a step under way puts them there
                num_computed ───────────┘       a step lets it catch up with len(token_ids)
    """

    __slots__ = (
        "_loops",
        "choice",
        "closing",
        "drafter",
        "finish_reason",
        "forced_logprobs",
        "id",
        "is_drafted",
        "looks_back",
        "mask",
        "matcher",
        "max_len",
        "num_cached",
        "num_computed",
        "num_forced",
        "num_pending",
        "num_prompt",
        "num_unapplied",
        "pages",
        "pooled",
        "request",
        "scores",
        "state",
        "stop_ids",
        "token_ids",
        "unheard_logprobs",
    )

    def __init__(
        self,
        id: int,
        request: Request,
        *,
        choice: int = 0,
        max_len: int,
        matcher: Matcher | None = None,
        masks_late: bool = False,
    ) -> None:
        """`matcher` belongs to this choice alone, and is None if the output is unconstrained. With `masks_late` a step
        may begin before the mask for it is known. Raises SequenceFailed if the grammar cannot be started.
        """
        self.id = id
        self.request = request
        self.choice = choice
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.num_computed = 0
        self.num_pending = 0
        self.num_cached: int | None = None
        """Prompt tokens that came from the prefix cache when the sequence first ran; None until then."""
        first = request.prompt_logprobs_from
        # The last prompt token's logits belong to the first generated one.
        self.scores = range(0) if first is None else range(max(first, 1) - 1, self.num_prompt - 1)
        """Positions whose logits are still needed to score the known token that follows them; excludes those that a
        step in flight computes."""
        self.unheard_logprobs: list[TokenLogprob] = []
        """Prompt log-probabilities that arrived after the abort; delivered with a choice forked from this one."""
        self.pooled: list[float] | None = None
        self.max_len = max_len
        """Length at which the sequence ends: prompt and max_tokens, within the context, or the end of its structure."""
        self.closing = FinishReason.LENGTH
        """The finish reason when `max_len` is reached."""
        self.pages: list[int] = []
        self.state = -1
        """Its slot for recurrent states while it runs, if the model has such: the state after `num_computed` tokens."""
        self.num_unapplied = 0
        """Accepted drafts behind which its state still is: the next chunk applies them first."""
        self.finish_reason: FinishReason | None = None
        params = request.params
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        self.looks_back = (
            (matcher is not None and not (masks_late and _waits_for_mask_alone(request)))
            or any(len(word) > 1 for word in request.bad_word_ids)
            or bool(penalised and (params.n > 1 or params.top_n_sigma))
        )
        """Whether the step that samples the next token must wait until all earlier tokens are known: they decide what a
        structure allows or a multi-token bad word bans, a forked choice inherits token counts for its penalties, and
        top-n-sigma is computed after penalties."""
        endless = params.max_tokens is None and not params.ignore_eos
        self._loops = LoopWatch() if endless else None
        self.stop_ids = request.stop_ids
        self.matcher = matcher
        self.mask: memoryview | None = None
        """Bit mask of the tokens allowed after the known ones (`Matcher.mask`); None if any token is allowed."""
        self.num_forced = 0
        """Undelivered tokens at the end that were not sampled, because the grammar allowed no others."""
        self.forced_logprobs: list[TokenLogprob] = []
        """Log-probabilities of the forced tokens computed so far, if the request asks for them."""
        self.drafter: Drafter | None = None
        """Guesses the next tokens, if `engine.speculation` wants it to."""
        self.is_drafted = False
        """Whether a step in flight verifies drafts: nothing can be computed after them before its results are known."""
        if matcher is not None:
            self._settle(matcher)

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.num_computed}/{len(self.token_ids)} computed, {self.num_output} out)"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known(self) -> int:
        return len(self.token_ids) - self.num_pending

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def runnable(self) -> bool:
        """Whether a step can include it: not if all that is left is a last token that nothing follows, nor if the next
        sample depends on a token that is still pending.
        """
        num_tokens = len(self.token_ids)
        if self.num_pending:
            return num_tokens < self.max_len and not self.looks_back and not self.is_drafted
        return self.num_computed < num_tokens

    def expect(self) -> None:
        """Reserves the place of a token that is being sampled."""
        self.token_ids.append(PENDING)
        self.num_pending += 1

    def learn(self, token_id: int) -> bool:
        """Fills in the first pending token. Returns whether the output is now stuck in a loop and should end."""
        self.token_ids[len(self.token_ids) - self.num_pending] = token_id
        self.num_pending -= 1
        if self._loops is None:
            return False
        if self.mask is not None and self.matcher is not None and not self.matcher.is_free:
            looping = self._loops.take(self.token_ids, self.num_prompt, self.num_known, _PATIENCE_IN_STRUCTURES)
            return looping and _leaves_choice(self.mask)
        looping = self._loops.take(self.token_ids, self.num_prompt, self.num_known)
        return looping and self.num_known - self.num_prompt >= self.request.params.min_tokens

    def follow(self, token_id: int) -> str | None:
        """Advances the matcher by the token that was just learned. Returns the reason if it cannot go on."""
        assert self.matcher is not None
        try:
            self.matcher.take(token_id)
            self._settle(self.matcher)
        except SequenceFailed as error:
            return error.message
        return None

    def _settle(self, matcher: Matcher) -> None:
        """Appends forced tokens, if the request uses jump_forward, and computes the mask for the token after them."""
        constraint = self.request.constraint
        if constraint is not None and constraint.jump_forward:
            self._jump(matcher)
        if matcher.is_done:
            self._close()
        elif self.num_known < self.max_len:
            self.mask = self._mask_of(matcher)

    def _mask_of(self, matcher: Matcher) -> memoryview | None:
        mask = matcher.mask()
        return self._with_stops(mask, matcher) if mask is not None and self.request.params.stop_token_ids else mask

    def _jump(self, matcher: Matcher) -> None:
        first = self.num_tokens
        for token in matcher.forced()[: self.max_len - first]:
            self.token_ids.append(token)
            if self._loops is not None:
                self._loops.take(self.token_ids, self.num_prompt, self.num_tokens)
            if token in self.stop_ids:
                self._close()
                break
            matcher.take(token)
        self.num_forced = self.num_tokens - first
        if self.num_forced and self.request.params.logprobs is not None:
            self.scores = range(self.scores.start if self.scores else first - 1, self.num_tokens - 1)

    def _close(self) -> None:
        """Ends the sequence after its known tokens."""
        self.max_len, self.closing = self.num_known, FinishReason.STOP

    def _with_stops(self, mask: memoryview, matcher: Matcher) -> memoryview:
        """The mask with the request's stop tokens allowed where the structure may end, and banned before it begins."""
        words = bytearray(mask)
        most = 8 * len(words)
        if matcher.is_free:
            for token in self.request.params.stop_token_ids:
                words[token >> 3] &= ~(1 << (token & 7))
        elif any(token < most and words[token >> 3] >> (token & 7) & 1 for token in self.request.eos_ids):
            for token in self.request.params.stop_token_ids:
                words[token >> 3] |= 1 << (token & 7)
        return memoryview(words).cast("I")

    def supposing(self, token_ids: tuple[int, ...], mask: memoryview | None = None) -> Self:
        """A read-only copy with these tokens appended and this mask, for sampling the token after them."""
        twin = copy(self)
        twin.token_ids, twin.mask = [*self.token_ids, *token_ids], mask
        return twin

    def masks_along(self, token_ids: tuple[int, ...]) -> list[memoryview | None]:
        """The mask after each of these tokens, if they came next. Ends before the first token that the constraint does
        not allow, or after which nothing is sampled. The sequence must be constrained, and all its tokens known.
        """
        assert self.matcher is not None
        masks, mask = list[memoryview | None](), self.mask
        try:
            matcher = self.matcher.copy()
            for token in token_ids:
                if (mask is not None and not _allows(mask, token)) or token in self.stop_ids:
                    break
                matcher.take(token)
                if matcher.is_done:
                    break
                # The matcher writes its next mask to the same place.
                mask = None if (own := self._mask_of(matcher)) is None else memoryview(bytes(own)).cast("I")
                masks.append(mask)
        except SequenceFailed:
            # Ignored here: it fails again once the sequence gets there.
            pass
        return masks

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: priority, then turn, then arrival."""
        return self.request.priority, self.request.turn, self.id

    @property
    def next_scored(self) -> int:
        """First position still to be scored; num_tokens if there is none."""
        return self.scores.start if self.scores else self.num_tokens

    @property
    def is_scored(self) -> bool:
        """Whether positions are still to be scored one at a time."""
        return bool(self.scores) and not self.request.one_pass

    @property
    def stops_banned(self) -> bool:
        """Whether the next token must not end the sequence."""
        return self.num_output < self.request.params.min_tokens


def _waits_for_mask_alone(request: Request) -> bool:
    """Whether a constrained output's next token waits for nothing but its mask while the last token is pending: forced
    tokens would come first, and other logit edits are ordered before or after the mask.
    """
    params, constraint = request.params, request.constraint
    edited = params.logit_bias or params.min_tokens or params.top_n_sigma or request.bad_word_ids
    return constraint is not None and not constraint.jump_forward and not edited


def _allows(mask: memoryview, token: int) -> bool:
    return bool(mask.cast("B")[token >> 3] >> (token & 7) & 1)


def _leaves_choice(mask: memoryview) -> bool:
    """Whether the mask allows more than one token."""
    return int.from_bytes(mask, "little").bit_count() > 1
