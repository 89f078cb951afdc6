"""One sequence: its token ids and counters. Knows no text, no tensors, and not which page comes from where."""

from enum import StrEnum

from ostro.engine.loops import LoopWatch
from ostro.engine.request import Request

PENDING = -1
"""Stands in token_ids for a token that is not known yet."""


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
        "finish_reason",
        "id",
        "looks_back",
        "max_len",
        "num_cached",
        "num_computed",
        "num_pending",
        "num_prompt",
        "num_scored",
        "pages",
        "pooled",
        "request",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, id: int, request: Request, *, choice: int = 0, max_len: int) -> None:
        self.id = id
        self.request = request
        self.choice = choice
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.num_computed = 0
        self.num_pending = 0
        self.num_cached: int | None = None
        """Prompt tokens that came from the prefix cache when the sequence first ran; None until then."""
        self.num_scored = 0
        """Prompt positions whose log-probabilities were delivered, or will be by a step under way."""
        self.pooled: list[float] | None = None
        self.max_len = max_len
        """Length at which the sequence ends: prompt and max_tokens, within the context."""
        self.pages: list[int] = []
        self.finish_reason: FinishReason | None = None
        params = request.params
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        self.looks_back = any(len(word) > 1 for word in request.bad_word_ids) or bool(
            penalised and (params.n > 1 or params.top_n_sigma)
        )
        """Whether whoever asks for the next token must know those before it: they may ban one, a choice that forks
        brings the counts of its tokens along, and top-n-sigma wants scores after penalties."""
        endless = params.max_tokens is None and not params.ignore_eos
        self._loops = LoopWatch() if endless else None
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else request.eos_ids)

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
        looping = self._loops.take(self.token_ids, self.num_prompt, self.num_known)
        return looping and self.num_known - self.num_prompt >= self.request.params.min_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: priority, then turn, then arrival."""
        return self.request.priority, self.request.turn, self.id

    @property
    def next_scored(self) -> int:
        """First position whose logits are still wanted for the prompt's log-probabilities; num_tokens if none."""
        first = self.request.prompt_logprobs_from
        if first is None:
            return self.num_tokens
        position = max(first, 1) - 1 + self.num_scored
        # The last prompt token's logits belong to the first generated one.
        return position if position < self.num_prompt - 1 else self.num_tokens

    @property
    def is_scored(self) -> bool:
        """Whether prompt positions are still to be scored, one by one."""
        return self.next_scored < self.num_tokens and not self.request.one_pass

    @property
    def stops_banned(self) -> bool:
        """Whether the next token must not end the sequence."""
        return self.num_output < self.request.params.min_tokens
