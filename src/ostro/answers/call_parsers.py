"""Parsers of tool calls, one for each kind in `formats`: generators over a scanner that report calls to a sink.

Each returns whether everything it read was complete. On malformed text it stops and leaves the rest to the caller:
grammars prevent malformed calls, but an output may still be cut off by its token limit.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ostro.answers import json_scan, python_scan
from ostro.answers.formats import Calls, JsonCalls, NamedCalls, PythonCalls, TaggedCalls
from ostro.answers.scanner import Parse, Scanner
from ostro.answers.tools import CUSTOM_INPUT
from ostro.answers.typed_values import json_of

_NAME = re.compile(r"[\w./:-]*")
_NAME_KEY = "name"
_ARGUMENT_KEYS = ("arguments", "parameters")


class Sink(Protocol):
    @property
    def was_cut(self) -> bool:
        """Whether the text was cut off by a limit or a stop string. Valid once the text has ended."""
        ...

    def may_call(self, name: str) -> bool:
        """Whether a call of this name counts as a call, rather than as text that looks like one."""
        ...

    def may_begin_with(self, key: str) -> bool:
        """Whether an object whose first key is this may be a call."""
        ...

    def is_custom(self, name: str) -> bool: ...

    def schema(self, name: str) -> Mapping[str, object]:
        """The schema of the tool's arguments; empty if the tool is unknown."""
        ...

    def begin(self, name: str) -> None: ...

    def arguments(self, text: str) -> None:
        """Takes the next piece of the latest call's arguments."""
        ...


