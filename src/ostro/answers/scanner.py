"""Incremental text for parsers that are generators: they yield when they need more of it, so the result does not depend
on how the text was split. Knows no formats.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Parse = Generator[None, None, T]
Emit = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class Scanner:
    def __init__(self) -> None:
        #   … dropped …│ held, in pieces │ held │ read next …
        #                                │      └ _at
        #                                └ _text begins; _held_from is 0 once there are pieces
        self._text = ""
        self._at = 0
        self._num_dropped = 0
        self._held: list[str] = []
        self._held_from: int | None = None
        self.ended = False

    def feed(self, text: str) -> None:
        """Appends text. Whatever has been read leaves the buffer, also while it is held: copying it with each piece
        would be quadratic.
        """
        if self._held_from is not None:
            self._held.append(self._text[self._held_from : self._at])
            self._held_from = 0
        self._text = self._text[self._at :] + text
        self._num_dropped += self._at
        self._at = 0

    def end(self) -> None:
        """Marks the end of the text: `more` then returns False."""
        self.ended = True

    # Backtracking: a parser holds the text that it reads, and then either releases it or goes back.

    def hold(self, back: int = 0) -> None:
        """Keeps the text from here on, or from `back` characters before, which must be those found last."""
        self._held.clear()
        self._held_from = self._at - back

    @property
    def position(self) -> int:
        """Offset in the whole text. While a piece is emitted, the offset of its beginning."""
        return self._num_dropped + self._at

    @property
    def is_holding(self) -> bool:
        return self._held_from is not None

    @property
    def at_end(self) -> bool:
        return self._at == len(self._text)

    def release(self) -> None:
        self._held.clear()
        self._held_from = None

    def held(self) -> str:
        """Everything read since `hold`."""
        return "".join(self._held) + self._text[self._held_from : self._at]

    def go_back(self) -> None:
        """Returns to where the held text begins."""
        assert self._held_from is not None
        earlier = "".join(self._held)
        self._text = earlier + self._text
        self._num_dropped -= len(earlier)
        self._at = self._held_from
        self.release()

    # For parsers: each of these yields until there is enough text to decide.

    def more(self) -> Parse[bool]:
        """Waits for more text; False if the text has ended."""
        if self.ended:
            return False
        here = len(self._text) - self._at
        while len(self._text) - self._at <= here and not self.ended:
            yield
        return len(self._text) - self._at > here

    def peek(self) -> Parse[str]:
        """The next character, without consuming it; empty at the end."""
        if self._at == len(self._text):
            yield from self.more()
        return self._text[self._at : self._at + 1]

    def take(self, count: int = 1) -> str:
        """Consumes the next characters, which must have arrived."""
        self._at += count
        return self._text[self._at - count : self._at]

    def literal(self, text: str) -> Parse[bool]:
        """Consumes this text if it comes next."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text:
                self._at += len(text)
                return True
            if not text.startswith(here) or not (yield from self.more()):
                return False

    def one_of(self, texts: tuple[str, ...]) -> Parse[str | None]:
        """Consumes the longest of these texts that comes next."""
        for text in _markers(texts).longest_first:
            if (yield from self.literal(text)):
                return text
        return None

    def drop_begun(self, texts: tuple[str, ...]) -> None:
        """Drops the remaining text if it is the beginning of one of these. To be used once the text has ended."""
        if any(text.startswith(self._text[self._at :]) for text in texts):
            self._at = len(self._text)

    def space(self) -> Parse[None]:
        """Consumes white space."""
        yield from self.run(_SPACE, _ignore)

    def run(self, pattern: re.Pattern[str], emit: Emit) -> Parse[None]:
        """Consumes what the pattern matches. The pattern must be a repeated character class, so that the text can be
        matched piece by piece.
        """
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match.end() > self._at:
                self._at = match.end()
                emit(match[0])
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def until(self, texts: tuple[str, ...], emit: Emit, emit_begun: Emit | None = None) -> Parse[str | None]:
        """Consumes text up to and including the earliest of these texts, which is returned and not emitted. If none
        occurs, consumes all text and returns None. `emit_begun` gets an incomplete one at the end of the text.
        """
        while True:
            found, start = _earliest(self._text, texts, self._at)
            # A longer one that begins earlier may still be incomplete.
            live = min(start, _live_from(self._text, texts, self._at))
            if live > self._at:
                emit(self._text[self._at : live])
                self._at = live
            if found is not None and live == start:
                self._at += len(found)
                return found
            if not (yield from self.more()):
                # The text has ended, so an incomplete one will not be completed.
                found, start = _earliest(self._text, texts, self._at)
                if start > self._at:
                    (emit if emit_begun is None else emit_begun)(self._text[self._at : start])
                self._at = start + len(found or "")
                return found


class _Markers(NamedTuple):
    longest_first: tuple[str, ...]
    longest: int
    firsts: frozenset[str]


@lru_cache(maxsize=256)
def _markers(texts: tuple[str, ...]) -> _Markers:
    ordered = tuple(sorted(texts, key=len, reverse=True))
    return _Markers(ordered, max(map(len, texts), default=0), frozenset(text[0] for text in texts))


def _earliest(text: str, texts: tuple[str, ...], begin: int) -> tuple[str | None, int]:
    """The one that occurs first, the longest if several do, and its offset; None and the text's length if none does."""
    found, start = None, len(text)
    for each in _markers(texts).longest_first:
        at = text.find(each, begin, start + len(each) - 1 if found else None)
        if 0 <= at < start:
            found, start = each, at
    return found, start


def _live_from(text: str, texts: tuple[str, ...], begin: int) -> int:
    """Offset of the earliest tail that more text could complete to one of these; the text's length if none could."""
    markers = _markers(texts)
    window = text[max(begin, len(text) - markers.longest + 1) :]
    if any(first in window for first in markers.firsts):
        for start in range(len(window)):
            tail = window[start:]
            if any(len(each) > len(tail) and each.startswith(tail) for each in texts):
                return len(text) - len(tail)
    return len(text)


def _ignore(text: str) -> None:
    pass
