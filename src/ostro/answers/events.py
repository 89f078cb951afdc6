"""The parts of an answer, as a reader finds them in the text. Every dialect's writer is fed with these."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thought. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of what the model said. Never empty."""

    text: str
    begin: int = field(default=0, compare=False)
    """Where it is in the raw answer."""


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. Comes once for each call, before its arguments; `index` counts the answer's calls from 0."""

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
class Call:
    """A call as far as it has come."""

    id: str
    name: str
    is_custom: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """JSON, or a custom tool's input, once the call is complete."""
        return "".join(self.pieces)
