"""What completions and chat completions have in common: how tokens are chosen, and how the answer is sent.

The types are checked here. The ranges are SamplingParams' own: there is one place that knows them.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ostro.sampling_params import MAX_LOGIT_BIAS, NEUTRAL, SamplingParams
from ostro.schemas.wire import RequestModel, WireModel, refusal, shape

MAX_WORD_CHARACTERS = 1024
MAX_SALT_CHARACTERS = 256
MAX_PRIORITY = 2**31 - 1


class StreamOptions(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """With include_usage: the usage so far in every event."""


CacheSalt = Annotated[str, Field(max_length=MAX_SALT_CHARACTERS)]

_WORD_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_WORD_CHARACTERS}

Word = Annotated[str, Field(max_length=MAX_WORD_CHARACTERS)]
Words = Annotated[
    list[Word],
    Field(fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    shape(f"must be a string or a list of strings, each of at most {MAX_WORD_CHARACTERS} characters"),
    WithJsonSchema({"anyOf": [_WORD_SCHEMA, {"type": "array", "items": _WORD_SCHEMA}]}),
]


def _few_biases(value: object) -> object:
    """Counted before they are read."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("refused", f"takes at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    return value


# JSON's keys are strings.
TokenBiases = Annotated[
    dict[Annotated[int, Field(strict=False)], float],
    shape("must map token ids to numbers from -100 to 100"),
    BeforeValidator(_few_biases),
]


def left_open(request: RequestModel) -> dict[str, Any]:
    """A request's values of the fields that have a default of the model's; None where it gives none."""
    return {name: getattr(request, name, None) for name in NEUTRAL}


class GenerationRequest(RequestModel):
    """Every field of OpenAI's that the engine has; below them, those that other servers' users know."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "parallel_tool_calls",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )

    model: str = "default"
    """A name from /v1/models; default is the first one."""
    n: int = 1
    """1 to 128; the prompt is computed once for all of them."""
    temperature: float | None = None
    """0 to 2; 0 is greedy. None is the model's own default, else 1."""
    top_p: float | None = None
    """Above 0, up to 1. None is the model's own default, else 1."""
    presence_penalty: float = 0.0
    """-2 to 2, over the output."""
    frequency_penalty: float = 0.0
    """-2 to 2, over the output."""
    logit_bias: TokenBiases = Field(default_factory=dict)
    """By token id, -100 to 100; at most 1024 of them."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs; none draws a fresh one."""
    stop: Words = Field(default_factory=list)
    """At most 64 of them, each of at most 1024 characters."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only with stream; its include_usage adds a last event with the usage, continuous_usage_stats has it in all."""

    top_k: int | None = None
    """0 and -1 keep all tokens. None is the model's own default, else 0."""
    min_p: float | None = None
    """0 to 1, relative to the likeliest token. None is the model's own default, else 0."""
    repetition_penalty: float | None = None
    """Above 0, up to 10; over prompt and output. 1 is off. None is the model's own default, else 1."""
    min_tokens: int = 0
    """No end before this many tokens."""
    bad_words: Words = Field(default_factory=list)
    """At most 1024 of them, each of at most 1024 characters, and 16384 characters over all of them."""
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field(default_factory=list)
    """At most 1024 of them."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    """0 to 20 alternatives for each token of the prompt; not in a stream."""
    truncate_prompt_tokens: int | None = None
    """Keep so many of the prompt's last tokens, at least 1; -1 keeps what the context leaves beside the output."""
    cache_salt: CacheSalt = ""
    """Prefixes are shared only between requests of the same salt."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Lower goes first."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "is only for streams: set stream to true or leave it out")
        return self

    def _sampling(
        self,
        *,
        max_tokens: int | None,
        default_max_tokens: int | None = None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Raises BadRequest that names a field out of its range."""
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            default_max_tokens=default_max_tokens,
            min_tokens=self.min_tokens,
            **left_open(self),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            bad_words=tuple(self.bad_words),
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_in_output=self.include_stop_str_in_output,
        )


FinishReason = Literal["stop", "length", "repetition"]


class PromptTokensDetails(WireModel):
    cached_tokens: int


class Usage(WireModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(WireModel):
    """One token at one place of the prompt; an extra, in the form that users of `prompt_logprobs` know."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
