"""Text as it arrives, for parsers that are generators: they yield where they need more of it, so that it never matters
how the text was cut. Knows no formats.
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
        self._text = ""
        self._at = 0
        self._num_dropped = 0
        self._held_from: int | None = None
        self.ended = False

    def feed(self, text: str) -> None:
        done = self._at if self._held_from is None else self._held_from
        self._text = self._text[done:] + text
        self._num_dropped += done
        self._at -= done
        if self._held_from is not None:
            self._held_from = 0

    def end(self) -> None:
        """No more text comes: parsers that ask for more are told so."""
        self.ended = True

    # A parser that may turn out to be wrong holds the text it reads, and then either releases it or takes it back.

    def hold(self, back: int = 0) -> None:
        """From here, or from a few characters before."""
        self._held_from = self._at - back

    @property
    def position(self) -> int:
        """In all of the text. While a piece is emitted, where that begins."""
        return self._num_dropped + self._at

    @property
    def is_holding(self) -> bool:
        return self._held_from is not None

    @property
    def at_end(self) -> bool:
        return self._at == len(self._text)

    def release(self) -> None:
        self._held_from = None

    def held(self) -> str:
        """Everything read since `hold`."""
        return self._text[self._held_from : self._at]

    def go_back(self) -> None:
        """To where `hold` was called."""
        assert self._held_from is not None
        self._at, self._held_from = self._held_from, None

    # What parsers use: each yields until it can tell.

    def more(self) -> Parse[bool]:
        """Waits for text beyond what is here; False if there is none to come."""
        if self.ended:
            return False
        here = len(self._text) - self._at
        while len(self._text) - self._at <= here and not self.ended:
            yield
        return len(self._text) - self._at > here

    def peek(self) -> Parse[str]:
        """The next character, which is not taken; empty at the end."""
        if self._at == len(self._text):
            yield from self.more()
        return self._text[self._at : self._at + 1]

    def take(self, count: int = 1) -> str:
        """The next characters, which were seen already."""
        self._at += count
        return self._text[self._at - count : self._at]

    def literal(self, text: str) -> Parse[bool]:
        """Takes this text if it comes next."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text:
                self._at += len(text)
                return True
            if not text.startswith(here) or not (yield from self.more()):
                return False

    def one_of(self, texts: tuple[str, ...]) -> Parse[str | None]:
        """Takes the longest of these texts that comes next."""
        for text in _markers(texts).longest_first:
            if (yield from self.literal(text)):
                return text
        return None

    def drop_begun(self, texts: tuple[str, ...]) -> None:
        """Drops what is left, if one of these texts begins like that. For the end, where nothing more comes."""
        if any(text.startswith(self._text[self._at :]) for text in texts):
            self._at = len(self._text)

    def space(self) -> Parse[None]:
        """Takes white space."""
        yield from self.run(_SPACE, _ignore)

    def run(self, pattern: re.Pattern[str], emit: Emit) -> Parse[None]:
        """Takes what the pattern matches: a run of characters, none of which depends on what comes after it."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match.end() > self._at:
                self._at = match.end()
                emit(match[0])
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def until(self, texts: tuple[str, ...], emit: Emit, emit_begun: Emit | None = None) -> Parse[str | None]:
        """Takes text up to and including the earliest of these texts, which is returned and not emitted. None, and all
        text taken, if none of them comes. `emit_begun` gets what the text ends with if one of them begins like that.
        """
        while True:
            found, start = _earliest(self._text, texts, self._at)
            # An earlier one may be about to complete, if it is the longer.
            live = min(start, _live_from(self._text, texts, self._at))
            if live > self._at:
                emit(self._text[self._at : live])
                self._at = live
            if found is not None and live == start:
                self._at += len(found)
                return found
            if not (yield from self.more()):
                # Nothing can complete any more.
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
    """Which comes first, the longest of those at one place, and where; the text's length if none does."""
    found, start = None, len(text)
    for each in _markers(texts).longest_first:
        at = text.find(each, begin, start + len(each) - 1 if found else None)
        if 0 <= at < start:
            found, start = each, at
    return found, start


def _live_from(text: str, texts: tuple[str, ...], begin: int) -> int:
    """Where the earliest tail begins that more text could complete to one of these; the text's length if none does."""
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
