"""Fields that all generation requests share: sampling, streaming, caching, priority.

The sampling fields are generated from SamplingParams. Types are checked here; only SamplingParams knows the ranges.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model, model_validator
from pydantic_core import PydanticCustomError

from ostro.sampling_params import MAX_LOGIT_BIAS, MAX_WORD_CHARACTERS, NEUTRAL, PARAMETERS, SamplingParams
from ostro.schemas.structured import StructuredFields
from ostro.schemas.wire import RequestModel, WireModel, left_out, refusal, shape

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
    """Checks the number of entries before they are parsed."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("refused", f"takes at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    return value


def _named_biases(value: object) -> object:
    """Checks the entries, whose keys are strings in JSON. Errors name the key at fault."""
    if not isinstance(value, dict):
        raise PydanticCustomError("refused", "must map token ids to numbers from -100 to 100")
    for key, bias in value.items():
        is_id = isinstance(key, int) or (isinstance(key, str) and key.isascii() and key.isdecimal())
        if not is_id or isinstance(bias, bool) or not isinstance(bias, int | float):
            named = {"key": reprlib.repr(key)}
            if not is_id:
                raise PydanticCustomError(
                    "refused", "has the key {key}, which is not a token id (an integer from 0)", named
                )
            raise PydanticCustomError("refused", "must map the key {key} to a number from -100 to 100", named)
    return value


TokenBiases = Annotated[
    dict[Annotated[int, Field(strict=False)], float],
    BeforeValidator(_named_biases),
    BeforeValidator(_few_biases),
]


def left_open(request: RequestModel) -> dict[str, Any]:
    """The request's values of fields for which a model may have its own default; None if left out."""
    return {name: getattr(request, name, None) for name in NEUTRAL}


# Parameters whose names or types differ between endpoints.
_APART = frozenset({"max_tokens", "default_max_tokens", "logprobs", "structured"})
_WIRE_NAMES = {name: each.wire_name or name for name, each in PARAMETERS.items() if name not in _APART}

# Type in SamplingParams -> type in JSON, and the factory of its empty default.
_FORMS: dict[object, tuple[object, type]] = {
    tuple[str, ...]: (Words, list),
    tuple[int, ...]: (Annotated[list[int], Field(fail_fast=True)], list),
    Mapping[int, float]: (TokenBiases, dict),
}


def _sampling_fields() -> dict[str, Any]:
    """A request field for each sampling parameter: its type and default."""
    made: dict[str, Any] = {}
    for each in fields(SamplingParams):
        if each.name not in _WIRE_NAMES:
            continue
        described = PARAMETERS[each.name]
        form, empty = _FORMS.get(each.type, (each.type, None))
        if described.neutral is not None:
            form = form | None  # type: ignore[operator]
        default = {"default": each.default} if empty is None else {"default_factory": empty}
        made[_WIRE_NAMES[each.name]] = (form, Field(**default, description=described.description))
    return made


if TYPE_CHECKING:

    class _SamplingFields(RequestModel):
        """The fields that code reads by name."""

        n: int
        temperature: float | None
        top_p: float | None
        bad_words: list[str]
        logit_bias: dict[int, float]
        prompt_logprobs: int | None
        truncate_prompt_tokens: int | None
        skip_special_tokens: bool

else:
    _SamplingFields = create_model("_SamplingFields", __base__=RequestModel, __module__=__name__, **_sampling_fields())


class GenerationRequest(_SamplingFields, StructuredFields):
    """Every sampling parameter, what the output must look like, and how the answer is sent."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
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
    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only with stream: include_usage adds a final usage event, continuous_usage_stats adds the usage to all events."""
    cache_salt: CacheSalt = ""
    """Prefixes are shared only between requests of the same salt."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Lower values run first."""

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
        given: dict[str, Any] = {name: getattr(self, wire_name) for name, wire_name in _WIRE_NAMES.items()}
        own = {"max_tokens": max_tokens, "default_max_tokens": default_max_tokens, "logprobs": logprobs}
        return SamplingParams(**(given | own | {"prompt_logprobs": prompt_logprobs, "structured": self.structured}))


FinishReason = Literal["stop", "length", "tool_calls", "repetition"]


class PromptTokensDetails(WireModel):
    cached_tokens: int


class CompletionTokensDetails(WireModel):
    reasoning_tokens: int | None = left_out()
    """Only if the model's reasoning is separated from its text."""
    accepted_prediction_tokens: int | None = left_out()
    """Only with `prediction`: tokens of it that were tried, and that the model wrote as well."""
    rejected_prediction_tokens: int | None = left_out()
    """Tokens of it that were tried in vain. They are not part of the completion and are not counted in it."""


class Usage(WireModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = left_out()
    """Only if there are any."""


class PromptLogprob(WireModel):
    """One token at one position of the prompt; an extension, in vLLM's form of `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
