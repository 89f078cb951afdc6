"""Grammars for answers with tool calls, in llguidance's Lark notation. A grammar describes the whole output.

lazy     free text, and calls after the format's marker: nothing is enforced where the output could end
forced   calls only, after reasoning if there is any
either   calls, or text that matches a structured output
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ostro.answers.formats import CallFormat, HarmonyCalls, JsonCalls, NamedCalls, PythonCalls, TaggedCalls
from ostro.answers.profile import ReasoningMarkers
from ostro.answers.tools import CUSTOM_INPUT, Tool
from ostro.answers.typed_values import may_be_text
from ostro.formats.guidance_text import OPTIONS, SEPARATORS, Lark, alternatives
from ostro.formats.guidance_text import text_literal as quoted

_FUNCTION, _PARAMETER, _PARAMETER_END = "<function={}>\n", "<parameter={}>\n", "\n</parameter>\n"
_SEAM = r"/\n{0,2}/"
"""White space that models write between reasoning and answer."""
_TO = " to="
_ANY_NAME = r"/[A-Za-z_][\w-]*/"
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarRequest:
    format: CallFormat
    tools: tuple[Tool, ...]
    """Tools that may be called. May be empty if `structure` is set, for harmony, whose answers need a frame anyway."""
    mode: Literal["lazy", "forced", "either"]
    structure: str | None = None
    """With `either`: what the text must match if there are no calls, as the body of a rule."""
    several: bool = True
    """Whether more than one call is allowed."""
    reasoning: ReasoningMarkers | None = None
    """Markers of reasoning that may come first; None if there is none, or if the prompt has already begun it."""
    after_reasoning: bool = False
    """Whether the grammar begins at the end of reasoning that the prompt has begun."""
    special_ids: Mapping[str, int]


def answer_grammar(asked: GrammarRequest) -> str:
    return _Grammar(asked).text()


class _Grammar:
    def __init__(self, asked: GrammarRequest) -> None:
        self._asked = asked
        self._format = asked.format
        self._lark = Lark(asked.special_ids)

    def text(self) -> str:
        if isinstance(self._format.calls, HarmonyCalls):
            body = self._harmony()
        elif self._asked.mode == "lazy":
            body = self._lazy()
        else:
            body = self._after_reasoning(self._calls_or_structure())
        return self._lark.grammar(body)

    # Calls within free text

    def _lazy(self) -> str:
        """Keeps reasoning at the beginning from matching as text, and text from matching as reasoning."""
        first, rest = self._free(after_reasoning=False), self._free(after_reasoning=True)
        markers = self._asked.reasoning
        if markers is None:
            return first
        # The grammar also accepts unfinished reasoning, so that nothing is enforced within it.
        return alternatives([self._unfinished_thought(markers), f"{self._thought(markers)} {rest}", first])

    def _free(self, *, after_reasoning: bool) -> str:
        text = "TEXT" if after_reasoning else self._text_that_comes_first()
        if not self._format.begin:
            return self._free_bare(text)
        bare = []
        if self._format.may_be_bare:
            text, calls = self._bare(text)
            bare = [calls]
        block, tail = self._block, self._lark.rule("TEXT")
        first = f"{self._lark.up_to(text, self._format.begin)} {block}"
        if not self._asked.several:
            return alternatives([text, first, *bare])
        if not self._format.repeats:
            return alternatives([text, f"{first} {tail}", *bare])
        more = self._lark.rule(f"{self._lark.up_to('TEXT', self._format.begin)} {block}")
        return alternatives([text, f"{first} {more}* {tail}", *bare])

    def _free_bare(self, text: str) -> str:
        text, calls = self._bare(text)
        marked = [f"{self._lark.literal(begin)} {self._block}" for begin in self._special_begins()]
        return alternatives([text, calls, *marked])

    def _bare(self, text: str) -> tuple[str, str]:
        """Rules for text that does not begin like a call, and for calls without a marker."""
        begins = self._lark.terminal(alternatives(map(quoted, self._bare_begins())))
        calls = self._calls
        if self._format.may_be_bare and self._asked.several:
            calls = f"{calls} ({self._lark.literal(self._format.between)} {calls})*"
        return self._lark.terminal(f"{text} & ~({begins} TEXT)"), self._lark.rule(calls)

    def _bare_begins(self) -> list[str]:
        names = [tool.name for tool in self._asked.tools]
        if isinstance(self._format.calls, PythonCalls):
            return [f"[{name}(" for name in names]
        return [f'{{"name": {json.dumps(name, ensure_ascii=False)}' for name in names]

    def _special_begins(self) -> list[str]:
        return [begin for begin in self._format.other_begins if begin in self._asked.special_ids]

    def _text_that_comes_first(self) -> str:
        markers = self._asked.reasoning
        if markers is None or markers.start in self._asked.special_ids:
            return "TEXT"
        return self._lark.terminal(f"TEXT & ~(/\\s*/ {quoted(markers.start)} TEXT)")

    # Calls alone

    def _calls_or_structure(self) -> str:
        begin = self._lark.literal(self._format.begin)
        block = f"{begin} {self._block}".strip()
        if self._format.repeats and self._asked.several:
            block = f"{block} ({self._lark.literal(self._format.between)} {block})*"
        return alternatives([block, self._structure]) if self._asked.mode == "either" else block

    @property
    def _structure(self) -> str:
        assert self._asked.structure is not None, "only answers with a structure have this rule"
        return self._lark.rule(self._asked.structure)

    def _after_reasoning(self, rest: str) -> str:
        markers = self._asked.reasoning
        if markers is not None:
            return f"({self._thought(markers)} {_SEAM})? {self._lark.rule(rest)}"
        return f"{_SEAM} {self._lark.rule(rest)}" if self._asked.after_reasoning else rest

    # Reasoning. The lexer is greedy: text that must be distinguished from other text has to be a single terminal.

    def _thought(self, markers: ReasoningMarkers) -> str:
        """Reasoning with both markers."""
        if markers.start in self._asked.special_ids:
            return self._lark.rule(f"{self._start(markers)} {self._lark.up_to('TEXT', markers.end)}")
        return self._lark.up_to(self._thinking(markers), markers.end)

    def _unfinished_thought(self, markers: ReasoningMarkers) -> str:
        if markers.start in self._asked.special_ids:
            return f"{self._start(markers)} {self._lark.text_without(markers.end)}"
        if markers.end in self._asked.special_ids:
            return self._thinking(markers)
        return self._lark.terminal(f"{self._thinking(markers)} & ~(TEXT {quoted(markers.end)} TEXT)")

    def _start(self, markers: ReasoningMarkers) -> str:
        """The start marker as a special token, after any text if the grammar is lazy: models write white space."""
        return self._lark.rule(f"{'TEXT ' if self._asked.mode == 'lazy' else ''}{self._lark.literal(markers.start)}")

    def _thinking(self, markers: ReasoningMarkers) -> str:
        return self._lark.terminal(f"/\\s*/ {quoted(markers.start)} TEXT")

    # Blocks

    @cached_property
    def _block(self) -> str:
        """The rest of a block after the format's `begin`."""
        parts = [self._lark.literal(self._format.lead), self._calls, self._lark.literal(self._format.end)]
        return self._lark.rule(" ".join(filter(None, parts)))

    @cached_property
    def _calls(self) -> str:
        match self._format.calls:
            case JsonCalls() as kind:
                calls = self._list(self._json_call(kind), ", " if kind.in_list else kind.separator)
                return f'"[" {calls} "]"' if kind.in_list else calls
            case NamedCalls() as kind:
                return self._list(self._named_call(kind), kind.separator)
            case PythonCalls():
                return self._python_calls()
            case TaggedCalls():
                return self._each(self._tagged_call)
            case _:
                raise AssertionError("harmony has a grammar of its own")

    def _list(self, call: str, separator: str) -> str:
        """One call, or several if the block may hold more than one."""
        if not self._asked.several or self._format.repeats:
            return call
        return f"{call} ({self._lark.literal(separator)} {call})*"

    def _each(self, call: "Callable[[Tool], str]") -> str:
        return self._lark.rule(alternatives(map(call, self._asked.tools)))

    def _json_call(self, kind: JsonCalls) -> str:
        def call(tool: Tool) -> str:
            head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{kind.arguments}": '
            return f'{quoted(head)} {self._arguments(tool)} "}}"'

        return self._each(call)

    def _named_call(self, kind: NamedCalls) -> str:
        def call(tool: Tool) -> str:
            parts = [f"{kind.begin}{tool.name}{kind.name_end}", kind.end]
            begin, end = map(self._lark.literal, parts)
            return f"{begin} {self._arguments(tool)} {end}"

        return self._each(call)

    def _arguments(self, tool: Tool) -> str:
        schema = argument_schema(tool)
        return '"{}"' if schema is None else self._lark.rule(json_rule(schema, lenient=not tool.strict))

    # Arguments one by one

    def _python_calls(self) -> str:
        # The bracket and the first name are one literal because the lexer is greedy, see above.
        first = self._each(lambda tool: self._python_call(tool, "["))
        more = f'(", " {self._each(self._python_call)})*' if self._asked.several else ""
        return " ".join(filter(None, [first, more, quoted("]")]))

    def _python_call(self, tool: Tool, before: str = "") -> str:
        fields = [
            _Field(" ".join([quoted(f"{name}="), self._python_value(schema, tool)]), is_required)
            for name, schema, is_required in _fields(tool)
        ]
        return " ".join([quoted(f"{before}{tool.name}("), self._python_fields(tool, fields), quoted(")")])

    def _python_fields(self, tool: Tool, fields: Sequence["_Field"]) -> str:
        if not _takes_any(tool):
            return self._separated(fields)
        each = self._lark.rule(f'{_ANY_NAME} "=" {self._lark.rule(json_rule({}, lenient=True))}')
        return self._lark.rule(f'({each} (", " {each})*)?')

    def _python_value(self, schema: object, tool: Tool) -> str:
        if isinstance(schema, Mapping) and schema.get("type") == "boolean":
            return '("True" | "False")'
        return self._lark.rule(json_rule(_within(schema, tool), lenient=not tool.strict))

    def _separated(self, fields: Sequence["_Field"]) -> str:
        """The fields in order, with commas between those that are present."""
        first = later = ""
        for each in reversed(fields):
            start = self._lark.rule(f"{each.rule} {later}")
            more = self._lark.rule(f'", " {each.rule} {later}')
            first = start if each.is_required else self._lark.rule(alternatives([start, first]))
            later = more if each.is_required else self._lark.rule(alternatives([more, later]))
        return first

    def _tagged_call(self, tool: Tool) -> str:
        rules = []
        for name, schema, is_required in _fields(tool):
            rule = f"{quoted(_PARAMETER.format(name))} {self._tagged_value(schema, tool)}"
            rules.append(rule if is_required else f"({rule})?")
        if _takes_any(tool):
            rules.append(self._lark.rule(f'("<parameter=" {_ANY_NAME} ">\\n" {self._tagged_value({}, tool)})*'))
        return " ".join([quoted(_FUNCTION.format(tool.name)), *rules, quoted("</function>")])

    def _tagged_value(self, schema: object, tool: Tool) -> str:
        """A parameter's value and its end tag."""
        end = _PARAMETER_END
        if isinstance(schema, Mapping) and (choices := _texts_in(schema)):
            return f"({alternatives(map(quoted, choices))}) {quoted(end)}"
        if may_be_text(schema, argument_schema(tool) or {}):
            # Plain text has no escapes, so it cannot contain the tags.
            tags = alternatives([quoted("\n<parameter="), quoted("</function>")])
            value = self._lark.terminal(f"TEXT & ~(TEXT {tags} TEXT)")
            return f'{self._lark.up_to(value, end.strip())} "\\n"'
        if isinstance(schema, Mapping) and schema.get("type") == "boolean":
            return f'("true" | "false" | "True" | "False") {quoted(end)}'
        return f"{self._lark.rule(json_rule(_within(schema, tool), lenient=not tool.strict))} {quoted(end)}"

    # Messages in channels

    def _harmony(self) -> str:
        channel, message, end, start = map(self._lark.literal, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
        text, call = self._lark.text_without("<|end|>"), self._harmony_call(f"{channel} ", "commentary ")
        if self._asked.mode != "lazy":
            thought = self._lark.rule(f'{channel} "analysis" {message} {text} {end} {start} "assistant"')
            last = [call] if self._asked.tools else []
            if self._asked.mode == "either":
                last.append(f'{channel} "final" {message} {self._structure}')
            return f"{thought}* {self._lark.rule(alternatives(last))}"
        # The grammar accepts every prefix of an answer without a call, so that nothing is enforced there.
        header = self._lark.terminal(f"TEXT & ~(TEXT {quoted(_TO)} TEXT)")
        plain = self._lark.terminal(f"TEXT & ~({quoted(_TO)} TEXT)")
        whole, begun = f"{channel} {header} {message} {text}", f"{channel} {header}"
        more = self._lark.rule(f'{end} {start} "assistant" {whole}')
        last = ["", end, f"{end} {start} {header}"]
        last += [f'{end} {start} "assistant" {begun}', f'{end} {start} "assistant" {call}']
        last.append(f"{end} {start} {self._harmony_call('', 'assistant')}")
        several = f"{whole} {more}* {self._lark.rule(alternatives(last))}"
        return alternatives([plain, begun, several, call, self._harmony_call("", "")])

    def _harmony_call(self, before: str, word: str) -> str:
        """The word and the recipient are one literal because the lexer is greedy, see above."""
        channel, constrain, message = map(self._lark.literal, ("<|channel|>", "<|constrain|>", "<|message|>"))
        channel = "" if before else f'{channel} "commentary"'

        def call(tool: Tool) -> str:
            to = quoted(f"{word.rstrip()}{_TO}functions.{tool.name}")
            return f'{before}{to} {channel} " "? ({constrain} "json")? {message} {self._arguments(tool)}'

        return self._each(call)


class _Field(NamedTuple):
    rule: str
    is_required: bool


def argument_schema(tool: Tool) -> Mapping[str, object] | None:
    """The schema of a call's arguments; None if only an empty object is allowed.

    A schema that lists properties and does not set additionalProperties is taken to allow no others.
    """
    if tool.enforced is not None:
        return tool.enforced
    if tool.is_custom:
        pattern = {} if tool.regex is None else {"pattern": f"^(?:{tool.regex})$"}
        return _object({CUSTOM_INPUT: {"type": "string", **pattern}}, required=[CUSTOM_INPUT])
    if tool.parameters is None:
        return None
    schema = {key: value for key, value in tool.parameters.items() if key != OPTIONS}
    if _COMPOSED.isdisjoint(schema) and "properties" in schema and "additionalProperties" not in schema:
        if not schema["properties"]:
            return None
        schema["additionalProperties"] = False
    return {"type": "object", **schema} if _COMPOSED.isdisjoint(schema) else schema


def _object(properties: Mapping[str, object], *, required: Sequence[str]) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _fields(tool: Tool) -> Iterator[tuple[str, object, bool]]:
    """Each described argument: its name, its schema and whether it is required."""
    schema = argument_schema(tool) or {}
    properties, required = schema.get("properties"), schema.get("required")
    for name, part in properties.items() if isinstance(properties, Mapping) else ():
        yield name, part, isinstance(required, list) and name in required


def _takes_any(tool: Tool) -> bool:
    """Whether the tool takes arguments that are not described one by one."""
    schema = argument_schema(tool)
    return schema is not None and not isinstance(schema.get("properties"), Mapping)


def _within(schema: object, tool: Tool) -> object:
    """A subschema of the tool's schema, with the definitions that it may refer to."""
    root = argument_schema(tool) or {}
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**schema, **shared} if isinstance(schema, Mapping) else schema


def _texts_in(schema: Mapping[str, object]) -> list[str]:
    """The strings that the schema allows, if it lists strings only."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    listed = values if isinstance(values, list) else []
    texts = [value for value in listed if isinstance(value, str)]
    return texts if len(texts) == len(listed) else []


def json_rule(schema: object, *, lenient: bool) -> str:
    """A rule for JSON that matches the schema, with separators as models write them."""
    # Options can only be set in an object, so other schemas, such as false, are wrapped in one.
    described = schema if isinstance(schema, Mapping) else {} if schema is True else {"allOf": [schema]}
    options = {**SEPARATORS, "lenient": lenient}
    return f"%json {json.dumps({**described, OPTIONS: options}, ensure_ascii=False)}"
