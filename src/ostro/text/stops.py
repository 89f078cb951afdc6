"""Stop strings over a stream of text. Knows text only: no tokens, no engine.

text so far:   … emitted …│held back
                          └ the tail is the beginning of some stop, so it may not be shown yet
"""

from collections.abc import Sequence
from typing import NamedTuple

from ostro.errors import BadRequest


class StopResult(NamedTuple):
    text: str
    """Text that is safe to emit now."""
    stop: str | None
    """The stop string that ended the text, once known."""


class StopMatcher:
    """Finds the earliest stop string, and the longest of those that begin there, however the text is cut into pieces.

    If a longer or earlier stop may still complete ("ab" has arrived, and both "ab" and "abc" are stops), the decision
    waits for more text or for `flush`.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise BadRequest("stop must hold non-empty strings.", param="stop")
        self._include_stop = include_stop
        # Longest first: of the stops that begin at one place, the longest wins.
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._longest = len(self._stops[0]) if self._stops else 0
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Takes the next text. Emits nothing after a match."""
        if not self._stops:
            return StopResult(text, None)
        if self.matched is not None:
            return StopResult("", self.matched)
        text = self._held + text
        live = self._live_from(text)
        start, stop = self._first_stop(text)
        if start < live:
            return self._end(text, start, stop)
        self._held = text[live:]
        return StopResult(text[:live], None)

    def flush(self) -> str:
        """Ends the text: returns what was held back, up to a stop in it. `matched` is final then."""
        text, self._held = self._held, ""
        start, stop = self._first_stop(text)
        return text if start == len(text) else self._end(text, start, stop).text

    def _end(self, text: str, start: int, stop: str) -> StopResult:
        self._held = ""
        self.matched = stop
        return StopResult(text[: start + len(stop) if self._include_stop else start], stop)

    def _first_stop(self, text: str) -> tuple[int, str]:
        """Where the earliest stop begins, and which; the text's length if there is none."""
        # Not a regular expression: one for 64 stops is slow to compile, and to match if they begin alike.
        start, found = len(text), ""
        for stop in self._stops:
            at = text.find(stop, 0, start + len(stop) - 1)
            if at >= 0:
                start, found = at, stop
        return start, found

    def _live_from(self, text: str) -> int:
        """Where the earliest tail begins that more text could complete to a stop; the text's length if none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
