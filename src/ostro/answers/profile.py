"""The properties of one model's chat template, found by `probe` and used by `plan`. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    start: str
    end: str
    label: str = ""
    """What models write right after the start, as a part of the marker: the name of a channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProfile:
    """The defaults describe a template that supports neither tools nor reasoning."""

    tools_in_prompt: bool = False
    """Whether tools that are passed to the template show in the prompt. If not, they are described in the system
    message."""
    argument_form: Literal["mapping", "string"] | None = None
    """The form in which a call's arguments are rendered as JSON. None: calls do not show, and are written as text."""
    results: bool = False
    """Whether messages with the role `tool` show."""
    several_calls: bool = False
    """Whether one message may hold more than one call."""
    null_content: bool = False
    """Whether a message with calls may have no content. If not, it is an empty string."""
    text_beside_calls: Literal["together", "before", "nowhere"] = "together"
    """Where text shows that a message has besides its calls: with them, only in a message of its own before them, or
    nowhere, in which case it is dropped."""
    system: bool = True
    """Whether a system message may come first."""
    late_system: bool = True
    """Whether a system message may come after the first turn."""
    alternates: bool = False
    """Whether user and assistant messages must alternate."""
    short_ids: bool = False
    """Whether call ids must be nine letters and digits, as in Mistral's templates."""
    tool_format: str = "generic"
    """How the model writes calls: a name in `formats.FORMATS`."""
    reasoning: ReasoningMarkers | None = None
    """The markers around the model's reasoning, if the template mentions any."""
    thinking_variable: str | None = None
    """The template's variable that turns reasoning on and off, such as `enable_thinking`."""
    thinks_unasked: bool = True
    """Whether reasoning is on if that variable is not set."""
    takes_effort: bool = False
    """Whether the template reads `reasoning_effort`."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of those markers of the format and the reasoning that are special tokens."""
