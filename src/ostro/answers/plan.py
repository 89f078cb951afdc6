"""From what a request asks for to what is rendered, what constrains the output, and what reads it.

    plan = plan_answer(messages, profile, tools=…, choice=…)
    rendered = tokenizer.render_chat(plan.messages, tools=plan.tools, template_kwargs=plan.template_kwargs, …)
    reading = plan.reading(rendered.text)      what the engine and the text stream need to know
    reader = reading.reader()                  one for each choice
    plan.finish_reason("stop", reader)

Knows a template's profile and the formats of calls; renders nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ostro.answers.profile import ReasoningMarkers, TemplateProfile
from ostro.answers.reader import AnswerReader
from ostro.answers.tools import ReasoningSettings, Tool, ToolChoice
from ostro.errors import Unsupported
from ostro.text.chat import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the output is constrained and read, once the prompt is known. The first fields are those of
    `engine.constraint.Constraint`.
    """

    grammar: str | None = None
    """For the calls, in llguidance's notation. None: calls constrain nothing; a structured output still may."""
    free_until: str = ""
    """Also for a structured output: the reasoning's end."""
    lazy: bool = False
    free_tokens: int | None = None
    """The budget of the reasoning: after so many tokens without `free_until`, that text is forced."""
    kept_ids: frozenset[int] = frozenset()
    """Special tokens that the reader must see: `TextStream` keeps their texts."""
    markers: ReasoningMarkers | None = None
    in_reasoning: bool = False
    """Whether the prompt ends inside the reasoning."""

    @property
    def is_plain(self) -> bool:
        """Whether the whole output is text, so that no reader is needed."""
        return self.markers is None

    def reader(self) -> AnswerReader:
        """For one choice."""
        return AnswerReader(markers=self.markers, in_reasoning=self.in_reasoning)


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

    def reading(self, prompt: str) -> Reading:
        """Given the rendered prompt, whose end tells whether the model begins inside its reasoning."""
        markers = self.profile.reasoning
        in_reasoning = markers is not None and prompt.rstrip().endswith(markers.start)
        return Reading(markers=markers, in_reasoning=in_reasoning)

    def finish_reason(self, reason: str, reader: AnswerReader) -> str:
        """OpenAI's, given the engine's: `tool_calls` in place of `stop`, unless the choice named the tool."""
        called = reason == "stop" and bool(reader.calls) and self.choice.mode != "named"
        return "tool_calls" if called else reason


def plan_answer(
    messages: Sequence[Message],
    profile: TemplateProfile,
    *,
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    parallel: bool = True,
    reasoning: ReasoningSettings | None = None,
    template_kwargs: Mapping[str, object] | None = None,
) -> AnswerPlan:
    """Raises BadRequest that names `tools` or `tool_choice`. `messages` are as a chat request has them, with each
    call's arguments as a string. `template_kwargs` win over what the reasoning settings come to.
    """
    if tools:
        raise Unsupported("tools are not supported.", param="tools")
    return AnswerPlan(
        messages=messages,
        template_kwargs=template_kwargs or {},
        profile=profile,
        choice=choice or ToolChoice(),
        reasoning=reasoning or ReasoningSettings(),
    )
