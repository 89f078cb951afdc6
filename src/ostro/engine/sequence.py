"""One sequence: its token ids and counters. Knows no text, no tensors, and not which page comes from where."""

from enum import StrEnum

from ostro.engine.constraint import Matcher
from ostro.engine.logprob import TokenLogprob
from ostro.engine.loops import LoopWatch
from ostro.engine.request import Request
from ostro.errors import SequenceFailed

PENDING = -1
"""Stands in token_ids for a token that is not known yet."""

# A structure may ask for repetition, as a table of zeros does: only a far longer loop counts there.
_PATIENCE_IN_STRUCTURES = 8


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    """It ran in a loop, and nobody had set a limit."""
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
        "finish_reason",
        "forced_logprobs",
        "id",
        "looks_back",
        "mask",
        "matcher",
        "max_len",
        "num_cached",
        "num_computed",
        "num_forced",
        "num_pending",
        "num_prompt",
        "pages",
        "pooled",
        "request",
        "scores",
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
        """`matcher` is the choice's own, if its output is constrained; with `masks_late` a step may begin before the
        mask for it is known. Raises SequenceFailed if it cannot begin.
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
        """Positions whose logits are still wanted for the log-probability of the known token that follows them; without
        those that a step under way brings."""
        self.unheard_logprobs: list[TokenLogprob] = []
        """Of prompt tokens, that arrived after it was aborted; for a choice that has forked from it since."""
        self.pooled: list[float] | None = None
        self.max_len = max_len
        """Length at which the sequence ends: prompt and max_tokens, within the context, or where its structure does."""
        self.closing = FinishReason.LENGTH
        """Why it ends there."""
        self.pages: list[int] = []
        self.finish_reason: FinishReason | None = None
        params = request.params
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        self.looks_back = (
            (matcher is not None and not (masks_late and _waits_for_mask_alone(request)))
            or any(len(word) > 1 for word in request.bad_word_ids)
            or bool(penalised and (params.n > 1 or params.top_n_sigma))
        )
        """Whether a step that samples the next token cannot begin before those before it are known: they decide what a
        structure allows, they may ban one, a choice that forks brings the counts of its tokens along, and top-n-sigma
        wants scores after penalties."""
        endless = params.max_tokens is None and not params.ignore_eos
        self._loops = LoopWatch() if endless else None
        self.stop_ids = request.stop_ids
        self.matcher = matcher
        self.mask: memoryview | None = None
        """Tokens that may follow those that are known, in the matcher's words; None if any may."""
        self.num_forced = 0
        """Tokens at the end that were not sampled, since no others were possible, and that are not delivered yet."""
        self.forced_logprobs: list[TokenLogprob] = []
        """Of those, as far as they are known; only if they are wanted."""
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
        """Whether a step can take it on: not if nothing is left to compute but a last token, of which nothing follows,
        nor if what is sampled next depends on a token that is not known yet.
        """
        if self.num_pending:
            return self.num_tokens < self.max_len and not self.looks_back
        return self.num_computed < self.num_tokens

    def expect(self) -> None:
        """A token is being sampled: its place is taken until it is known."""
        self.token_ids.append(PENDING)
        self.num_pending += 1

    def learn(self, token_id: int) -> bool:
        """Fills in the first token that was expected. Whether the output runs in a loop by it that should end."""
        self.token_ids[self.num_known] = token_id
        self.num_pending -= 1
        if self._loops is None:
            return False
        if self.mask is not None and self.matcher is not None and not self.matcher.is_free:
            looping = self._loops.take(self.token_ids, self.num_prompt, self.num_known, _PATIENCE_IN_STRUCTURES)
            return looping and _leaves_choice(self.mask)
        looping = self._loops.take(self.token_ids, self.num_prompt, self.num_known)
        return looping and self.num_known - self.num_prompt >= self.request.params.min_tokens

    def follow(self, token_id: int) -> str | None:
        """Lets the matcher take the token that was just learned. Returns why it cannot go on, if it cannot."""
        assert self.matcher is not None
        try:
            self.matcher.take(token_id)
            self._settle(self.matcher)
        except SequenceFailed as error:
            return error.message
        return None

    def _settle(self, matcher: Matcher) -> None:
        """Appends the tokens that must come next, if the request asks for that, and finds out which may come then."""
        constraint = self.request.constraint
        if constraint is not None and constraint.jump_forward:
            self._jump(matcher)
        if matcher.is_done:
            self._close()
        elif self.num_known < self.max_len:
            self.mask = matcher.mask()
            if self.mask is not None and self.request.params.stop_token_ids:
                self.mask = self._with_stops(self.mask, matcher)

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
        """Nothing follows the tokens that are known."""
        self.max_len, self.closing = self.num_known, FinishReason.STOP

    def _with_stops(self, mask: memoryview, matcher: Matcher) -> memoryview:
        """Where the structure may end, any of the tokens that end the sequence may end it; before it begins, none."""
        words = bytearray(mask)
        most = 8 * len(words)
        if matcher.is_free:
            for token in self.request.params.stop_token_ids:
                words[token >> 3] &= ~(1 << (token & 7))
        elif any(token < most and words[token >> 3] >> (token & 7) & 1 for token in self.request.eos_ids):
            for token in self.request.params.stop_token_ids:
                words[token >> 3] |= 1 << (token & 7)
        return memoryview(words).cast("I")

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: priority, then turn, then arrival."""
        return self.request.priority, self.request.turn, self.id

    @property
    def next_scored(self) -> int:
        """First position that is still to be scored; num_tokens if none is."""
        return self.scores.start if self.scores else self.num_tokens

    @property
    def is_scored(self) -> bool:
        """Whether positions are still to be scored, one by one."""
        return bool(self.scores) and not self.request.one_pass

    @property
    def stops_banned(self) -> bool:
        """Whether the next token must not end the sequence."""
        return self.num_output < self.request.params.min_tokens


def _waits_for_mask_alone(request: Request) -> bool:
    """Whether the mask is all that is missing for the next token of a constrained output while the last is not known:
    forced tokens would come first, and other changes of its scores are made before the mask, or after it.
    """
    params, constraint = request.params, request.constraint
    edited = params.logit_bias or params.min_tokens or params.top_n_sigma or request.bad_word_ids
    return constraint is not None and not constraint.jump_forward and not edited


def _leaves_choice(mask: memoryview) -> bool:
    """Whether more than one token may come."""
    return int.from_bytes(mask, "little").bit_count() > 1
