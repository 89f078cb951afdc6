"""A chat request independent of its dialect: chat completions, Responses and Messages are all translated into it. Plain
data; knows no wire format and no engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ostro.answers.plan import AnswerPlan, OutputRules
from ostro.answers.tools import ReasoningSettings, Tool, ToolChoice
from ostro.engine.request import Request
from ostro.sampling_params import SamplingParams
from ostro.schemas.structured import FormatSource
from ostro.text.chat import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A dialect that does not have a field leaves it at its default."""

    messages: Sequence[Message]
    """Messages in the form of chat completions: role, content (a string, or text parts), `tool_calls` whose arguments
    are strings, `tool_call_id`, `reasoning_content`. A developer's message has the role system here."""
    params: SamplingParams
    """Sampling parameters; `params.structured` is the format that the answer's text must have."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    """Whether one answer may hold more than one call."""
    reasoning: ReasoningSettings = field(default_factory=ReasoningSettings)
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Variables for the chat template. They take precedence over those that `reasoning` sets."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the answer continues the last message instead of starting one."""
    jump_forward: bool = False
    """Whether a call's tokens are appended without being sampled where there is no alternative. For the text, this is
    set in `params.structured`."""
    format_source: FormatSource | None = None
    """The field of the dialect's request that sets the structured output, for error messages."""
    fits_output: bool = False
    """Whether a `max_tokens` that does not fit into the context is lowered rather than refused."""
    prediction: str = ""
    """Expected text of most of the answer, to verify instead of decoding it token by token."""
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat request as sent to the engine, and how to read the output. Specific to one model."""

    request: Request
    plan: AnswerPlan
    reading: OutputRules
