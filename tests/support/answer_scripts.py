"""Scripted answer events for tests of the stream writers, and clients that read a given stream."""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from hypothesis import strategies as st

from ostro.answers.events import CallArguments, CallBegin, Event, Reasoning, Text

PIECES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), max_size=4)


@dataclass
class Script:
    """An answer's events, and what they come to."""

    events: list[Event] = field(default_factory=list)
    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Reasoning, text and calls, of which any may be missing."""
    script = Script()
    for piece in draw(PIECES):
        script.events.append(Reasoning(piece))
        script.reasoning += piece
    for piece in draw(PIECES):
        script.events.append(Text(piece))
        script.text += piece
    for index in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(["look", "files.read"]))
        value = draw(st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\'), max_size=4))
        arguments = f'{{"at": "{value}"}}'
        cut = draw(st.integers(0, len(arguments)))
        script.events.append(CallBegin(index, f"call_{index}", name))
        script.events += [CallArguments(index, part) for part in (arguments[:cut], arguments[cut:]) if part]
        script.calls.append((name, arguments))
    return script


class Replay:
    """Answers every request with `body` as an event stream. `http` is the httpx that the client uses."""

    def __init__(self, http: ModuleType) -> None:
        self.body = b""
        self._http = http
        self.client = http.Client(transport=http.MockTransport(self._answer))

    def _answer(self, request: object) -> Any:
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        return self._http.Response(200, headers=headers, content=self.body)
