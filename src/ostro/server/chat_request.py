"""One turn of a conversation, whatever dialect it was asked for in: the request that chat completions, Responses and
Messages are all translated into. Plain data; knows no wire and no engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ostro.answers.plan import AnswerPlan, Reading
from ostro.answers.tools import ReasoningSettings, Tool, ToolChoice
from ostro.engine.request import Request
from ostro.sampling_params import SamplingParams
from ostro.schemas import FormatSource
from ostro.text.chat import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What to answer, and how. A dialect that has no word for a field leaves it at its default."""

    messages: Sequence[Message]
    """In the form of chat completions: role, content (a text, or text parts), `tool_calls` whose arguments are
    strings, `tool_call_id`, `reasoning_content`. A developer's message has the role system here."""
    params: SamplingParams
    """`params.structured` is the format that the answer's text must have."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    """Whether one answer may hold more than one call."""
    reasoning: ReasoningSettings = field(default_factory=ReasoningSettings)
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Variables for the chat template. They win over what `reasoning` comes to."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the answer continues the last message instead of starting one."""
    jump_forward: bool = False
    """Whether tokens of calls that are the only possible ones are appended without being sampled; of the text,
    `params.structured` says it."""
    format_source: FormatSource | None = None
    """Where the dialect's request says what the text must look like; errors about that name it."""
    fits_output: bool = False
    """Whether a `max_tokens` that the context has no room for is lowered rather than refused."""
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat request as the engine gets it, and how to read what comes back. One model's own."""

    request: Request
    plan: AnswerPlan
    reading: Reading
