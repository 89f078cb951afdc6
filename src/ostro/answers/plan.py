"""Plans an answer from its request: what to render, how to constrain the output, and how to read it.

    plan = plan_answer(messages, profile, tools=…, choice=…)
    rendered = tokenizer.render_chat(plan.messages, tools=plan.tools, template_kwargs=plan.template_kwargs, …)
    reading = plan.reading(rendered.text)      for the engine and the text stream
    reading = reading.enforcing(…)             with the checked schemas and structure, for `grammar()`
    reader = reading.reader()                  one per choice
    plan.finish_reason("stop", reader)

Knows a template's profile and the formats of calls; renders nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ostro.answers.call_grammar import GrammarRequest, answer_grammar, argument_schema
from ostro.answers.formats import FORMATS, CallFormat, HarmonyCalls
from ostro.answers.history import template_messages, template_tools
from ostro.answers.profile import ReasoningMarkers, TemplateProfile
from ostro.answers.reader import AnswerReader, new_id, new_short_id
from ostro.answers.tools import ANY_OBJECT, ReasoningSettings, Tool, ToolChoice
from ostro.errors import BadRequest
from ostro.formats.guidance_text import Lark
from ostro.structured import StructuredOutput
from ostro.text.chat import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """How the output is constrained and read, once the prompt is known. `free_until` to `free_tokens` are fields of
    `engine.constraint.Constraint`.
    """

    asked: GrammarRequest | None = None
    """The grammar to build, if any. It replaces the structured output's own, and includes that."""
    free_until: str = ""
    """The end marker of the reasoning. Also applies where `asked` is None and only a structured output constrains the
    output."""
    lazy: bool = False
    is_users: bool = False
    """Whether a user's own regex is part of the grammar."""
    free_tokens: int | None = None
    """The reasoning budget: after this many tokens without `free_until`, that text is forced."""
    prompt_suffix: str = ""
    """Text to append to the prompt. It begins the reasoning, after which the constraint starts."""
    kept_ids: frozenset[int] = frozenset()
    """Special tokens that the reader must see: `TextStream` keeps their texts."""
    markers: ReasoningMarkers | None = None
    in_reasoning: bool = False
    """Whether the prompt ends inside the reasoning."""
    format: CallFormat | None = None
    """How calls are written. None if no calls are expected."""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    max_calls: int | None = None
    only_calls: bool = False
    """Whether the output is constrained to calls."""
    short_ids: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the whole output is text, so that no reader is needed."""
        return self.markers is None and self.format is None

    def grammar(self) -> str | None:
        """The grammar in llguidance's notation; None if at most a structured output constrains the output."""
        if self.asked is not None:
            return answer_grammar(self.asked)
        # The end of the reasoning can only be forced if a grammar follows it.
        return Lark({}).grammar("TEXT") if self.lazy else None

    def enforcing(self, schemas: Mapping[str, Mapping[str, object]], structure: str | None) -> "OutputRules":
        """Sets the checked schemas, by tool name, and the structured output as the body of a rule. Tools that are not
        strict and have no checked schema take any object.
        """
        if self.asked is None:
            return self
        tools = tuple(
            replace(tool, enforced=schemas[tool.name]) if tool.name in schemas else _loosened(tool)
            for tool in self.asked.tools
        )
        structure = structure if self.asked.mode == "either" else None
        return replace(self, asked=replace(self.asked, tools=tools, structure=structure))

    def loosened(self) -> "OutputRules | None":
        """For a grammar that is too large as a whole: lets tools that are not strict take any object as arguments. None
        if that changes nothing.
        """
        if self.asked is None:
            return None
        asked = replace(self.asked, tools=tuple(map(_loosened, self.asked.tools)))
        return replace(self, asked=asked) if asked != self.asked else None

    def reader(self) -> AnswerReader:
        """A new reader, for one choice."""
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
    """A schema for a tool's calls, to be checked by itself before it becomes part of the answer's grammar. So an error
    names the tool, and keywords that cannot be enforced are dropped.
    """

    tool_index: int
    name: str
    is_custom: bool
    structured: StructuredOutput
    """The schema, with the separators that calls use."""
    is_strict: bool
    """Whether a schema that cannot be compiled is an error; if not, any object is allowed instead."""

    def refusal(self, error: BadRequest) -> BadRequest:
        """The check's error, in terms of the request: it names the tool and the parameter."""
        return _refusal(self.tool_index, self.name, error, is_custom=self.is_custom)


