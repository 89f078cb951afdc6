"""POST /v1/responses and its relatives: requests, input items, and the response object."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from ostro.sampling_params import MAX_LOGPROBS, SamplingParams
from ostro.schemas.chat import TopLogprob
from ostro.schemas.fields import TemplateFields, Text, tagged, text_or_list
from ostro.schemas.generation import GenerationRequest
from ostro.schemas.structured import FormatSource, GrammarText
from ostro.schemas.tools import MAX_TOOLS, Description, ToolName
from ostro.schemas.wire import RequestModel, WireModel, left_out, refusal
from ostro.structured import StructuredOutput

MAX_ITEMS = 4096
MAX_PARTS = 1024
MAX_METADATA = 16

_STATUS = frozenset({"status"})
Name = Annotated[str, Field(min_length=1, max_length=256)]
ItemId = Annotated[str, Field(max_length=512)]

# --- input items ----------------------------------------------------------------------------------------------------


class ItemText(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text


class ItemRefusal(RequestModel):
    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


ItemPart = Annotated[
    ItemText | ItemRefusal,
    tagged(
        ItemText,
        ItemRefusal,
        unserved=("input_image", "input_file", "input_audio", "computer_screenshot"),
    ),
]
ItemParts = Annotated[
    list[ItemPart],
    Field(max_length=MAX_PARTS, fail_fast=True),
    text_or_list(list[ItemPart], part=lambda text: {"type": "input_text", "text": text}, what="text parts"),
]


class MessageItem(RequestModel):
    ignored: ClassVar[frozenset[str]] = _STATUS | {"phase"}

    type: Literal["message"] = "message"
    id: ItemId | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemParts


class FunctionCallItem(RequestModel):
    ignored: ClassVar[frozenset[str]] = _STATUS | {"async", "caller", "parsed_arguments"}

    type: Literal["function_call"]
    id: ItemId | None = None
    call_id: ItemId
    namespace: Name | None = None
    name: Name
    arguments: Text


class FunctionCallOutputItem(RequestModel):
    ignored: ClassVar[frozenset[str]] = _STATUS | {"caller", "name", "namespace"}

    type: Literal["function_call_output"]
    id: ItemId | None = None
    call_id: ItemId
    output: ItemParts


class CustomCallItem(RequestModel):
    ignored: ClassVar[frozenset[str]] = _STATUS | {"async", "caller"}

    type: Literal["custom_tool_call"]
    id: ItemId | None = None
    call_id: ItemId
    namespace: Name | None = None
    name: Name
    input: Text


class CustomCallOutputItem(RequestModel):
    ignored: ClassVar[frozenset[str]] = _STATUS | {"caller", "name", "namespace"}

    type: Literal["custom_tool_call_output"]
    id: ItemId | None = None
    call_id: ItemId
    output: ItemParts


class ReasoningItem(RequestModel):
    ignored: ClassVar[frozenset[str]] = _STATUS

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: ItemParts = Field(default_factory=list)
    content: ItemParts = Field(default_factory=list)
    encrypted_content: Text | None = None


class ItemReference(RequestModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: ItemId


def _untagged(value: dict[str, Any]) -> type[RequestModel] | None:
    if "role" in value:
        return MessageItem
    return ItemReference if value.keys() == {"id"} else None


InputItem = Annotated[
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomCallItem
    | CustomCallOutputItem
    | ReasoningItem
    | ItemReference,
    tagged(
        MessageItem,
        FunctionCallItem,
        FunctionCallOutputItem,
        CustomCallItem,
        CustomCallOutputItem,
        ReasoningItem,
        ItemReference,
        untagged=_untagged,
        unserved=(
            "additional_tools",
            "apply_patch_call",
            "apply_patch_call_output",
            "code_interpreter_call",
            "compaction",
            "compaction_trigger",
            "computer_call",
            "computer_call_output",
            "file_search_call",
            "image_generation_call",
            "local_shell_call",
            "local_shell_call_output",
            "mcp_approval_request",
            "mcp_approval_response",
            "mcp_call",
            "mcp_list_tools",
            "program",
            "program_output",
            "shell_call",
            "shell_call_output",
            "tool_search_call",
            "tool_search_output",
            "web_search_call",
        ),
    ),
]
InputItems = Annotated[
    list[InputItem],
    Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
    text_or_list(list[InputItem], part=lambda text: {"type": "message", "role": "user", "content": text}, what="items"),
]

# --- tools ----------------------------------------------------------------------------------------------------------

_OF_TOOLS = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})


class FunctionTool(RequestModel):
    ignored: ClassVar[frozenset[str]] = _OF_TOOLS

    type: Literal["function"]
    name: ToolName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema. None is a function without parameters."""
    strict: bool | None = None
    """Whether a schema that cannot be enforced exactly is refused. None enforces what can be."""


