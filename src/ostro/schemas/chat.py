"""POST /v1/chat/completions: request, response and the events of a streamed one."""

import json
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ostro.sampling_params import MAX_LOGPROBS, SamplingParams
from ostro.schemas.fields import TemplateFields, Text
from ostro.schemas.generation import FinishReason, GenerationRequest, PromptLogprobs, Usage
from ostro.schemas.tools import ToolFields
from ostro.schemas.wire import RequestModel, WireModel, left_out, refusal, shape

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128


class TextPart(RequestModel):
    # Marks prefixes to cache in Anthropic's API; here all prefixes are cached.
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["text"]
    text: Text


class FunctionCall(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: str
    arguments: Text = "{}"


class CustomCall(RequestModel):
    name: str
    input: Text


class ToolCall(RequestModel):
    # Left over from streams by clients that send back merged deltas.
    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if getattr(self, self.type) is None:
            raise refusal(self.type, "is required")
        return self

    def for_template(self) -> dict[str, object]:
        """As chat templates expect it: a custom tool's call becomes a function's, with the input as its argument."""
        if self.custom is not None:
            called = {"name": self.custom.name, "arguments": json.dumps({"input": self.custom.input})}
            return {"id": self.id, "type": "function", "function": called}
        return self.model_dump(exclude_none=True)


Content = Annotated[
    Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)],
    shape('must be a string or a list of {"type": "text", "text": …} parts: images, audio and files are not supported'),
]


class Prediction(RequestModel):
    """What the answer is expected to say, for most of its length, such as the file that it should edit."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Message(RequestModel):
    """Also accepts one of our own responses sent back, with all its nulls."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations"})
    unserved: ClassVar[dict[str, tuple[object, ...]]] = {"audio": (), "function_call": (), "refusal": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise refusal("content", "is required")
        return self

    def for_template(self) -> dict[str, object]:
        """As chat templates expect it: a developer message becomes a system message."""
        given = self.model_dump(exclude_none=True)
        if self.tool_calls is not None:
            given["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return given | {"role": "system" if self.role == "developer" else self.role}


class ReasoningFields(RequestModel):
    """A chat request's fields about reasoning."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Passed to templates that support it; `none` turns reasoning off if the template can."""
    enable_thinking: bool | None = None
    """Turns reasoning on or off if the template can. None is the template's default."""
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of reasoning tokens; 0 turns reasoning off."""
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    """Another name for thinking_token_budget."""
    reasoning_budget: Annotated[int, Field(ge=-1)] | None = None
    """llama.cpp's name for thinking_token_budget; -1 sets no limit."""
    include_reasoning: bool = True
    """false: the model still reasons, but the answer leaves the reasoning out."""

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        given = [name for name in _BUDGETS if getattr(self, name) is not None]
        if len({getattr(self, name) for name in given}) > 1:
            raise refusal(given[1], f"differs from {given[0]}: give only one of them")
        return self

    @property
    def budget(self) -> int | None:
        """Tokens of reasoning; None for no limit."""
        found = next((value for name in _BUDGETS if (value := getattr(self, name)) is not None), None)
        return None if found == -1 else found


_BUDGETS = ("thinking_token_budget", "thinking_budget", "reasoning_budget")


class ChatCompletionRequest(GenerationRequest, ToolFields, ReasoningFields, TemplateFields):
    unserved: ClassVar[dict[str, tuple[object, ...]]] = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """With the roles system, developer, user, assistant and tool; contents are text."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The older name of max_completion_tokens."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """None is `--default-max-tokens`, otherwise the model's own default, otherwise as many as fit."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """0 to 20; only with logprobs."""
    prediction: Prediction | None = None
    """What the answer is expected to say. Where it is right, the answer comes sooner, if `speculative` is on for the
    model's device and backend; the answer itself does not change."""
    add_generation_prompt: bool = True
    """false: the prompt does not end with the start of the model's answer."""
    continue_final_message: bool = False
    """The answer continues the last message, whose text the prompt ends with."""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs", "needs logprobs: set that to true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise refusal("max_tokens", "differs from max_completion_tokens: give only one of them")
        return self

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        asks_for_prompt = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and asks_for_prompt:
            raise refusal("add_generation_prompt", "contradicts continue_final_message: set only one of them to true")
        return self

    def sampling_params(self) -> SamplingParams:
        return self._sampling(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )

    def template_messages(self) -> list[dict[str, object]]:
        return [message.for_template() for message in self.messages]


class TopLogprob(WireModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(WireModel):
    token: str
    logprob: float
    bytes: list[int]
    """The exact bytes: the text has placeholders for incomplete characters."""
    top_logprobs: list[TopLogprob]


class ChatLogprobs(WireModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(WireModel):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class CalledCustomTool(WireModel):
    name: str
    input: str


class ChatToolCall(WireModel):
    """A call to a function or a custom tool, depending on `type`."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = left_out()
    custom: CalledCustomTool | None = left_out()


class ChatMessage(WireModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null if the answer consists of tool calls, or ended within the reasoning."""
    refusal: None = None
    reasoning_content: str | None = left_out()
    reasoning: str | None = left_out()
    """The same text: servers differ in what they call it."""
    tool_calls: list[ChatToolCall] | None = left_out()


class ChatChoice(WireModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    """`repetition`: the request set no limit, and the output got stuck in a loop."""


class ChatCompletionResponse(WireModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


# Events of streamed answers. For speed the server writes them without these models; tests compare the two.


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
    """Empty in the final usage chunk, which is sent if `include_usage` is set."""
    usage: Usage | None = None