class CallParser:
    def __init__(self, scanner: Scanner, sink: Sink) -> None:
        self._scanner = scanner
        self._sink = sink

    def calls(self, kind: Calls) -> Parse[bool]:
        """Parses all calls of one block, between its beginning and its end. There may be none."""
        match kind:
            case JsonCalls():
                return (yield from self._json_calls(kind))
            case NamedCalls():
                return (yield from self._several(lambda: self._named_call(kind), (kind.separator,)))
            case TaggedCalls():
                return (yield from self._tagged_call())
            case PythonCalls():
                return (yield from self._python_calls())
            case _:
                raise AssertionError("harmony is read by a parser of its own")

    def _several(self, call: Callable[[], Parse[bool]], separators: Sequence[str]) -> Parse[bool]:
        """Parses calls for as long as they are complete. Returns whether there was any."""
        any_complete = False
        while (yield from call()):
            any_complete = True
            yield from self._scanner.space()
            for separator in filter(None, map(str.strip, separators)):
                yield from self._scanner.literal(separator)
        return any_complete

    # {"name": "f", "arguments": {…}}

    def _json_calls(self, kind: JsonCalls) -> Parse[bool]:
        yield from self._scanner.space()
        listed = yield from self._scanner.literal("[")
        complete = yield from self._several(self._json_call, ("," if listed else kind.separator,))
        return complete and (not listed or (yield from self._scanner.literal("]")))

    def _json_call(self) -> Parse[bool]:
        yield from self._scanner.space()
        if not (yield from self._scanner.literal("{")):
            return False
        name: str | None = None
        early: list[str] = []
        begun = False
        while True:
            key = yield from self._key()
            if key is None or (name is None and not self._sink.may_begin_with(key)):
                return False
            if key == _NAME_KEY and name is None:
                name = yield from json_scan.decoded(self._scanner)
                if name is None or not self._sink.may_call(name):
                    return False
                if early:
                    begun = True
                    self._begin_with(name, "".join(early))
                complete = True
            elif key in _ARGUMENT_KEYS and not begun and name is not None:
                begun = True
                complete = yield from self.arguments(name)
            elif key in _ARGUMENT_KEYS and not early:
                # A call cannot be reported before its name is known.
                complete = yield from json_scan.value(self._scanner, early.append)
            else:
                complete = yield from json_scan.value(self._scanner, _ignore)
            if not complete:
                return False
            yield from self._scanner.space()
            if not (yield from self._scanner.literal(",")):
                break
        if not (yield from self._scanner.literal("}")) or name is None:
            return False
        if not begun:
            self._begin_with(name, "{}")
        return True

    def _key(self) -> Parse[str | None]:
        """The key of an object's next entry; stops before the value."""
        yield from self._scanner.space()
        key = yield from json_scan.decoded(self._scanner)
        yield from self._scanner.space()
        if key is None or not (yield from self._scanner.literal(":")):
            return None
        yield from self._scanner.space()
        return key

    def _begin_with(self, name: str, arguments: str) -> None:
        """Reports a call whose arguments are already complete."""
        self._sink.begin(name)
        inner = Scanner()
        inner.feed(arguments)
        inner.end()
        for _ in CallParser(inner, self._sink)._arguments_of(name):
            pass

    def arguments(self, name: str) -> Parse[bool]:
        """Begins the call once its arguments begin, and forwards them. Returns whether they are complete."""
        if not (yield from self._scanner.peek()):
            return False
        self._sink.begin(name)
        return (yield from self._arguments_of(name))

    def _arguments_of(self, name: str) -> Parse[bool]:
        first = yield from self._scanner.peek()
        if first == "{" and self._sink.is_custom(name):
            return (yield from self._custom_input())
        if first == "{":
            return (yield from json_scan.value(self._scanner, self._sink.arguments))
        if first == '"':
            # JSON within a JSON string, as some models write it, or a custom tool's bare input.
            return (yield from json_scan.decode(self._scanner, self._sink.arguments))
        parts: list[str] = []
        complete = yield from json_scan.value(self._scanner, parts.append)
        text = "".join(parts)
        if text:
            self._sink.arguments("{}" if text == "null" else text)
        return complete

    def _custom_input(self) -> Parse[bool]:
        """Extracts a custom tool's input from the object in which the model has to write it."""
        yield from self._scanner.literal("{")
        while True:
            key = yield from self._key()
            if key == CUSTOM_INPUT:
                complete = yield from json_scan.decode(self._scanner, self._sink.arguments)
            else:
                complete = key is not None and (yield from json_scan.value(self._scanner, _ignore))
            if not complete:
                return False
            yield from self._scanner.space()
            if not (yield from self._scanner.literal(",")):
                return (yield from self._scanner.literal("}"))

    def _markup(self, *texts: str) -> Parse[str | None]:
        """Consumes the one of these texts that comes next. One that was cut off by a limit is dropped."""
        found = yield from self._scanner.one_of(texts)
        if found is None and self._sink.was_cut:
            self._scanner.drop_begun(texts)
        return found

    # f[ARGS]{…}

    def _named_call(self, kind: NamedCalls) -> Parse[bool]:
        yield from self._scanner.space()
        if kind.begin and not (yield from self._markup(kind.begin)):
            return False
        name = yield from self._name()
        if kind.id_marker and (yield from self._markup(kind.id_marker)):
            yield from self._name()
        if not name or not self._sink.may_call(name):
            return False
        if not (yield from self._markup(kind.name_end)):
            return False
        yield from self._scanner.space()
        if not (yield from self.arguments(name)):
            return False
        if kind.end:
            yield from self._scanner.space()
            yield from self._markup(kind.end.strip())
        return True

    def _name(self) -> Parse[str]:
        parts: list[str] = []
        yield from self._scanner.run(_NAME, parts.append)
        return "".join(parts)

    def _field_name(self, fields: "_Fields", end: str) -> Parse[str | None]:
        """Consumes a field's name and `end`, and returns the name. Names in the tool's schema may contain anything."""
        described = yield from self._markup(*(f"{name}{end}" for name in fields.names))
        if described is not None:
            return described.removesuffix(end)
        name = yield from self._name()
        yield from self._scanner.space()
        return name if name and (yield from self._scanner.literal(end)) else None

    # <function=f><parameter=p>value</parameter></function>

    def _tagged_call(self) -> Parse[bool]:
        yield from self._scanner.space()
        if not (yield from self._markup("<function=")):
            return False
        name = yield from self._name()
        if not name or not (yield from self._scanner.literal(">")):
            return False
        self._sink.begin(name)
        fields = _Fields(self._sink, name)
        yield from self._scanner.space()
        tag = yield from self._markup("<parameter=", "</function>")
        while tag is not None and tag.strip() == "<parameter=":
            key = yield from self._field_name(fields, ">")
            if key is None:
                return False
            parts: list[str] = []
            tag = yield from self._scanner.until(_VALUE_ENDS, parts.append)
            if tag is None and self._sink.was_cut:
                # A truncated value cannot be converted to JSON.
                return False
            fields.add_text(key, "".join(parts).removeprefix("\n").removesuffix("\n"))
            if tag is not None and tag.strip() == "</parameter>":
                yield from self._scanner.space()
                tag = yield from self._markup("<parameter=", "</function>")
        if tag is None and self._sink.was_cut and not (yield from self._scanner.peek()):
            return False
        fields.end()
        return tag is not None

    # [f(a="x", b=1), g()]

    def _python_calls(self) -> Parse[bool]:
        yield from self._scanner.space()
        if not (yield from self._scanner.literal("[")):
            return False
        complete = yield from self._several(self._python_call, (",",))
        return complete and (yield from self._scanner.literal("]"))

    def _python_call(self) -> Parse[bool]:
        yield from self._scanner.space()
        name = yield from self._name()
        if not name or not self._sink.may_call(name) or not (yield from self._scanner.literal("(")):
            return False
        self._sink.begin(name)
        fields = _Fields(self._sink, name)
        while True:
            yield from self._scanner.space()
            if (yield from self._scanner.literal(")")):
                fields.end()
                return True
            key = yield from self._field_name(fields, "=")
            if key is None:
                return False
            text = yield from python_scan.value(self._scanner)
            if text is None:
                return False
            fields.add_json(key, text)
            yield from self._scanner.space()
            yield from self._scanner.literal(",")


_VALUE_ENDS = ("</parameter>", "\n</parameter>", "\n<parameter=", "\n</function>", "</function>")


class _Fields:
    """Arguments of a call whose format does not write them as a JSON object. Each field is forwarded once complete."""

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._is_custom = sink.is_custom(name)
        self._root = sink.schema(name)
        properties = self._root.get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        self._separator = "{"

    @property
    def names(self) -> Iterable[str]:
        """Names of the fields in the tool's schema."""
        return self._schemas.keys()

    def add_text(self, key: str, text: str) -> None:
        if self._is_custom:
            self._add_custom(key, text)
        else:
            self._add(key, json_of(text, self._schemas.get(key), self._root))

    def add_json(self, key: str, text: str) -> None:
        if self._is_custom:
            said = json.loads(text)
            self._add_custom(key, said if isinstance(said, str) else text)
        else:
            self._add(key, text)

    def end(self) -> None:
        if not self._is_custom:
            self._sink.arguments("{}" if self._separator == "{" else "}")

    def _add_custom(self, key: str, text: str) -> None:
        if key == CUSTOM_INPUT and text:
            self._sink.arguments(text)

    def _add(self, key: str, text: str) -> None:
        self._sink.arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: {text}")
        self._separator = ", "


def _ignore(text: str) -> None:
    pass
