"""The events of streamed answers. For speed the server writes them without these models; tests compare the two."""

from typing import Literal

from ostro.schemas.chat import ChatLogprobs
from ostro.schemas.completions import CompletionLogprobs
from ostro.schemas.generation import FinishReason, Usage
from ostro.schemas.wire import WireModel


class FunctionDelta(WireModel):
    name: str | None = None
    arguments: str


class CustomToolDelta(WireModel):
    name: str | None = None
    input: str


class ToolCallDelta(WireModel):
    """A call's first delta has its id, type and name; the others continue its arguments."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomToolDelta | None = None


class ChatDelta(WireModel):
    """A choice's first delta has the role; its last is empty."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(WireModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(WireModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    """Empty in the last one, which has the usage."""
    usage: Usage | None = None


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
