"""Stop strings over a stream of text. Knows text only: no tokens, and nothing of who ends the generation.

text so far:   … emitted …│held back
                          └ the tail is the beginning of some stop, so it may not be shown yet
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ostro.errors import BadRequest


class StopResult(NamedTuple):
    text: str
    """Safe to show now."""
    stop: str | None
    """The stop string that ended the text, once it is known."""


class StopMatcher:
    """Finds the earliest stop string, and at one place the longest, however the text was cut into pieces.

    Where a longer or earlier stop may still complete ("ab" has come, and both "ab" and "abc" are stops), the verdict
    waits for the next text or for `flush`.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise BadRequest("stop must hold non-empty strings.", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        # Longest first: of the alternatives that match at one place, a regular expression takes the first.
        by_length = sorted(self._stops, key=len, reverse=True)
        self._any_stop = re.compile("|".join(map(re.escape, by_length)))
        firsts = "".join(re.escape(stop[0]) for stop in by_length)
        self._any_start = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Takes the next text. After a match nothing more is let through."""
        if not self._stops:
            return StopResult(text, None)
        if self.matched is not None:
            return StopResult("", self.matched)
        text = self._held + text
        live = self._live_from(text)
        match = self._any_stop.search(text)
        if match is not None and match.start() < live:
            return self._end(match)
        self._held = text[live:]
        return StopResult(text[:live], None)

    def flush(self) -> str:
        """The text has ended: what was held back, less a stop in it. `matched` then tells the final verdict."""
        text, self._held = self._held, ""
        match = self._any_stop.search(text) if self._stops else None
        return text if match is None else self._end(match).text

    def _end(self, match: re.Match[str]) -> StopResult:
        self._held = ""
        self.matched = match.group()
        return StopResult(match.string[: match.end() if self._include_stop else match.start()], self.matched)

    def _live_from(self, text: str) -> int:
        """Where the earliest tail begins that more text could complete to a stop; the text's length if none does."""
        for start in self._any_start.finditer(text, max(0, len(text) - self._longest + 1)):
            tail = text[start.start() :]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return start.start()
        return len(text)
