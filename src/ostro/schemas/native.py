"""/generate, /generate_stream, /loglikelihood, /pseudo_loglikelihood and /hrm/solve: lists in, lists out."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import SamplingParams
from ostro.schemas.fields import MAX_PROMPTS, Prompts, TokenIds
from ostro.schemas.generation import CacheSalt, FinishReason, Words, left_open
from ostro.schemas.structured import StructuredFields
from ostro.schemas.wire import RequestModel, WireModel, refusal

DEFAULT_MAX_TOKENS = 128


class GenerateRequest(StructuredFields):
    """The ranges are SamplingParams' own."""

    fallback: ClassVar[SamplingDefaults] = SamplingDefaults(temperature=0.7)
    """The default if neither the request, the server nor the model sets one."""

    model: str = "default"
    prompts: Prompts
    max_tokens: int | None = None
    """None is 128, or `--default-max-tokens`."""
    temperature: float | None = None
    """0 to 2; 0 is greedy. None is the model's own default, otherwise 0.7."""
    top_p: float | None = None
    """Above 0, up to 1. None is the model's own default, otherwise 1."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is running; without one, a random seed is drawn."""
    stop: Words = Field(default_factory=list)
    """At most 64 strings, each at most 1024 characters long."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt, at least 1; -1 keeps as many as fit next to the output."""
    cache_salt: CacheSalt = ""
    """Prefixes are shared only between requests of the same salt."""

    def sampling_params(self) -> SamplingParams:
        """Raises BadRequest that names a field out of its range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            **left_open(self),
            seed=self.seed,
            stop=tuple(self.stop),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            structured=self.structured,
        )


class TokenCounts(WireModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(WireModel):
    completions: list[str]
    """One per prompt, in order."""
    usage: TokenCounts


class GenerateEvent(WireModel):
    """New text for one prompt; the last event has only the usage."""

    index: int
    """The prompt's position in the list."""
    text: str
    finish_reason: FinishReason | None = None


class GenerateUsageEvent(WireModel):
    usage: TokenCounts


class PrefillRequest(RequestModel):
    model: str = "default"
    prompts: Prompts


class PrefillResponse(WireModel):
    num_tokens: list[int]
    """How many tokens of each prompt other servers find: those of its full pages, or fewer if they cannot be written.
    """


class LoglikelihoodRequest(RequestModel):
    """Prompts and continuations are both texts, or both token ids."""

    model: str = "default"
    prompts: Prompts
    continuations: Prompts
    """As many as prompts."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of a prompt, at least 1; -1 keeps what fits next to the continuation."""
    cache_salt: CacheSalt = ""
    """Prefixes are shared only between requests of the same salt."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.prompts) != len(self.continuations):
            counts = f"{len(self.prompts)} and {len(self.continuations)}"
            raise refusal("continuations", f"must be as many as prompts, got {counts}")
        return self


class LoglikelihoodResponse(WireModel):
    ll: list[float]
    """The log-likelihood of each continuation after its prompt: the sum over its tokens."""
    is_greedy: list[bool]
    """Whether each of its tokens is the most likely one at its position."""
    num_tokens: list[int]


class PseudoLoglikelihoodResponse(WireModel):
    pll: list[float]
    """The sum over a continuation's tokens in one pass, in which a position sees later tokens: not a likelihood."""
    num_tokens: list[int]


_Number = Annotated[int, Field(ge=0)]


class SolveRequest(RequestModel):
    """Inputs are as in upstream's datasets: all positions of a puzzle, padded as in training."""

    model: str = "default"
    inputs: Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    """Token ids of each puzzle, position by position."""
    puzzle_ids: Annotated[list[_Number], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    """Each puzzle's identifier, one per input; the default is 0, the blank identifier."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.puzzle_ids is not None and len(self.puzzle_ids) != len(self.inputs):
            counts = f"{len(self.inputs)} and {len(self.puzzle_ids)}"
            raise refusal("puzzle_ids", f"must be as many as inputs, got {counts}")
        return self


class SolveResponse(WireModel):
    predictions: list[list[int]]
    """The most likely token at each position of each puzzle, in order."""
    steps: list[int]
    """Outer steps that each puzzle took."""
    halted: list[bool]
    """Whether the q-head preferred to halt after the last step."""
    q_halt: list[float]
    """The q-head's logits: above 0, the model believes its answer is right."""
    q_continue: list[float]
