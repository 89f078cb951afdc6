"""Converts conversations with tools to the form that a template takes. Calls and results that it does not support are
written as text, so that they are never lost.
"""

import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from ostro.answers.formats import FORMATS, CallFormat, HarmonyCalls, JsonCalls, NamedCalls, PythonCalls, TaggedCalls
from ostro.answers.profile import TemplateProfile
from ostro.answers.tools import CUSTOM_INPUT, Tool
from ostro.errors import BadRequest
from ostro.text.chat import Message

_LETTERS = string.digits + string.ascii_letters
_SHORT_ID_LENGTH = 9

_INSTRUCTIONS = """\
You can call the functions below. Each line describes one, its parameters as a JSON schema:
{tools}

To call a function, write exactly this, with its name and its arguments in place of the example's:
{example}
The results are then given to you in <tool_response> blocks. If no function is of use, answer in plain text."""
_EXAMPLE = ("name", {"argument": "value"})


def template_tools(tools: Sequence[Tool]) -> list[dict[str, object]]:
    """The tools as templates expect them. A custom tool becomes a function that takes one string."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Tool) -> dict[str, object]:
    if not tool.is_custom:
        parameters = tool.parameters or {"type": "object", "properties": {}}
        return {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    format = tool.regex or tool.grammar
    told = f"The input must match this {'regular expression' if tool.regex else 'Lark grammar'}:\n{format}"
    description = "\n\n".join(filter(None, [tool.description, told if format else None]))
    parameters = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
    return {"name": tool.name, "description": description, "parameters": parameters}


def template_messages(messages: Sequence[Message], tools: Sequence[Tool], profile: TemplateProfile) -> list[Message]:
    """The conversation in the form that the template takes. `tools` are those that the template does not show."""
    turns: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        names |= {str(call.get("id")): _name(call) for call in _calls(message)}
        turns += _turns(message, profile, names)
    if tools:
        turns = _with_instructions(turns, tools, profile)
    if profile.late_system and profile.system and not profile.alternates:
        return turns
    return list(_merged(_without_system(turns, profile), profile))


def _turns(message: Message, profile: TemplateProfile, names: Mapping[str, str]) -> Iterator[Message]:
    if message.get("role") == "tool":
        yield _result(message, profile, names)
        return
    calls = _calls(message)
    if not calls:
        yield {key: value for key, value in message.items() if key != "tool_calls"}
    elif profile.argument_form is None:
        yield _with_written_calls(message, calls, profile)
    else:
        yield from _calling(message, calls, profile)


def _calling(message: Message, calls: Sequence[Mapping[str, object]], profile: TemplateProfile) -> Iterator[Message]:
    """The calls in as many messages as the template needs. The first one keeps the reasoning."""
    said = message.get("content")
    if said and profile.text_beside_calls == "before":
        yield {key: value for key, value in message.items() if key != "tool_calls"}
        message = {"role": message["role"]}
    if profile.text_beside_calls != "together":
        message = {**message, "content": None}
    together = [calls] if profile.several_calls else [[call] for call in calls]
    for some in together:
        yield _with_calls(message, some, profile)
        message = {"role": message["role"]}


def _calls(message: Message) -> list[Mapping[str, object]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, Sequence) else []


def _parts(call: Mapping[str, object]) -> Mapping[str, object]:
    parts = call.get("custom" if call.get("type") == "custom" else "function")
    if not isinstance(parts, Mapping) or not isinstance(parts.get("name"), str):
        raise BadRequest('Each of tool_calls needs a function with a name, such as {"function": {"name": "f", …}}.')
    return parts


def _name(call: Mapping[str, object]) -> str:
    return cast(str, _parts(call)["name"])


def _arguments(call: Mapping[str, object]) -> Mapping[str, object]:
    """The arguments as an object. Anything else, such as truncated JSON, is wrapped in one."""
    parts = _parts(call)
    if call.get("type") == "custom":
        return {CUSTOM_INPUT: parts.get("input") or ""}
    given = parts.get("arguments")
    try:
        said = json.loads(given or "{}") if isinstance(given, str | None) else given
    except (ValueError, RecursionError):
        said = given
    return said if isinstance(said, Mapping) else {"arguments": said}


def _with_calls(message: Message, calls: Sequence[Mapping[str, object]], profile: TemplateProfile) -> Message:
    content = message.get("content") or (None if profile.null_content else "")
    return {**message, "content": content, "tool_calls": [_call(call, profile) for call in calls]}


def _call(call: Mapping[str, object], profile: TemplateProfile) -> Mapping[str, object]:
    arguments: object = _arguments(call)
    if profile.argument_form == "string":
        given = _parts(call).get("arguments")
        arguments = given if isinstance(given, str) else _dumped(arguments)
    function = {"name": _name(call), "arguments": arguments}
    return {"id": _id(call.get("id"), profile), "type": "function", "function": function}


def _with_written_calls(message: Message, calls: Sequence[Mapping[str, object]], profile: TemplateProfile) -> Message:
    written = calls_text(FORMATS[profile.tool_format], [(_name(call), _arguments(call)) for call in calls])
    content = "\n".join(filter(None, [_text(message.get("content")), written]))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _result(message: Message, profile: TemplateProfile, names: Mapping[str, str]) -> Message:
    content = message.get("content")
    if not profile.results:
        return {"role": "user", "content": f"<tool_response>\n{_text(content)}\n</tool_response>"}
    call_id = message.get("tool_call_id")
    result = {**message, "content": "" if content is None else content}
    if call_id is not None:
        result["tool_call_id"] = _id(call_id, profile)
    if not message.get("name") and str(call_id) in names:
        # Some templates show the name.
        result["name"] = names[str(call_id)]
    return result


def _id(given: object, profile: TemplateProfile) -> str:
    text = str(given or "")
    if not profile.short_ids or (len(text) == _SHORT_ID_LENGTH and text.isalnum() and text.isascii()):
        return text
    # A hash, so that a call and its result have the same id in every turn.
    digest = hashlib.sha256(text.encode(errors="replace")).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:_SHORT_ID_LENGTH])


def _with_instructions(turns: Sequence[Message], tools: Sequence[Tool], profile: TemplateProfile) -> list[Message]:
    described = "\n".join(_dumped(_function(tool)) for tool in tools)
    told = _INSTRUCTIONS.format(tools=described, example=calls_text(FORMATS[profile.tool_format], [_EXAMPLE]))
    if turns and turns[0].get("role") == "system":
        first = {**turns[0], "content": f"{_text(turns[0].get('content'))}\n\n{told}"}
        return [first, *turns[1:]]
    return [{"role": "system", "content": told}, *turns]


def _without_system(turns: Sequence[Message], profile: TemplateProfile) -> Iterator[Message]:
    """Turns system messages into user messages where the template does not allow them."""
    for number, turn in enumerate(turns):
        allowed = profile.late_system if number else profile.system
        yield turn if turn.get("role") != "system" or allowed else {**turn, "role": "user"}


def _merged(turns: Iterator[Message], profile: TemplateProfile) -> Iterator[Message]:
    """Merges consecutive user messages if the template requires alternating roles."""
    last: Message | None = None
    for turn in turns:
        if last is None:
            last = turn
        elif profile.alternates and last.get("role") == turn.get("role") == "user":
            last = {**last, "content": f"{_text(last.get('content'))}\n\n{_text(turn.get('content'))}"}
        else:
            yield last
            last = turn
    if last is not None:
        yield last


def _text(content: object) -> str:
    """A message's content, which may be a list of parts, as one text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else []
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


