"""What is known of one model's chat template: found by `probe`, used by `plan`. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    start: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProfile:
    """The defaults describe a template that knows neither tools nor reasoning."""

    tools_in_prompt: bool = False
    """Whether the tools that are passed to the template show in its text. If not, they are described in the system
    message."""
    argument_form: Literal["mapping", "string"] | None = None
    """The form in which a call's arguments come out as JSON. None: calls do not show, and are written as text."""
    results: bool = False
    """Whether messages with the role `tool` show."""
    several_calls: bool = False
    """Whether one message may hold more than one call."""
    null_content: bool = False
    """Whether a message with calls may have no content. If not, it is an empty string."""
    text_beside_calls: Literal["together", "before", "nowhere"] = "together"
    """Where a text shows that a message has beside its calls: with them, only in a message of its own before them, or
    nowhere, so that it is left out."""
    system: bool = True
    """Whether a system message may come first."""
    late_system: bool = True
    """Whether a system message may come after the first turn."""
    alternates: bool = False
    """Whether users' messages and the model's must take turns."""
    short_ids: bool = False
    """Whether calls' ids must be nine letters and digits, as in Mistral's templates."""
    tool_format: str = "generic"
    """How the model writes calls: a name in `formats.FORMATS`."""
    reasoning: ReasoningMarkers | None = None
    """What surrounds the model's reasoning, if the template knows of any."""
    thinking_variable: str | None = None
    """The template's variable that turns reasoning on and off, such as `enable_thinking`."""
    thinks_unasked: bool = True
    """Whether reasoning is on where that variable is not given."""
    takes_effort: bool = False
    """Whether the template reads `reasoning_effort`."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Those markers of the format and the reasoning that are special tokens, with their ids."""