def _refusal(index: int, name: str, error: BadRequest, *, is_custom: bool) -> BadRequest:
    place = f"tools[{index}].custom.format" if is_custom else f"tools[{index}].function.parameters"
    what = f"format of custom tool '{name}'" if is_custom else f"schema for function '{name}'"
    return type(error)(f"Invalid {what}: {error.message}", param=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """What to render, and how to constrain and read the output."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None = None
    """Tools to pass to the template; None if they are described in a message, or if there are none."""
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    profile: TemplateProfile
    choice: ToolChoice
    reasoning: ReasoningSettings
    callable_tools: tuple[Tool, ...] = ()
    """Tools that may be called."""
    parallel: bool = True
    structured: StructuredOutput | None = None
    continued: str | None = None
    """The text that the answer continues, if it continues a message."""
    checks: Sequence[SchemaCheck] = ()

    def reading(self, prompt: str) -> OutputRules:
        """How to constrain and read the output. The end of the rendered prompt tells whether reasoning has begun."""
        markers = self.profile.reasoning
        in_reasoning = markers is not None and self._is_open(prompt, markers)
        suffix = "" if in_reasoning else self._opening(prompt)
        in_reasoning = in_reasoning or bool(suffix)
        # The grammar includes reasoning that the model may begin by itself, unless the prompt has already closed it.
        may_think = markers is not None and not in_reasoning and not self._is_closed(prompt)
        asked = self._asked(markers if may_think else None, in_reasoning=in_reasoning)
        budget = self.reasoning.budget if in_reasoning else None
        # A budget without a structure only needs the end of the reasoning to be found.
        lazy = asked.mode == "lazy" if asked is not None else budget is not None and self.structured is None
        format = self._format if self.callable_tools or self._is_harmony else None
        return OutputRules(
            asked=asked,
            lazy=lazy,
            is_users=self._has_regex,
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
        """OpenAI's finish reason, given the engine's: `tool_calls` in place of `stop`, unless `tool_choice` named the
        tool, or a stop string has cut off the last call.
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

    @property
    def _has_regex(self) -> bool:
        of_text = self.structured is not None and self.structured.regex is not None
        return of_text or any(tool.regex is not None for tool in self.callable_tools)

    def _is_open(self, prompt: str, markers: ReasoningMarkers) -> bool:
        if self.continued is not None:
            return self.continued.rfind(markers.start) > self.continued.rfind(markers.end)
        return prompt.rstrip().endswith(markers.start + markers.label)

    def _is_closed(self, prompt: str) -> bool:
        markers = self.profile.reasoning
        return self.continued is not None or (markers is not None and prompt.rstrip().endswith(markers.end))

    def _opening(self, prompt: str) -> str:
        """Text that begins the reasoning, if the model would begin it itself and its end must be found."""
        markers = self.profile.reasoning
        needed = self._is_forced or self.structured is not None or self.reasoning.budget is not None
        if markers is None or not needed or not self._thinks or self._is_closed(prompt):
            return ""
        return f"{markers.start}{markers.label}\n"

    @property
    def _thinks(self) -> bool:
        """Whether the template's variable turns reasoning on. Some templates only instruct the model to reason, so the
        end of the prompt does not show it.
        """
        variable = self.profile.thinking_variable
        if variable is None or self.reasoning.budget == 0:
            return False
        return bool(self.template_kwargs.get(variable, self.profile.thinks_unasked))

    def _asked(self, thought: ReasoningMarkers | None, *, in_reasoning: bool) -> GrammarRequest | None:
        """None if at most a structured output constrains the output."""
        if not self.callable_tools and not (self._is_harmony and self.structured is not None):
            return None
        lazy = not self._is_forced and self.structured is None
        return GrammarRequest(
            format=self._format,
            tools=self.callable_tools,
            mode="lazy" if lazy else "forced" if self._is_forced else "either",
            several=self._several,
            reasoning=thought,
            after_reasoning=in_reasoning,
            special_ids=self.profile.special_ids,
        )

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
    """Raises BadRequest for `tools`, `tool_choice`, or a structured output that cannot be combined with them.

    `messages` are those of a chat request, with each call's arguments as a string. `template_kwargs` take precedence
    over the reasoning settings.
    """
    choice, reasoning = choice or ToolChoice(), reasoning or ReasoningSettings()
    allowed = _callable(tools, choice)
    _check_combination(structured, allowed, choice, profile)
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
        checks=tuple(_checks(tools, allowed)),
    )


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """The tools that may be called; raises BadRequest for a choice of others."""
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(f"tools has two entries named {twice!r}: give each its own name.", param="tools")
    if choice.mode == "none":
        return ()
    if not tools and choice.mode != "auto":
        raise BadRequest("tool_choice asks for a call, but there are no tools: send some.", param="tool_choice")
    wanted = {choice.name} if choice.name is not None else choice.allowed
    for name in sorted(wanted or ()):
        if name not in names:
            raise BadRequest(f"tool_choice names {name!r}, which is not in tools.", param="tool_choice")
    return tuple(tool for tool in tools if wanted is None or tool.name in wanted)