Written = tuple[str, Mapping[str, object]]
"""A call's name and arguments."""


def calls_text(format: CallFormat, calls: Sequence[Written]) -> str:
    """Calls as the model would write them: for histories, and as an example for the model."""
    blocks = [[call] for call in calls] if format.repeats else [calls]
    return format.between.join(f"{format.begin}{format.lead}{_block(format, block)}{format.end}" for block in blocks)


def _block(format: CallFormat, calls: Sequence[Written]) -> str:
    match format.calls:
        case JsonCalls(arguments=key, in_list=in_list, separator=separator):
            texts = [_dumped({"name": name, key: arguments}) for name, arguments in calls]
            return f"[{', '.join(texts)}]" if in_list else separator.join(texts)
        case NamedCalls() as kind:
            return kind.separator.join(
                f"{kind.begin}{name}{kind.name_end}{_dumped(arguments)}{kind.end}" for name, arguments in calls
            )
        case PythonCalls():
            return f"[{', '.join(_python(name, arguments) for name, arguments in calls)}]"
        case TaggedCalls():
            return "\n".join(_tagged(name, arguments) for name, arguments in calls)
        case HarmonyCalls():
            return "\n".join(f"functions.{name}: {_dumped(arguments)}" for name, arguments in calls)


def _python(name: str, arguments: Mapping[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _tagged(name: str, arguments: Mapping[str, object]) -> str:
    values = {key: value if isinstance(value, str) else _dumped(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{parameters}</function>"
