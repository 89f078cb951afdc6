"""Chat templates: a conversation to the text the model was trained on. Knows Jinja; knows no tokens and no ids.

A template is a program that came with a model's files. It runs in Jinja's immutable sandbox and on a budget of time
and of text: every loop and call looks at the clock, and what it joins and writes is counted.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Final, NoReturn, cast

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ostro.errors import BadRequest, Unsupported

Message = Mapping[str, object]

MAX_SECONDS = 5.0
MAX_CHARACTERS = 64 << 20
MAX_SOURCE_CHARACTERS = 1 << 20
_MAX_POWER_BITS = 1 << 16

# What a template can do wrong: Jinja's own errors, and those of Python's operators and methods on odd values.
_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

_ROLE = re.compile(r"[A-Za-z][A-Za-z_-]{0,31}")
# The names under which clients send back what a model thought, and under which templates look for it.
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

# Under a name that is no identifier, so that no template can reach it.
_BUDGET: Final = "render budget"


class ChatTemplate:
    """One model's template. `variables` are what it may ask of the tokenizer: `bos_token`, `eos_token` and others."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """Raises BadRequest for a conversation the template refuses or fails on, or that exceeds the budget."""
        if not messages:
            raise BadRequest("messages must hold at least one message.", param="messages")
        budget = _Budget(MAX_SECONDS, MAX_CHARACTERS)
        values = {
            **self._variables,
            "messages": [_prepared(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: budget,
        }
        try:
            return "".join(map(budget.passed, self._template.generate(values)))
        except _Refused as refusal:
            raise BadRequest(
                f"The chat template refused the messages: {_short(refusal)}", param="messages"
            ) from refusal
        except _TEMPLATE_ERRORS as error:
            raise BadRequest(f"The chat template failed: {_short(error)}", param="messages") from error

    @cached_property
    def _template(self) -> Template:
        if len(self.source) > MAX_SOURCE_CHARACTERS:
            raise TemplateError(f"it is longer than {MAX_SOURCE_CHARACTERS} characters")
        return _ENVIRONMENT.from_string(_Watched().visit(_ENVIRONMENT.parse(self.source)))


def _prepared(message: Message) -> dict[str, object]:
    """A message as templates expect it: content as one text, reasoning under every name it goes by."""
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
            f"This model reads text; a content part of type {part['type'][:40]!r} is not.", param="messages"
        )
    return cast(str, part["text"])


def _short(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 200 else words[:199] + "…"


class _Refused(TemplateError):
    """The template called raise_exception."""


class _OverBudget(TemplateError):
    pass


class _Budget:
    """What one rendering may still use."""

    def __init__(self, seconds: float, characters: int) -> None:
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._characters = characters
        self._written = 0

    @classmethod
    def of(cls, context: Context) -> "_Budget":
        # `parent` holds what render was given; a template's own variables lie elsewhere.
        return cast(_Budget, context.parent[_BUDGET])

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _OverBudget(f"it ran longer than {self._seconds:g} seconds")

    def check_size(self, size: int) -> None:
        if size > self._characters:
            raise _OverBudget(f"it made a text or list of more than {self._characters} characters or items")

    def passed(self, text: str) -> str:
        self.check_time()
        self._written += len(text)
        self.check_size(self._written)
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a budget looked at from every hook it has."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call(self, context: Context, obj: object, /, *args: object, **kwargs: object) -> object:
        _Budget.of(context).check_time()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _Budget.of(context).check_size(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def tick(self) -> None:
        """Does nothing: what counts is that `call` was passed."""

    @pass_context
    def joined(self, context: Context, *parts: object) -> str:
        texts = [str(part) for part in parts]
        _Budget.of(context).check_size(sum(map(len, texts)))
        return "".join(texts)


def _result_size(operator: str, left: object, right: object) -> int:
    """How large the result would be, found before it is made."""
    match operator, left, right:
        case "+", str() | list() | tuple(), str() | list() | tuple():
            return len(left) + len(right)
        case "*", str() | list() | tuple(), int():
            return len(left) * right
        case "*", int(), str() | list() | tuple():
            return left * len(right)
        case "**", int(), int() if left.bit_length() * right > _MAX_POWER_BITS:
            raise _OverBudget("it computed too large a number")
    return 0


@pass_context
def _counted(context: Context, value: object) -> str:
    # Runs on every {{ … }}, also within macros and block assignments, whose text passes no other gate.
    return _Budget.of(context).passed(str(value))


class _Watched(NodeTransformer):
    """Makes loops and `~` pass through the environment's hooks, which Jinja itself does not do."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (named after the node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_hook(node, "tick", []), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _hook(node, "joined", node.nodes)


def _hook(node: nodes.Node, name: str, args: list[nodes.Expr]) -> nodes.Call:
    hook = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
    return cast(nodes.Call, hook.set_environment(_ENVIRONMENT).set_lineno(node.lineno))


class _GenerationBlocks(Extension):
    """{% generation %} marks the assistant's own words for training; here it only holds what is in it."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Without names that begin with an underscore, by which Jinja and Python find out what an object is."""

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


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols], finalize=_counted
    )
    environment.filters["tojson"] = _tojson
    allowed: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _dict,
        "namespace": _Namespace,
    }
    environment.globals.update(allowed)
    # Makes text of any length at one call.
    del environment.globals["lipsum"]
    return environment


_ENVIRONMENT = _environment()
