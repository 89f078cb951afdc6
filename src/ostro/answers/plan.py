"""From what a request asks for to what is rendered, what constrains the output, and what reads it.

    plan = plan_answer(messages, profile, tools=…, choice=…)
    rendered = tokenizer.render_chat(plan.messages, tools=plan.tools, template_kwargs=plan.template_kwargs, …)
    reading = plan.reading(rendered.text)      what the engine and the text stream need to know
    reader = reading.reader()                  one for each choice
    plan.finish_reason("stop", reader)

Knows a template's profile and the formats of calls; renders nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ostro.answers.call_grammar import GrammarRequest, answer_grammar, argument_schema
from ostro.answers.formats import FORMATS, CallFormat, HarmonyCalls
from ostro.answers.history import template_messages, template_tools
from ostro.answers.lark import Lark
from ostro.answers.profile import ReasoningMarkers, TemplateProfile
from ostro.answers.reader import AnswerReader, new_id, new_short_id
from ostro.answers.tools import ReasoningSettings, Tool, ToolChoice
from ostro.errors import BadRequest
from ostro.structured import StructuredOutput
from ostro.text.chat import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the output is constrained and read, once the prompt is known. The first fields are those of
    `engine.constraint.Constraint`.
    """

    grammar: str | None = None
    """In llguidance's notation. If there is one, it takes the place of a structured output, which is part of it."""
    free_until: str = ""
    """The reasoning's end; for a structured output too, if that is all there is."""
    lazy: bool = False
    free_tokens: int | None = None
    """The budget of the reasoning: after so many tokens without `free_until`, that text is forced."""
    prompt_suffix: str = ""
    """What goes to the end of the prompt: it begins the reasoning, after which the constraint starts."""
    kept_ids: frozenset[int] = frozenset()
    """Special tokens that the reader must see: `TextStream` keeps their texts."""
    markers: ReasoningMarkers | None = None
    in_reasoning: bool = False
    """Whether the prompt ends inside the reasoning."""
    format: CallFormat | None = None
    """How calls are written. None: there are none to be found."""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    max_calls: int | None = None
    only_calls: bool = False
    """Whether the output is held to calls."""
    short_ids: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the whole output is text, so that no reader is needed."""
        return self.markers is None and self.format is None

    def reader(self) -> AnswerReader:
        """For one choice."""
        return AnswerReader(
            markers=self.markers,
            in_reasoning=self.in_reasoning,
            format=self.format,
            tools=self.tools,
            max_calls=self.max_calls,
            only_calls=self.only_calls,
            new_id=new_short_id if self.short_ids else new_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaCheck:
    """What a tool's calls are held to, to be compiled by itself before the answer's grammar is: so that an error names
    the tool.
    """

    tool_index: int
    structured: StructuredOutput
    is_strict: bool
    """If not, a schema that cannot be compiled is no error: plan again, with a tool that is not enforced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """What to render, and how to read what comes."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None
    """What the template gets as tools; None if they are in a message, or if there are none."""
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    profile: TemplateProfile
    choice: ToolChoice
    reasoning: ReasoningSettings
    callable_tools: Sequence[Tool] = ()
    """Those that may be called."""
    parallel: bool = True
    structured: StructuredOutput | None = None
    continued: str | None = None
    """The text that the answer continues, if it continues a message."""
    checks: Sequence[SchemaCheck] = ()

    def reading(self, prompt: str) -> Reading:
        """Given the rendered prompt, whose end tells whether the model begins inside its reasoning."""
        markers = self.profile.reasoning
        in_reasoning = markers is not None and self._is_open(prompt, markers)
        suffix = "" if in_reasoning else self._opening(prompt)
        in_reasoning = in_reasoning or bool(suffix)
        # A thought that may come by itself is part of the grammar. One that the prompt has closed does not come.
        may_think = markers is not None and not in_reasoning and not self._is_closed(prompt)
        grammar, lazy = self._grammar(markers if may_think else None, in_reasoning=in_reasoning)
        budget = self.reasoning.budget if in_reasoning else None
        if budget is not None and grammar is None and self.structured is None:
            grammar, lazy = Lark({}).grammar("TEXT"), True
        format = self._format if self.callable_tools or self._is_harmony else None
        return Reading(
            grammar=grammar,
            lazy=lazy,
            free_until=markers.end if markers is not None and in_reasoning else "",
            free_tokens=budget,
            prompt_suffix=suffix,
            kept_ids=self._kept_ids(format),
            markers=markers,
            in_reasoning=in_reasoning,
            format=format,
            tools={tool.name: tool for tool in self.callable_tools},
            max_calls=None if self._several else 1,
            only_calls=self._is_forced,
            short_ids=self.profile.short_ids,
        )

    def finish_reason(self, reason: str, reader: AnswerReader) -> str:
        """OpenAI's, given the engine's: `tool_calls` in place of `stop`, unless the choice named the tool, or a stop
        string has cut off the last call.
        """
        called = bool(reader.calls) and not reader.has_open_call and self.choice.mode != "named"
        return "tool_calls" if called and reason == "stop" else reason

    @property
    def _format(self) -> CallFormat:
        return FORMATS[self.profile.tool_format]

    @property
    def _is_harmony(self) -> bool:
        return isinstance(self._format.calls, HarmonyCalls)

    @property
    def _several(self) -> bool:
        return self.parallel and self.choice.mode != "named"

    @property
    def _is_forced(self) -> bool:
        return bool(self.callable_tools) and self.choice.mode in ("required", "named")

    def _is_open(self, prompt: str, markers: ReasoningMarkers) -> bool:
        if self.continued is not None:
            return self.continued.rfind(markers.start) > self.continued.rfind(markers.end)
        return prompt.rstrip().endswith(markers.start)

    def _is_closed(self, prompt: str) -> bool:
        markers = self.profile.reasoning
        return self.continued is not None or (markers is not None and prompt.rstrip().endswith(markers.end))

    def _opening(self, prompt: str) -> str:
        """What begins the reasoning of a model that would begin it by itself, where something must follow its end."""
        markers = self.profile.reasoning
        needed = self._is_forced or self.structured is not None or self.reasoning.budget is not None
        if markers is None or not needed or not self._thinks or self._is_closed(prompt):
            return ""
        return f"{markers.start}\n"

    @property
    def _thinks(self) -> bool:
        """Whether the template's variable turns reasoning on. Some templates only tell the model, so that the prompt's
        end does not show it.
        """
        variable = self.profile.thinking_variable
        if variable is None or self.reasoning.budget == 0:
            return False
        return bool(self.template_kwargs.get(variable, self.profile.thinks_unasked))

    def _grammar(self, thought: ReasoningMarkers | None, *, in_reasoning: bool) -> tuple[str | None, bool]:
        """The grammar, and whether it is lazy."""
        if not self.callable_tools and not (self._is_harmony and self.structured is not None):
            return None, False
        lazy = not self._is_forced and self.structured is None
        asked = GrammarRequest(
            format=self._format,
            tools=self.callable_tools,
            mode="lazy" if lazy else "forced" if self._is_forced else "either",
            structured=None if self._is_forced else self.structured,
            several=self._several,
            reasoning=thought,
            after_reasoning=in_reasoning,
            special_ids=self.profile.special_ids,
        )
        return answer_grammar(asked), lazy

    def _kept_ids(self, format: CallFormat | None) -> frozenset[int]:
        markers = self.profile.reasoning
        texts = {*(() if markers is None else (markers.start, markers.end)), *(format.special if format else ())}
        return frozenset(id for text, id in self.profile.special_ids.items() if text in texts)


def plan_answer(
    messages: Sequence[Message],
    profile: TemplateProfile,
    *,
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    parallel: bool = True,
    structured: StructuredOutput | None = None,
    reasoning: ReasoningSettings | None = None,
    template_kwargs: Mapping[str, object] | None = None,
    continue_final_message: bool = False,
) -> AnswerPlan:
    """Raises BadRequest that names `tools` or `tool_choice`. `messages` are as a chat request has them, with each
    call's arguments as a string. `template_kwargs` win over what the reasoning settings come to.
    """
    choice, reasoning = choice or ToolChoice(), reasoning or ReasoningSettings()
    allowed = _callable(tools, choice)
    shown = () if profile.tools_in_prompt else tools
    return AnswerPlan(
        messages=template_messages(messages, shown, profile),
        tools=template_tools(tools) if tools and profile.tools_in_prompt else None,
        template_kwargs={**_reasoning_kwargs(reasoning, profile), **(template_kwargs or {})},
        profile=profile,
        choice=choice,
        reasoning=reasoning,
        callable_tools=allowed,
        parallel=parallel,
        structured=structured,
        continued=_continued(messages) if continue_final_message else None,
        checks=_checks(tools, allowed),
    )


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """The tools that may be called; raises BadRequest for a choice of others."""
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(f"tools has two of the name {twice!r}: give each a name of its own.", param="tools")
    if choice.mode == "none":
        return ()
    if not tools and choice.mode != "auto":
        raise BadRequest("tool_choice asks for a call, and there are no tools: send some.", param="tool_choice")
    wanted = {choice.name} if choice.name is not None else choice.allowed
    for name in sorted(wanted or ()):
        if name not in names:
            raise BadRequest(f"tool_choice names {name!r}, which is not in tools.", param="tool_choice")
    return tuple(tool for tool in tools if wanted is None or tool.name in wanted)


def _reasoning_kwargs(reasoning: ReasoningSettings, profile: TemplateProfile) -> dict[str, object]:
    kwargs: dict[str, object] = {}
    enabled = reasoning.enabled
    if enabled is None and (reasoning.effort is not None or reasoning.budget is not None):
        enabled = reasoning.effort != "none" and reasoning.budget != 0
    if enabled is not None and profile.thinking_variable is not None:
        kwargs[profile.thinking_variable] = enabled
    if reasoning.effort is not None and profile.takes_effort:
        kwargs["reasoning_effort"] = _EFFORTS.get(reasoning.effort, reasoning.effort)
    return kwargs


# Templates know these three.
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def _continued(messages: Sequence[Message]) -> str:
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else ""


def _checks(tools: Sequence[Tool], allowed: Sequence[Tool]) -> tuple[SchemaCheck, ...]:
    names = {tool.name for tool in allowed if tool.is_enforced}
    schemas = [argument_schema(tool) if tool.name in names else None for tool in tools]
    return tuple(
        SchemaCheck(
            tool_index=index,
            structured=StructuredOutput(json_schema=json.dumps(schema, ensure_ascii=False), strict=tools[index].strict),
            is_strict=tools[index].strict,
        )
        for index, schema in enumerate(schemas)
        if schema is not None
    )
