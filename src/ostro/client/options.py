"""Types for the options of the client's methods. The server has the defaults and checks the ranges."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from ostro.sampling_params import SamplingOptions

Message = Mapping[str, object]
Messages = str | Sequence[Message]
"""A conversation; a plain string is a single user message."""
Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A text, several texts, token ids, or several lists of token ids."""
Words = str | Sequence[str]


Schema = Mapping[str, object] | str
"""A JSON schema, or its text."""


class StructuredOptions(TypedDict, total=False):
    """The format of the output: at most one field besides jump_forward."""

    response_format: Mapping[str, object]
    structured_outputs: Mapping[str, object]
    guided_json: Schema
    guided_regex: str
    guided_choice: Sequence[str]
    guided_grammar: str
    grammar: str
    json_schema: Schema
    regex: str
    ebnf: str
    jump_forward: bool


class _Sampling(SamplingOptions, StructuredOptions, total=False):
    model: str
    cache_salt: str
    priority: int


class ChatOptions(_Sampling, total=False):
    max_completion_tokens: int | None
    logprobs: bool
    top_logprobs: int | None
    tools: Sequence[Mapping[str, object]]
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, object]
    parallel_tool_calls: bool
    prediction: Mapping[str, object] | None
    reasoning_effort: str | None
    enable_thinking: bool | None
    thinking_token_budget: int | None
    thinking_budget: int | None
    reasoning_budget: int | None
    include_reasoning: bool
    chat_template_kwargs: Mapping[str, object]
    add_generation_prompt: bool
    continue_final_message: bool


class CompletionOptions(_Sampling, total=False):
    logprobs: int | None
    echo: bool
    best_of: int | None


class GenerateOptions(StructuredOptions, total=False):
    model: str
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: Words
    truncate_prompt_tokens: int | None
    cache_salt: str


class ScoreOptions(TypedDict, total=False):
    model: str
    truncate_prompt_tokens: int | None
    cache_salt: str


class ModelOption(TypedDict, total=False):
    model: str


class EmbeddingOptions(TypedDict, total=False):
    model: str
    encoding_format: Literal["float", "base64"]
    dimensions: int | None
    prompt_name: str | None
    truncate_prompt_tokens: int | None


class RerankOptions(TypedDict, total=False):
    model: str
    top_n: int | None
    return_documents: bool
    truncate_prompt_tokens: int | None


class RelevanceOptions(TypedDict, total=False):
    model: str
    truncate_prompt_tokens: int | None


class TokenizeOptions(TypedDict, total=False):
    model: str
    add_special_tokens: bool
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, object]]
    chat_template_kwargs: Mapping[str, object]
    return_token_strs: bool
