"""Reads one choice's answer as it arrives: reasoning, text and tool calls. Knows text only."""

from ostro.answers.events import Call, Event, Reasoning, Text
from ostro.answers.profile import ReasoningMarkers
from ostro.answers.scanner import Parse, Scanner


class AnswerReader:
    """Feed it with `push` and finish with `end`. However the text is cut, the joined events are the same."""

    def __init__(self, *, markers: ReasoningMarkers | None = None, in_reasoning: bool = False) -> None:
        self.calls: list[Call] = []
        self.is_reasoning = in_reasoning
        """Whether what comes next is reasoning, as far as can be told."""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._markers = markers
        self._events: list[Event] = []
        self._scanner = Scanner()
        self._was_cut = False
        self._parse = self._answer()
        next(self._parse)

    @property
    def text(self) -> str:
        """All that the model has said so far."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    def push(self, text: str) -> list[Event]:
        """What can be told of the answer by now, beyond what was told before."""
        if text:
            self._scanner.feed(text)
            next(self._parse, None)
        events, self._events = self._events, []
        return events

    def end(self, cut: bool) -> list[Event]:
        """The rest. `cut`: the output has reached its limit, so what is incomplete is not a mistake of the model's."""
        self._was_cut = cut
        self._scanner.end()
        next(self._parse, None)
        events, self._events = self._events, []
        return events

    def _answer(self) -> Parse[None]:
        # Waits here until it is asked for the first time.
        yield
        if self.is_reasoning or (yield from self._reasoning_begins()):
            yield from self._reasoning()
        yield from self._scanner.until((), self._say)

    def _reasoning_begins(self) -> Parse[bool]:
        if self._markers is None:
            return False
        self._scanner.hold()
        yield from self._scanner.space()
        begins = yield from self._scanner.literal(self._markers.start)
        if begins:
            self._scanner.release()
        else:
            self._scanner.go_back()
        self.is_reasoning = begins
        return begins

    def _reasoning(self) -> Parse[None]:
        assert self._markers is not None
        # White space at the two seams belongs to the format.
        yield from self._scanner.literal("\n")
        yield from self._scanner.until((self._markers.end,), self._think)
        self.is_reasoning = False
        yield from self._scanner.literal("\n")
        yield from self._scanner.literal("\n")

    def _say(self, text: str) -> None:
        self._texts.append(text)
        self._events.append(Text(text))

    def _think(self, text: str) -> None:
        self._thoughts.append(text)
        self._events.append(Reasoning(text))
