"""Finds out what a chat template supports by rendering conversations that differ in one thing. A probe that fails only
means that something is not supported: a template is not trusted.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Unpack

from ostro.answers.formats import FORMATS, PROBE
from ostro.answers.profile import ReasoningMarkers, TemplateProfile
from ostro.errors import BadRequest, Unavailable
from ostro.text.chat import Message, RenderOptions
from ostro.text.renderer import Renderer
from ostro.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

TOOL_FORMATS = tuple(FORMATS)
"""The values of `--tool-format`, besides `auto`."""

# A template without any of these words treats all messages alike, and has nothing to probe for.
_TELLING = re.compile(r"tool|think|reason|channel|raise_exception", re.IGNORECASE)
_REASONING = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
    ReasoningMarkers("<thinking>", "</thinking>"),
    ReasoningMarkers("<reasoning>", "</reasoning>"),
    ReasoningMarkers("<|channel>", "<channel|>", label="thought"),
)
_THINKING_VARIABLES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_MAX_ENDED = 2

_KEY, _VALUE, _OTHER, _ANSWER, _ORDER = "probe_key", "probe-value", "probe-other", "probe-answer", "Probe order."
_LONG_IDS, _SHORT_IDS = ("call_abcdefghijklmnopqrst", "call_bcdefghijklmnopqrstu"), ("abcdefgh1", "abcdefgh2")
_USER: Message = {"role": "user", "content": "Probe."}
_SAID: Message = {"role": "assistant", "content": "Probed."}
_SYSTEM: Message = {"role": "system", "content": _ORDER}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}, "required": ["a"]}
_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {"name": PROBE, "description": "Probes.", "parameters": _SCHEMA},
}


class Render(Protocol):
    def __call__(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> str | None: ...


_Form = Literal["mapping", "string"]
_FORMS: tuple[_Form, ...] = ("mapping", "string")


def profile_of(tokenizer: Tokenizer, tool_format: str = "auto") -> TemplateProfile:
    """The profile of a model's chat template. Blocks on the process that renders it: do not call it in an event loop.

    `tool_format` is one of `TOOL_FORMATS`, or `auto` to detect it from the template's rendering of a call.
    """
    if tool_format not in ("auto", *TOOL_FORMATS):
        raise BadRequest(
            f"Unknown tool format {tool_format!r}. Choose one of auto, {', '.join(TOOL_FORMATS)}.", param="tool_format"
        )
    template = tokenizer.chat_template
    if template is None:
        return TemplateProfile()
    found = probed(template.whole_source, _Rendering(tokenizer.renderer), tool_format)
    return _with_special_ids(found, tokenizer)


class _Rendering:
    """Renders conversations. Returns None if the template fails."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._num_ended = 0

    def __call__(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> str | None:
        if self._num_ended >= _MAX_ENDED:
            return None
        try:
            return self._renderer.render(messages, **options)
        except (BadRequest, Unavailable):
            # A template that hangs loses its process. Do not spend its two seconds again for every probe.
            self._num_ended += self._renderer.pid is None
            return None


def probed(source: str, render: Render, tool_format: str = "auto") -> TemplateProfile:
    """The profile without the ids of special tokens. `render` returns None if the template fails."""
    if not _TELLING.search(source) or render([_USER]) is None:
        return TemplateProfile(tool_format="generic" if tool_format == "auto" else tool_format)
    with_tools = render([_USER], tools=[_TOOL]) or ""
    calls = _calls(_Shown(render, num_nones=with_tools.count("None")))
    shows_tools = PROBE in with_tools
    found = _format_of(calls.text, with_tools) if tool_format == "auto" else tool_format
    if found == "generic":
        if shows_tools and tool_format == "auto":
            _log.warning(
                "The chat template shows tools, but not in which known format the model calls them. They are described "
                "in the system message instead. Set tool_format if you know the format."
            )
        calls, shows_tools = _Calls(), False
    variable, thinks_unasked = _thinking(source, render)
    return TemplateProfile(
        tools_in_prompt=shows_tools,
        argument_form=calls.form,
        results=calls.results,
        several_calls=calls.several,
        null_content=calls.null_content,
        text_beside_calls=calls.text_place,
        system=_ORDER in (render([_SYSTEM, _USER]) or ""),
        late_system=_ORDER in (render([_USER, _SAID, _SYSTEM, _USER]) or ""),
        alternates=render([_USER, _USER]) is None,
        short_ids=calls.short_ids,
        tool_format=found,
        reasoning=next((pair for pair in _REASONING if pair.start in source or pair.end in source), None),
        thinking_variable=variable,
        thinks_unasked=thinks_unasked,
        takes_effort=_EFFORT in source,
    )


@dataclass(frozen=True, slots=True)
class _Calls:
    """How a template renders calls in a history. The defaults describe one that does not."""

    form: _Form | None = None
    null_content: bool = False
    short_ids: bool = False
    results: bool = False
    several: bool = False
    text_place: Literal["together", "before", "nowhere"] = "together"
    text: str = ""
    """The rendering of one call."""


class _Shown:
    """Renders calls, and checks whether they show."""

    def __init__(self, render: Render, *, num_nones: int) -> None:
        """`num_nones`: how often "None" occurs in the rendering without any call."""
        self._render = render
        self._num_nones = num_nones

    def text(self, messages: Sequence[Message], *values: str) -> str | None:
        """The rendering, if it shows the values as JSON, or as the format writes them: not quoted twice, not as a
        Python repr, and without "None" in place of missing content.
        """
        text = self._render(messages, tools=[_TOOL])
        if text is None or _KEY not in text or not all(value in text for value in values):
            return None
        wrong = f'\\"{_KEY}' in text or f"'{_KEY}'" in text or text.count("None") > self._num_nones
        return None if wrong else text


def _calls(shown: _Shown) -> _Calls:
    """The first way of passing a call that shows its arguments correctly."""
    for form in _FORMS:
        for ids in (_LONG_IDS, _SHORT_IDS):
            for content in (None, ""):
                one, two = (_calling(values, form, ids, content) for values in ([_VALUE], [_VALUE, _OTHER]))
                with_result = shown.text([_USER, one, _result(ids[0])], _VALUE)
                text = with_result or shown.text([_USER, one], _VALUE)
                if text is not None:
                    several = shown.text([_USER, two, *map(_result, ids)], _VALUE, _OTHER)
                    result = [_result(ids[0])] if with_result else []
                    return _Calls(
                        form=form,
                        null_content=content is None,
                        short_ids=ids == _SHORT_IDS,
                        results=_ANSWER in (with_result or ""),
                        several=several is not None,
                        text_place=_text_place(shown, one, result),
                        text=text,
                    )
    return _Calls()


def _text_place(shown: _Shown, call: Message, result: Sequence[Message]) -> Literal["together", "before", "nowhere"]:
    words = str(_SAID["content"])
    if shown.text([_USER, {**call, "content": words}, *result], _VALUE, words):
        return "together"
    # Probed in the middle of a conversation, because some templates count turns.
    return "before" if shown.text([_USER, _SAID, call, *result, _SAID, _USER], _VALUE, words) else "nowhere"


def _calling(values: Sequence[str], form: _Form, ids: Sequence[str], content: str | None) -> Message:
    def arguments(value: str) -> object:
        return {_KEY: value} if form == "mapping" else f'{{"{_KEY}": "{value}"}}'

    calls = [
        {"id": id, "type": "function", "function": {"name": PROBE, "arguments": arguments(value)}}
        for id, value in zip(ids, values, strict=False)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(id: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": PROBE, "content": _ANSWER}


def _format_of(call: str, tools: str) -> str:
    """The format, detected from the text of a call, or else from the tools' descriptions."""
    for text in (call, tools):
        for name, format in FORMATS.items():
            if name != "generic" and all(re.search(each, text) for each in format.evidence):
                return name
    return "generic"


def _thinking(source: str, render: Render) -> tuple[str | None, bool]:
    """The variable that turns reasoning on and off, and whether reasoning is on if it is not set."""
    for name in _THINKING_VARIABLES:
        if name in source:
            on, off = (render([_USER], template_kwargs={name: value}) for value in (True, False))
            if on is not None and off is not None and on != off:
                return name, render([_USER]) != off
    return None, True


def _with_special_ids(profile: TemplateProfile, tokenizer: Tokenizer) -> TemplateProfile:
    markers = () if profile.reasoning is None else (profile.reasoning.start, profile.reasoning.end)
    ids = {text: tokenizer.special_id(text) for text in (*FORMATS[profile.tool_format].special, *markers)}
    return replace(profile, special_ids={text: id for text, id in ids.items() if id is not None})
