"""The parts of an answer that a reader finds in the text, and that every dialect's writer takes."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the model's reasoning. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the model's text. Never empty."""

    text: str
    begin: int = field(default=0, compare=False)
    """Offset in the raw answer."""


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. Sent once per call, before its arguments; `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments: raw JSON, or a custom tool's input as it is. Never empty."""

    index: int
    text: str


Event = Reasoning | Text | CallBegin | CallArguments


@dataclass(slots=True)
class ParsedCall:
    """A call, as far as it has been read."""

    id: str
    name: str
    is_custom: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The arguments so far: once the call is complete, JSON or a custom tool's input."""
        return "".join(self.pieces)