class TextFormatOfTool(RequestModel):
    type: Literal["text"]


class GrammarFormatOfTool(RequestModel):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: GrammarText


class CustomTool(RequestModel):
    ignored: ClassVar[frozenset[str]] = _OF_TOOLS

    type: Literal["custom"]
    name: ToolName
    description: Description | None = None
    format: (
        Annotated[
            TextFormatOfTool | GrammarFormatOfTool,
            tagged(TextFormatOfTool, GrammarFormatOfTool),
        ]
        | None
    ) = None


class NamespaceTool(RequestModel):
    """Its tools are offered as `namespace.name`."""

    type: Literal["namespace"]
    name: ToolName
    description: Description | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, tagged(FunctionTool, CustomTool)]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


_HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)


class HostedTool(RequestModel):
    """A tool that OpenAI's own servers run. Accepted, because clients send these unasked, but left out with a line in
    the log. New kinds appear all the time, and a client whose tool is refused gives up.
    """

    type: Annotated[str, Field(max_length=64)]

    @model_validator(mode="before")
    @classmethod
    def _of_any_form(cls, data: object) -> object:
        return {"type": data.get("type")} if isinstance(data, dict) else data


def _hosted(tool: dict[str, Any]) -> type[HostedTool] | None:
    """HostedTool, unless it has parameters or a format: then it is the client's own tool, with a misspelt type."""
    return None if {"parameters", "format"} & tool.keys() else HostedTool


ResponseTool = Annotated[
    FunctionTool | CustomTool | NamespaceTool | HostedTool,
    tagged(FunctionTool, CustomTool, NamespaceTool, HostedTool, other=_hosted),
]


class NamedTool(RequestModel):
    type: Literal["function", "custom"]
    namespace: Name | None = None
    name: Name


class HostedChoice(RequestModel):
    """An entry of allowed_tools that names a hosted kind."""

    type: Annotated[str, Field(max_length=64)]

    @model_validator(mode="before")
    @classmethod
    def _of_any_form(cls, data: object) -> object:
        return {"type": data.get("type")} if isinstance(data, dict) else data


