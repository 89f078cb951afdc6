"""How models write tool calls, as data: one short description per format. Parsers (`call_parsers`) and grammars
(`call_grammar`) are made from these.
"""

import re
from dataclasses import dataclass, field

PROBE = "ostro_probe"
"""The name of the tool that templates are probed with."""


def _texts(*texts: str) -> tuple[str, ...]:
    """Regexes that match these texts."""
    return tuple(map(re.escape, texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Each call is an object with a name and arguments: `{"name": "f", "arguments": {…}}`."""

    arguments: str = "arguments"
    """The key that is written; `arguments` and `parameters` are both read."""
    in_list: bool = False
    """Whether the calls are in a list, which may then hold several."""
    separator: str = ""
    """Text between calls that are not in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """A name, a separator, and the arguments as JSON: `f[ARGS]{…}`."""

    begin: str = ""
    name_end: str
    id_marker: str = ""
    """A marker that may follow the name, before `name_end`, with an id after it."""
    end: str = ""
    separator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """A tag per function and per parameter, whose values are JSON or, for strings, plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """A list of Python calls with keyword arguments: `[f(a="x", b=1), g()]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyCalls:
    """Messages in channels, some of which are addressed to a function."""


Calls = JsonCalls | NamedCalls | TaggedCalls | PythonCalls | HarmonyCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A block of calls: `begin`, calls, `end`; and how often it may occur."""

    calls: Calls
    begin: str = ""
    """Marker that begins a block. If empty, the whole answer is the block, provided it begins like one."""
    other_begins: tuple[str, ...] = ()
    """Texts that are also read as a beginning."""
    lead: str = ""
    """White space that is written between the beginning and the calls; on reading, any white space is accepted."""
    end: str = ""
    other_ends: tuple[str, ...] = ()
    repeats: bool = False
    """Whether there is one block for each call, rather than one for all."""
    between: str = ""
    """White space that is written between blocks; on reading, any white space is accepted."""
    may_be_bare: bool = False
    """Whether models may omit the beginning and the end: an answer that begins like a call to a known tool is then read
    as one."""
    evidence: tuple[str, ...] = ()
    """Regexes that must all match a template's rendering of a call to PROBE for this to be its format."""
    special: tuple[str, ...] = field(default=())
    """Texts that are special tokens in most models that use the format. Readers must see them."""

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, *self.other_begins)))

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(text for end in (self.end, *self.other_ends) if (text := end.strip()))


_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
_NEMOTRON = ("<TOOLCALL>", "</TOOLCALL>")

_HERMES = CallFormat(
    begin="<tool_call>",
    lead="\n",
    calls=JsonCalls(),
    end="\n</tool_call>",
    repeats=True,
    between="\n",
    may_be_bare=True,
    # Other formats put the same tag before a call in another form.
    evidence=(r"<tool_call>\s*+\[?+\s*+\{\s*+['\"]",),
    special=("<tool_call>", "</tool_call>"),
)

FORMATS: dict[str, CallFormat] = {
    # Specific before general: the first format whose evidence matches is taken.
    "harmony": CallFormat(
        calls=HarmonyCalls(), evidence=_texts("<|channel|>commentary", "to=functions."), special=_HARMONY
    ),
    "qwen3_coder": CallFormat(
        begin="<tool_call>",
        lead="\n",
        calls=TaggedCalls(),
        end="\n</tool_call>",
        repeats=True,
        between="\n",
        evidence=_texts("<tool_call>", "<function="),
        special=("<tool_call>", "</tool_call>"),
    ),
    "hermes": _HERMES,
    "deepseek_v3": CallFormat(
        begin=_DEEPSEEK_SECTION[0],
        calls=NamedCalls(
            begin=f"{_DEEPSEEK_CALL[0]}function{_DEEPSEEK_CALL[1]}",
            name_end="\n```json\n",
            end=f"\n```{_DEEPSEEK_CALL[2]}",
            separator="\n",
        ),
        end=_DEEPSEEK_SECTION[1],
        evidence=_texts(_DEEPSEEK_CALL[0], "```json"),
        special=(*_DEEPSEEK_SECTION, *_DEEPSEEK_CALL),
    ),
    "deepseek_v31": CallFormat(
        begin=_DEEPSEEK_SECTION[0],
        calls=NamedCalls(begin=_DEEPSEEK_CALL[0], name_end=_DEEPSEEK_CALL[1], end=_DEEPSEEK_CALL[2]),
        end=_DEEPSEEK_SECTION[1],
        evidence=_texts(_DEEPSEEK_CALL[0]),
        special=(*_DEEPSEEK_SECTION, *_DEEPSEEK_CALL),
    ),
    "mistral_v11": CallFormat(
        begin="[TOOL_CALLS]",
        calls=NamedCalls(name_end="[ARGS]", id_marker="[CALL_ID]"),
        repeats=True,
        evidence=_texts("[TOOL_CALLS]", "[ARGS]"),
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "mistral": CallFormat(
        begin="[TOOL_CALLS]",
        calls=JsonCalls(in_list=True),
        evidence=_texts("[TOOL_CALLS]"),
        special=("[TOOL_CALLS]",),
    ),
    "nemotron": CallFormat(
        begin=_NEMOTRON[0],
        calls=JsonCalls(in_list=True),
        end=_NEMOTRON[1],
        evidence=(rf"{_NEMOTRON[0]}\[\{{",),
        special=_NEMOTRON,
    ),
    "functools": CallFormat(
        begin="functools",
        other_begins=("<|tool_call|>",),
        calls=JsonCalls(in_list=True),
        other_ends=("<|/tool_call|>",),
        evidence=_texts("functools"),
        special=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "phi4_mini": CallFormat(
        begin="<|tool_call|>",
        other_begins=("functools",),
        calls=JsonCalls(in_list=True),
        end="<|/tool_call|>",
        evidence=_texts("<|tool|>", "<|/tool|>"),
        special=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "llama3_json": CallFormat(
        other_begins=("<|python_tag|>",),
        calls=JsonCalls(arguments="parameters", separator="; "),
        evidence=_texts(f'{{"name": "{PROBE}", "parameters": '),
        special=("<|python_tag|>",),
    ),
    "lfm2": CallFormat(
        begin=_LFM2[0],
        calls=PythonCalls(),
        end=_LFM2[1],
        # Some templates show tools, but no calls.
        evidence=(rf"{re.escape(_LFM2[0])}\[|List of tools: (?:<\|tool_list_start\|>)?\[",),
        special=_LFM2,
    ),
    "pythonic": CallFormat(
        other_begins=("<|python_start|>",),
        calls=PythonCalls(),
        other_ends=("<|python_end|>",),
        evidence=_texts(f"[{PROBE}("),
        special=("<|python_start|>", "<|python_end|>"),
    ),
    "generic": _HERMES,
}
"""Formats by their `--tool-format` names. `generic` is for templates that do not support tools: the tools are then
described in the system message, and calls and results are written as text.
"""
