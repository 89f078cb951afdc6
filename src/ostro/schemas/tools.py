"""Tools and tool choices as chat completions spell them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ostro.schemas.structured import GrammarText, SchemaObject
from ostro.schemas.wire import RequestModel, refusal, shape

MAX_TOOLS = 1024

# OpenAI allows 64 letters, digits, _ and -; tools of MCP servers have longer names, with dots and colons.
ToolName = Annotated[
    str,
    Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$"),
    shape("must have 1 to 128 letters, digits and _ . : / -"),
]
Description = Annotated[str, Field(max_length=1 << 20)]


class FunctionSpec(RequestModel):
    name: ToolName
    description: Description | None = None
    parameters: SchemaObject | None = None
    """JSON schema of the arguments. None is a function without arguments."""
    strict: bool = False
    """Whether a schema that cannot be enforced exactly is refused. If not, what cannot be enforced is ignored."""


class ToolGrammar(RequestModel):
    definition: GrammarText
    syntax: Literal["lark", "regex"]


class CustomFormat(RequestModel):
    type: Literal["text", "grammar"]
    grammar: ToolGrammar | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        if (self.type == "grammar") != (self.grammar is not None):
            raise refusal("grammar", 'goes with {"type": "grammar"}, and with no other')
        return self


class CustomSpec(RequestModel):
    name: ToolName
    description: Description | None = None
    format: CustomFormat | None = None
    """None is free text."""


class _OneKind(RequestModel):
    """An object whose `type` names the one other field that is given."""

    type: str

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        for name in type(self).model_fields:
            if name != "type" and (name == self.type) != (getattr(self, name) is not None):
                raise refusal(name, "is required" if name == self.type else f"has no place beside the type {self.type}")
        return self


class ToolSpec(_OneKind):
    """A function, whose arguments are JSON, or a custom tool, whose input is text."""

    type: Literal["function", "custom"]
    function: FunctionSpec | None = None
    custom: CustomSpec | None = None

    @property
    def name(self) -> str:
        return self.custom.name if self.custom is not None else self.function.name if self.function is not None else ""


class ToolReference(RequestModel):
    name: ToolName


class AllowedTool(_OneKind):
    type: Literal["function", "custom"]
    function: ToolReference | None = None
    custom: ToolReference | None = None

    @property
    def name(self) -> str:
        named = self.function or self.custom
        return "" if named is None else named.name


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ToolChoiceSpec(_OneKind):
    """One tool by name, or several that may be called."""

    type: Literal["function", "custom", "allowed_tools"]
    function: ToolReference | None = None
    custom: ToolReference | None = None
    allowed_tools: AllowedTools | None = None


ToolChoiceMode = Literal["none", "auto", "required"]
ToolChoiceField = Annotated[
    ToolChoiceMode | ToolChoiceSpec,
    shape(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": …}}, '
        '{"type": "custom", "custom": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


class ToolFields(RequestModel):
    """A request's fields about tools, in the order in which errors are reported."""

    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    """Functions with their parameters' JSON schemas, and custom tools."""
    tool_choice: ToolChoiceField = "auto"
    """none, auto, required, one tool by name, or allowed_tools."""
    parallel_tool_calls: bool = True
    """false: at most one call in an answer."""

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names: set[str] = set()
        for index, tool in enumerate(self.tools):
            if tool.name in names:
                raise refusal(f"tools[{index}].{tool.type}.name", f"{tool.name!r} is the name of an earlier tool too")
            names.add(tool.name)
        choice = self.tool_choice
        if isinstance(choice, str):
            if choice == "required" and not names:
                raise refusal("tool_choice", "needs tools: give some, or leave it out")
            return self
        wanted = choice.function or choice.custom
        chosen = [wanted.name] if wanted is not None else [each.name for each in _allowed(choice)]
        for name in chosen:
            if name not in names:
                raise refusal("tool_choice", f"names the tool {name!r}, which is not in tools")
        return self


def _allowed(choice: ToolChoiceSpec) -> list[AllowedTool]:
    return [] if choice.allowed_tools is None else choice.allowed_tools.tools