class AllowedToolsChoice(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[
        list[Annotated[NamedTool | HostedChoice, tagged(NamedTool, HostedChoice, other=lambda entry: HostedChoice)]],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
    ]


class ChoiceWord(RequestModel):
    """A tool choice that is a single word, as an object."""

    type: Literal["none", "auto", "required"]


def _as_object(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


ToolChoice = Annotated[
    ChoiceWord | NamedTool | AllowedToolsChoice,
    tagged(ChoiceWord, NamedTool, AllowedToolsChoice, unserved=_HOSTED),
    BeforeValidator(
        _as_object,
        json_schema_input_type=Literal["none", "auto", "required"] | ChoiceWord | NamedTool | AllowedToolsChoice,
    ),
]


# --- the request ----------------------------------------------------------------------------------------------------


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    name: Name
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(RequestModel):
    unserved: ClassVar[dict[str, tuple[object, ...]]] = {"verbosity": ("medium",)}

    format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaFormat,
        tagged(TextFormat, JsonObjectFormat, JsonSchemaFormat),
    ] = TextFormat(type="text")


class ReasoningConfig(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"context", "mode"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """If set, the whole reasoning is sent as the item's summary instead of its content."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of summary."""

    @property
    def wanted_summary(self) -> str | None:
        return self.summary or self.generate_summary


# OpenAI's fields that cannot change the output.
_WITHOUT_EFFECT = frozenset(
    {
        "access_programs",
        "client_metadata",
        "context_management",
        "image",
        "max_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
    }
)
# Data of hosted tools and images, neither of which exists here.
_INCLUDED_NEVER = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
Include = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


def _without_hosted(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [each for each in value if not (isinstance(each, str) and each in _INCLUDED_NEVER)]


Includes = Annotated[list[Include], BeforeValidator(_without_hosted)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
]


class ResponseInput(GenerationRequest, TemplateFields):
    """The model's input: shared by creating a response and by counting its tokens."""

    ignored: ClassVar[frozenset[str]] = _WITHOUT_EFFECT
    unserved: ClassVar[dict[str, tuple[object, ...]]] = {
        "conversation": (),
        "moderation": (),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
    }

    input: InputItems
    """A text, or items: messages, tool calls and their outputs, reasoning."""
    instructions: Text | None = None
    """The system text. A response that continues another one does not inherit it."""
    previous_response_id: ItemId | None = None
    """Continue that response: its input and output come before this input."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Reasoning included. None is `--default-max-tokens`, otherwise the model's own default,
    otherwise as many as fit."""
    text: TextConfig = TextConfig()
    """The format of the answer: `text`, `json_object`, or `json_schema` with its schema."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    """`function`, `custom` and `namespace`. Kinds that OpenAI hosts are left out, with a line in the log."""
    tool_choice: ToolChoice = ChoiceWord(type="auto")
    """`none`, `auto`, `required`, one tool by name, or `allowed_tools`."""
    parallel_tool_calls: bool = True
    """false: at most one call in an answer."""
    reasoning: ReasoningConfig = ReasoningConfig()
    """`effort`, and `summary`: with the latter the reasoning is sent as the item's summary, not as its content."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """`auto` drops items from the beginning of a conversation that is too long."""

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.text.format.type != "text" and super()._asked() is not None:
            raise refusal(
                "text", "contradicts the other field that says what the output must look like: give only one of them"
            )
        return self

    def _asked(self) -> tuple[FormatSource, StructuredOutput] | None:
        form = self.text.format
        if isinstance(form, TextFormat):
            return super()._asked()
        if isinstance(form, JsonObjectFormat):
            source = FormatSource("text.format", "text.format")
            return source, StructuredOutput(json_object=True, jump_forward=self.jump_forward)
        source = FormatSource("text.format", f"schema for text.format '{form.name}'")
        with source.named_in_errors():
            output = StructuredOutput.from_schema(
                form.schema_, strict=form.strict is True, jump_forward=self.jump_forward
            )
        return source, output


class CreateResponse(ResponseInput):
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """0 to 20 alternatives per token; `include` alone returns log-probabilities without alternatives."""
    include: Includes = Field(default_factory=list)
    """`reasoning.encrypted_content`, `message.output_text.logprobs`. What hosted tools would add is ignored."""
    store: bool | None = None
    """Keep the response for later requests, the default unless the store is off."""
    background: bool = False
    """Return at once and generate without a connection; GET the response later."""
    metadata: Metadata = Field(default_factory=dict)
    """Returned with the response."""
    user: str | None = None
    """Returned with the response."""

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        if self.background and self.store is False:
            raise refusal("background", "needs store: leave that out or set it to true")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include or self.top_logprobs is not None

    def sampling_params(self) -> SamplingParams:
        return self._sampling(
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            prompt_logprobs=None,
        )


class CountResponseTokens(ResponseInput):
    """POST /v1/responses/input_tokens."""


# --- answers --------------------------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputLogprob(WireModel):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(WireModel):
    type: Literal["output_text"]
    text: str
    annotations: list[str]
    """Always empty."""
    logprobs: list[OutputLogprob]


class OutputMessage(WireModel):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputFunctionCall(WireModel):
    type: Literal["function_call"]
    id: str
    call_id: str
    namespace: str | None = left_out()
    name: str
    arguments: str
    """JSON."""
    status: ItemStatus


class OutputCustomCall(WireModel):
    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    namespace: str | None = left_out()
    name: str
    input: str
    status: ItemStatus


class ReasoningText(WireModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class OutputReasoning(WireModel):
    type: Literal["reasoning"]
    id: str
    summary: list[ReasoningText]
    content: list[ReasoningText] | None = left_out()
    encrypted_content: str | None = left_out()
    """Send the item back with the next request of a tool loop, and the model sees its reasoning again."""
    status: ItemStatus


class IncompleteDetails(WireModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(WireModel):
    code: str
    message: str


class InputTokensDetails(WireModel):
    cached_tokens: int
    cache_write_tokens: int
    """Always 0: nothing is charged for."""


class OutputTokensDetails(WireModel):
    reasoning_tokens: int


class ResponseUsage(WireModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(WireModel):
    """The answer, with the request's settings."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputFunctionCall | OutputCustomCall | OutputReasoning]
    usage: ResponseUsage | None
    """Null before the end."""
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    """Without those that were left out."""
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    truncation: Literal["auto", "disabled"]
    store: bool
    background: bool
    metadata: dict[str, str]
    user: str | None


class ResponseEvent(WireModel):
    """An event of a stream; its other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
    """From 0, without gaps."""


class DeletedResponse(WireModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(WireModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItemList(WireModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
