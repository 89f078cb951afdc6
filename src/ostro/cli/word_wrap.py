"""Wraps streamed text at words. Knows columns; knows no terminal."""

import unicodedata
from collections.abc import Callable

_FENCE = "```"


class WordWrap:
    """Emits a word once it is complete: when a space, newline or the end of the text follows.

    Leaves fenced code unwrapped, so that it can be copied.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        """`columns` is called for every word, because a window may be resized."""
        self._columns = columns
        self._column = 0
        self._space = ""
        self._word = ""
        self._is_cut = False
        """Whether the word's start has already been emitted."""
        self._head = ""
        """The start of the line, while it may still be a fence."""
        self._in_code = False

    def feed(self, text: str) -> str:
        """The text that can be shown now."""
        return "".join(map(self._take, text))

    def end(self) -> str:
        """The rest."""
        return self._flush()

    def _take(self, char: str) -> str:
        if char == "\n":
            return self._end_line()
        if len(self._head) < len(_FENCE) and not (char.isspace() and not self._head):
            self._head += char
        if char in " \t":
            shown = self._flush()
            self._space += char
            self._is_cut = False
            return shown
        self._word += char
        if _width(char) == 2:
            # Scripts with wide characters have no spaces: lines may break after any of them.
            return self._flush()
        if _columns_of(self._word) >= self._columns():
            # Too long to wait for. A URL stays in one piece, which the terminal may break.
            shown, self._is_cut = self._flush(), True
            return shown
        return ""

    def _end_line(self) -> str:
        shown = self._flush() + "\n"
        if self._head == _FENCE:
            self._in_code = not self._in_code
        self._column, self._space, self._head, self._is_cut = 0, "", "", False
        return shown

    def _flush(self) -> str:
        if not self._word:
            return ""
        space, word, self._space, self._word = self._space, self._word, "", ""
        needed = _columns_of(space) + _columns_of(word)
        # The last column stays free: some terminals start a new line after it.
        if self._in_code or self._is_cut or not self._column or self._column + needed < self._columns():
            self._column = (self._column + needed) % max(self._columns(), 1)
            return space + word
        self._column = _columns_of(word)
        return "\n" + word


def _columns_of(text: str) -> int:
    return sum(map(_width, text))


def _width(char: str) -> int:
    if unicodedata.east_asian_width(char) in "WF":
        return 2
    return 0 if unicodedata.category(char) in ("Mn", "Me", "Cf") else 1
