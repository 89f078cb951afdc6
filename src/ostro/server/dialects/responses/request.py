"""Translates a request to /v1/responses into a chat request. The only place that knows what items mean."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ostro.answers.tools import ReasoningSettings, Tool, ToolChoice
from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.schemas.responses import (
    AllowedToolsChoice,
    ChoiceWord,
    CustomCallItem,
    CustomCallOutputItem,
    CustomTool,
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    GrammarFormatOfTool,
    HostedTool,
    InputItem,
    ItemPart,
    MessageItem,
    NamedTool,
    NamespaceTool,
    ReasoningItem,
    ResponseInput,
)
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.dialects.responses.items import Json
from ostro.server.dialects.turns import Turns
from ostro.text.chat import Message

_SEALED = "ostro1."
_TOOL_FIELD = re.compile(r"tools\[(\d+)\]\.(function\.parameters|custom\.format)")


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The request's tools as the model is offered them."""

    tools: tuple[Tool, ...] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of each tool, by the name that the model sees, `namespace.name`."""
    places: tuple[str, ...] = ()
    """Each tool's path in the request, such as `tools[2].tools[0]`."""
    left_out: tuple[str, ...] = ()
    """Hosted kinds of tools in the request."""
    shown: Sequence[Json] = ()
    """The others, as the response repeats them."""

    def named(self, param: str | None) -> str | None:
        """Translates an error's `param` that names a field of a chat tool into the field's name in this request."""
        found = _TOOL_FIELD.fullmatch(param or "")
        if found is None:
            return param
        return f"{self.places[int(found[1])]}.{'format' if found[2] == 'custom.format' else 'parameters'}"


def offered_tools(request: ResponseInput) -> OfferedTools:
    tools: list[Tool] = []
    places: list[str] = []
    namespaces: dict[str, tuple[str, str]] = {}
    left_out: list[str] = []
    for number, tool in enumerate(request.tools):
        match tool:
            case HostedTool(type=kind):
                left_out.append(kind)
            case NamespaceTool(name=space):
                for place, inner in enumerate(tool.tools):
                    name = full_name(space, inner.name)
                    namespaces[name] = space, inner.name
                    tools.append(_tool(inner, name))
                    places.append(f"tools[{number}].tools[{place}]")
            case FunctionTool() | CustomTool():
                tools.append(_tool(tool, tool.name))
                places.append(f"tools[{number}]")
    shown = [tool.model_dump(by_alias=True) for tool in request.tools if not isinstance(tool, HostedTool)]
    return OfferedTools(tuple(tools), namespaces, tuple(places), tuple(dict.fromkeys(left_out)), shown)


def chat_request(
    request: ResponseInput,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    params: SamplingParams,
) -> ChatRequest:
    """`params` are what the request and the operator set."""
    return ChatRequest(
        messages=messages,
        params=params,
        tools=tuple(tools),
        tool_choice=tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning=ReasoningSettings(effort=request.reasoning.effort),
        template_kwargs=request.chat_template_kwargs,
        jump_forward=request.jump_forward,
        format_source=request.format_source,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _tool(tool: FunctionTool | CustomTool, name: str) -> Tool:
    if isinstance(tool, FunctionTool):
        return Tool(
            name=name, description=tool.description, parameters=tool.parameters or None, strict=tool.strict is True
        )
    form = tool.format
    grammar = form if isinstance(form, GrammarFormatOfTool) else None
    return Tool(
        name=name,
        description=tool.description,
        is_custom=True,
        regex=grammar.definition if grammar is not None and grammar.syntax == "regex" else None,
        grammar=grammar.definition if grammar is not None and grammar.syntax == "lark" else None,
    )


def tool_choice(request: ResponseInput) -> ToolChoice:
    """Raises BadRequest if nothing that can be called here may be, and something must be."""
    match request.tool_choice:
        case ChoiceWord(type=mode):
            return ToolChoice(mode=mode)
        case NamedTool(namespace=space, name=name):
            return ToolChoice(mode="named", name=full_name(space, name))
        case AllowedToolsChoice(mode=mode, tools=entries):
            names = frozenset(full_name(each.namespace, each.name) for each in entries if isinstance(each, NamedTool))
            if mode == "required" and not names:
                raise BadRequest(
                    "tool_choice requires a call, and allows only tools that cannot run here. Allow a function or a "
                    "custom tool, or set its mode to auto.",
                    param="tool_choice",
                )
            return ToolChoice(mode=mode, allowed=names)


def conversation(instructions: str | None, items: Sequence[InputItem], *, first: int = 0) -> list[Message]:
    """The items as messages. Item references must have been replaced. `first` is the index of the request's own first
    item; those before it come from a stored response.
    """
    turns = Turns(merges=False)
    if instructions:
        turns.say("system", [instructions])
    for number, item in enumerate(items, -first):
        match item:
            case MessageItem(role=role):
                turns.say("system" if role == "developer" else role, _texts(item.content))
            case FunctionCallItem():
                turns.call(item.call_id, full_name(item.namespace, item.name), item.arguments)
            case CustomCallItem():
                turns.call(item.call_id, full_name(item.namespace, item.name), item.input, is_custom=True)
            case FunctionCallOutputItem() | CustomCallOutputItem():
                turns.result(item.call_id, _texts(item.output), param=f"input[{number}].call_id")
            case ReasoningItem():
                turns.reason(_reasoning(item))
    return turns.messages()


def leaves_trace(item: InputItem) -> bool:
    """Whether the item adds anything to a conversation; empty reasoning does not."""
    return not isinstance(item, ReasoningItem) or bool(_reasoning(item))


def _texts(parts: Iterable[ItemPart]) -> list[str]:
    return [part.text for part in parts]


def _reasoning(item: ReasoningItem) -> str:
    if item.content:
        return "\n\n".join(_texts(item.content))
    if item.encrypted_content is not None and (text := unsealed(item.encrypted_content)) is not None:
        return text
    return "\n\n".join(_texts(item.summary))


def sealed(reasoning: str) -> str:
    """The reasoning as `encrypted_content`, so that a client that keeps only this can send it back. It is encoded, not
    encrypted: clients get the same text in the clear.
    """
    return _SEALED + base64.b64encode(reasoning.encode()).decode("ascii")


def unsealed(content: str) -> str | None:
    """None if another server made it."""
    if not content.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return None
