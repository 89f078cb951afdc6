"""POST /v1/messages, Anthropic's API: requests, content blocks, and the response."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from ostro.sampling_params import SamplingParams
from ostro.schemas.fields import TemplateFields, Text, tagged, text_or_list
from ostro.schemas.generation import GenerationRequest, Words
from ostro.schemas.structured import FormatSource
from ostro.schemas.tools import MAX_TOOLS, Description, ToolName
from ostro.schemas.wire import RequestModel, WireModel, refusal
from ostro.structured import StructuredOutput

MAX_MESSAGES = 4096
MAX_BLOCKS = 1024

Name = Annotated[str, Field(min_length=1, max_length=256)]
BlockId = Annotated[str, Field(max_length=512)]
_CACHE = frozenset({"cache_control"})


def _text_block(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


# --- blocks ---------------------------------------------------------------------------------------------------------


class TextBlock(RequestModel):
    ignored: ClassVar[frozenset[str]] = _CACHE | {"citations"}

    type: Literal["text"]
    text: Text


_NOT_TEXT = ("image", "document", "search_result", "container_upload", "tool_reference")
_TextBlock = Annotated[TextBlock, tagged(TextBlock, unserved=_NOT_TEXT)]
TextBlocks = Annotated[
    list[_TextBlock],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
    text_or_list(list[_TextBlock], part=_text_block, what="text blocks"),
]


class ThinkingBlock(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(RequestModel):
    """Another server's encrypted reasoning, which cannot be read here: left out."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(RequestModel):
    ignored: ClassVar[frozenset[str]] = _CACHE | {"caller", "toolset_name"}

    type: Literal["tool_use"]
    id: BlockId
    name: Name
    input: dict[str, Any]


class ToolResultBlock(RequestModel):
    ignored: ClassVar[frozenset[str]] = _CACHE | {"toolset_name"}

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: TextBlocks = Field(default_factory=list)
    is_error: bool = False


_Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    tagged(
        TextBlock,
        ThinkingBlock,
        RedactedThinkingBlock,
        ToolUseBlock,
        ToolResultBlock,
        unserved=(
            *_NOT_TEXT,
            "bash_code_execution_tool_result",
            "code_execution_tool_result",
            "mcp_tool_result",
            "mcp_tool_use",
            "server_tool_use",
            "text_editor_code_execution_tool_result",
            "tool_search_tool_result",
            "web_fetch_tool_result",
            "web_search_tool_result",
        ),
    ),
]
Blocks = Annotated[
    list[_Block],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
    text_or_list(list[_Block], part=_text_block, what="content blocks"),
]
_KINDS_OF_ROLE: dict[str, tuple[type[RequestModel], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class InputMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        for number, block in enumerate(self.content):
            if not isinstance(block, _KINDS_OF_ROLE[self.role]):
                raise refusal(
                    f"content[{number}]", f"is a {block.type} block, which has no place in a {self.role} message"
                )
        return self


# --- tools and settings ---------------------------------------------------------------------------------------------


class Tool(RequestModel):
    """Kinds that Anthropic's servers define or run are refused: describe a tool by its input_schema instead."""

    ignored: ClassVar[frozenset[str]] = _CACHE | {
        "allowed_callers",
        "defer_loading",
        "eager_input_streaming",
        "input_examples",
    }

    type: Literal["custom"] = "custom"
    name: ToolName
    description: Description | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Whether a schema that cannot be enforced exactly is refused. None enforces what can be."""

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, data: object) -> object:
        if isinstance(data, dict) and isinstance(kind := data.get("type"), str) and kind != "custom":
            raise refusal(
                "type", f"{kind[:64]} is not supported: describe the tool by its input_schema", kind="unsupported"
            )
        return data


class AutoChoice(RequestModel):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(RequestModel):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool = False


class NoChoice(RequestModel):
    type: Literal["none"]


class Thinking(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """The last two leave it to the model."""
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Only with enabled: maximum number of reasoning tokens."""

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.budget_tokens is not None and self.type != "enabled":
            raise refusal("budget_tokens", "is only for thinking of type enabled")
        return self


class JsonOutput(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[JsonOutput, tagged(JsonOutput)] | None = None


# --- the request ----------------------------------------------------------------------------------------------------


class MessagesInput(GenerationRequest, TemplateFields):
    """The model's input: shared by creating a message and by counting its tokens."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "betas",
            "cache_control",
            "context_management",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "stream_options",
            "user_profile_id",
            "workspace_id",
        }
    )
    unserved: ClassVar[dict[str, tuple[object, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "n": (1,),
        "prompt_logprobs": (),
        "stop": ([],),
    }

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """If the last one is the assistant's, the answer continues it."""
    system: TextBlocks = Field(default_factory=list)
    """A text, or text blocks."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    """Described by their `input_schema`."""
    tool_choice: Annotated[AutoChoice | NamedChoice | NoChoice, tagged(AutoChoice, NamedChoice, NoChoice)] | None = None
    """`auto`, `any`, `tool` with a name, or `none`; `disable_parallel_tool_use` allows one call at most."""
    thinking: Thinking | None = None
    """None is the model's own default."""
    output_config: OutputConfig = OutputConfig()
    """`effort`, and a `format` of type `json_schema`."""

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.output_config.format is not None and super()._asked() is not None:
            complaint = "contradicts the other field that says what the output must look like: give only one of them"
            raise refusal("output_config", complaint)
        return self

    def _asked(self) -> tuple[FormatSource, StructuredOutput] | None:
        form = self.output_config.format
        if form is None:
            return super()._asked()
        source = FormatSource("output_config.format", "schema for output_config.format")
        with source.named_in_errors():
            return source, StructuredOutput.from_schema(form.schema_, jump_forward=self.jump_forward)


class CreateMessage(MessagesInput):
    max_tokens: Annotated[int, Field(ge=1)]
    """Fewer if the context has room for fewer."""
    stop_sequences: Words = Field(default_factory=list)

    def sampling_params(self) -> SamplingParams:
        params = self._sampling(max_tokens=self.max_tokens, logprobs=None, prompt_logprobs=None)
        return params.with_changes(stop=tuple(self.stop_sequences))


class CountMessageTokens(MessagesInput):
    """POST /v1/messages/count_tokens."""


# --- answers --------------------------------------------------------------------------------------------------------


class MessageText(WireModel):
    type: Literal["text"]
    text: str


class MessageThinking(WireModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(WireModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(WireModel):
    input_tokens: int
    """Without those found in the prefix cache."""
    cache_creation_input_tokens: int
    """Always 0: nothing is charged for."""
    cache_read_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AssistantMessage(WireModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(WireModel):
    """An event of a stream; its other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: str


class MessageTokens(WireModel):
    input_tokens: int


class MessagesErrorDetail(WireModel):
    type: str
    message: str


class MessagesError(WireModel):
    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None


class MessagesModel(WireModel):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    """Null before the model is loaded."""


class MessagesModelList(WireModel):
    data: list[MessagesModel]
    first_id: str | None
    last_id: str | None
    has_more: bool
