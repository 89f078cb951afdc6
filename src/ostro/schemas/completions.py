"""POST /v1/completions: request, response and the events of a streamed one."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from ostro.sampling_params import SamplingParams
from ostro.schemas.fields import MAX_PROMPTS, Prompts
from ostro.schemas.generation import FinishReason, GenerationRequest, PromptLogprobs, Usage
from ostro.schemas.wire import WireModel, refusal

DEFAULT_MAX_TOKENS = 16
MAX_BAD_WORD_CHARACTERS_OF_ALL = 1 << 20
MAX_LOGIT_BIAS_OF_ALL = 1 << 18


class CompletionRequest(GenerationRequest):
    ignored: ClassVar[frozenset[str]] = GenerationRequest.ignored | {"prediction"}
    unserved: ClassVar[dict[str, tuple[object, ...]]] = {"suffix": ("",)}

    # Always a list here: a lone prompt is a list of one.
    prompt: Prompts
    """Up to 2048 prompts."""
    max_tokens: int | None = None
    """0 generates none, to score the prompt only. None is 16, or `--default-max-tokens`."""
    echo: bool = False
    """Return the prompt before its continuation and, with logprobs, its tokens' log-probabilities too."""
    logprobs: int | None = None
    """0 to 20 alternatives per token."""
    best_of: int | None = None
    """Must equal n: choices are not ranked."""

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise refusal("best_of", f"must equal n ({self.n}): choices are not ranked")
        if len(self.prompt) * self.n > MAX_PROMPTS:
            raise refusal("n", f"asks for more than {MAX_PROMPTS} choices over all prompts: lower it or split the list")
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        # The engine keeps a copy per prompt.
        for name, size, most, what in (
            ("bad_words", sum(map(len, self.bad_words)), MAX_BAD_WORD_CHARACTERS_OF_ALL, "characters"),
            ("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS_OF_ALL, "entries"),
        ):
            if len(self.prompt) * size > most:
                raise refusal(name, f"takes at most {most} {what} over all prompts: shorten it or split the list")
        return self

    def sampling_params(self) -> SamplingParams:
        # The echoed tokens' log-probabilities are the prompt's.
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return self._sampling(
            max_tokens=self.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=self.logprobs,
            prompt_logprobs=max((count for count in wanted if count is not None), default=None),
        )


class CompletionLogprobs(WireModel):
    """Parallel arrays, one entry per token. An echoed prompt's first token has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Where each token begins in the choice's text, in characters."""


class CompletionChoice(WireModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(WireModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice] = Field(min_length=1)
    usage: Usage


class CompletionChunkChoice(WireModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(WireModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