def _check_combination(
    structured: StructuredOutput | None, allowed: Sequence[Tool], choice: ToolChoice, profile: TemplateProfile
) -> None:
    """Raises BadRequest for a structured output that would have to be part of the answer's grammar but cannot be."""
    is_alone = not allowed and not isinstance(FORMATS[profile.tool_format].calls, HarmonyCalls)
    if structured is None or is_alone or structured.kind not in ("grammar", "structural_tag"):
        return
    if not allowed or choice.mode == "auto":
        raise BadRequest(
            f"{structured.kind} cannot be combined with tools, or used with a model that answers in channels. Describe "
            "the answer with a JSON schema, a regex or choices.",
            param=structured.kind,
        )


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


# Templates only know low, medium and high.
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def _continued(messages: Sequence[Message]) -> str:
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else ""


def _checks(tools: Sequence[Tool], allowed: Sequence[Tool]) -> Iterator[SchemaCheck]:
    """Schemas to check. One that is too large raises BadRequest if the tool is strict, and is left out otherwise."""
    names = {tool.name for tool in allowed if tool.enforced is None}
    for index, tool in enumerate(tools):
        schema = argument_schema(tool) if tool.name in names else None
        if schema is None:
            continue
        # A custom tool has no other constraint than its regex.
        is_strict = tool.strict or tool.is_custom
        try:
            text = json.dumps(schema, ensure_ascii=False)
            structured = StructuredOutput(json_schema=text, strict=is_strict, jump_forward=True)
        except BadRequest as error:
            if is_strict:
                raise _refusal(index, tool.name, error, is_custom=tool.is_custom) from error
            continue
        yield SchemaCheck(
            tool_index=index, name=tool.name, is_custom=tool.is_custom, structured=structured, is_strict=is_strict
        )


def _loosened(tool: Tool) -> Tool:
    """The tool taking any object, unless its schema must be exact or it takes no arguments."""
    is_exact = tool.strict or tool.is_custom or argument_schema(tool) is None
    return tool if is_exact else replace(tool, enforced=ANY_OBJECT)
