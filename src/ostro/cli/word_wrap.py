"""Text that comes in pieces, broken into lines at words. Knows columns; knows no terminal."""

import unicodedata
from collections.abc import Callable

_FENCE = "```"


class WordWrap:
    """A word is given out once it is known to be whole: when a space, a line's end or the text's end follows it.

    Code between fences is left as it is, so that it can be copied.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        """`columns` is asked at every word: a window may change."""
        self._columns = columns
        self._column = 0
        self._space = ""
        self._word = ""
        self._is_cut = False
        """Whether the word's beginning was given out already."""
        self._head = ""
        """What the line begins with, as far as it may be a fence."""
        self._in_code = False

    def feed(self, text: str) -> str:
        """What can be shown now."""
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
            # Scripts of wide characters have no spaces: a line may end after any of them.
            return self._flush()
        if _columns_of(self._word) >= self._columns():
            # Not worth waiting for. An address stays in one piece, which the terminal may break.
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
        # The last column stays free: some terminals begin a line of their own after it.
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
