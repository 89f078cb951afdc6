"""Renders a chat template: a conversation to the text the model was trained on. Knows Jinja; knows no tokens, no ids.

A template is a program that came with a model's files. Jinja's immutable sandbox isolates it, but does not keep it from
running forever or filling memory, so it must be rendered in a process with limits (see `render_process`).
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ostro.errors import BadRequest, Unsupported
from ostro.text.chat import ChatTemplate, Message, Tools, is_about_tools

_ROLE = re.compile(r"[A-Za-z][A-Za-z_-]{0,31}")
# The names under which clients send back a model's reasoning, and under which templates look for it.
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


class JinjaTemplate:
    """A chat template, and the one for tools if it is separate; compiled when first rendered."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._compiled_sources: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Raises BadRequest for a conversation that the template refuses or fails on."""
        if not messages:
            raise BadRequest("messages must hold at least one message.", param="messages")
        prepared = [_prepared(message) for message in messages]
        end = secrets.token_hex(8) if continue_final_message else ""
        if continue_final_message:
            prepared[-1]["content"] = f"{prepared[-1].get('content') or ''}{end}"
        text = self._rendered(
            self._source(with_tools=bool(tools) or any(map(is_about_tools, prepared))),
            {
                **self._template.variables,
                "documents": None,
                **(template_kwargs or {}),
                "messages": prepared,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            },
        )
        return _before(end, text) if continue_final_message else text

    def _source(self, *, with_tools: bool) -> str:
        return (self._template.tool_source if with_tools else None) or self._template.source

    def _rendered(self, source: str, values: Mapping[str, object]) -> str:
        try:
            return self._compiled(source).render(values)
        except _Refused as refusal:
            raise BadRequest(
                f"The chat template refused the messages: {_short(refusal)}", param="messages"
            ) from refusal
        except MemoryError:
            raise
        except Exception as error:
            # Only the template runs here, and Jinja's functions and Python's operators raise all kinds of errors.
            raise BadRequest(f"The chat template failed: {_short(error)}", param="messages") from error

    def _compiled(self, source: str) -> Template:
        if source not in self._compiled_sources:
            self._compiled_sources[source] = _ENVIRONMENT.from_string(source)
        return self._compiled_sources[source]


def _prepared(message: Message) -> dict[str, object]:
    """A message as templates expect it: content as one text, reasoning under all of its usual names."""
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise BadRequest("Each message needs a role such as system, user or assistant.", param="messages")
    prepared = dict(message)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        prepared["content"] = "\n".join(map(_part_text, content))
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is not None:
        prepared["reasoning_content"] = prepared["thinking"] = reasoning
    return prepared


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise BadRequest("Each part of a message's content needs a type.", param="messages")
    if part["type"] not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise Unsupported(
            f"This model reads only text, not content parts of type {part['type'][:40]!r}.", param="messages"
        )
    return cast(str, part["text"])


def _before(end: str, text: str) -> str:
    """The text up to the mark at the end of the last message: what the model is to continue."""
    unfinished, found, _ = text.rpartition(end)
    if not found:
        raise BadRequest(
            "The chat template leaves the last message out, so that it cannot be continued: set "
            "continue_final_message to false.",
            param="continue_final_message",
        )
    return unfinished


def _short(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 200 else words[:199] + "…"


class _Refused(TemplateError):
    """The template called raise_exception."""


class _GenerationBlocks(Extension):
    """{% generation %} marks the assistant's own words for training; here it only renders its contents."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which are special to Jinja and Python."""

    def __init__(self, /, **attributes: object) -> None:
        for name in attributes:
            _check_attribute(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Mapping[str, object], **entries: object) -> dict[str, object]:
    return dict(*args, **entries)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    allowed: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _dict,
        "namespace": _Namespace,
    }
    environment.globals.update(allowed)
    return environment


_ENVIRONMENT = _environment()
