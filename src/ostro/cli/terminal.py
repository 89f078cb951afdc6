"""The terminal of a conversation: reads lines with a history, and shows text wrapped at words. Knows no client."""

import os
import re
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

BLOCK = '"""'
_USUAL_COLUMNS = 80
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = "```"


class Terminal:
    """Reads lines and shows text. Colours and overwrites nothing unless the output is a terminal."""

    def __init__(self) -> None:
        self._styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._status = ""
        self._wrap: WordWrap | None = None

    def read(self) -> str:
        """A message of one or several lines; raises EOFError at the end of input."""
        line = self._line("> ")
        if line.lstrip().startswith(BLOCK):
            return self._block(line.lstrip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(". "))
        return "\n".join(lines)

    def piece(self, text: str) -> None:
        """Prints part of an answer, wrapped at words. Replaces control characters, which could steer the terminal."""
        if sys.stdout.isatty():
            self._wrap = self._wrap or WordWrap(_columns)
            text = self._wrap.feed(_CONTROL.sub("\ufffd", text))
        print(text, end="", flush=True)

    def end_answer(self) -> None:
        print("" if self._wrap is None else self._wrap.end(), flush=True)
        self._wrap = None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def remark(self, text: str) -> None:
        """Prints a remark that is not part of the conversation."""
        print(f"\033[2m{text}\033[0m" if self._styled else text, flush=True)

    def status(self, text: str) -> None:
        """A status line that the next one overwrites; only on a terminal."""
        if sys.stderr.isatty() and (text or self._status):
            text = text[: _columns() - 1]
            print(f"\r{text:<{len(self._status)}}" + ("" if text else "\r"), end="", file=sys.stderr, flush=True)
            self._status = text

    def _line(self, prompt: str) -> str:
        # If stdout is a file, the prompt would end up in it.
        return input(prompt if sys.stdout.isatty() else "")

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(BLOCK):
            lines.append(line)
            line = self._line(". ")
        return "\n".join([*lines, line.rstrip().removesuffix(BLOCK)]).strip("\n")


def _columns() -> int:
    """The current width of the window, which the COLUMNS variable may not reflect."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL_COLUMNS
    except OSError:
        return _USUAL_COLUMNS


class WordWrap:
    """Wraps streamed text. Emits a word once it is complete: when a space, newline or the end of the text follows.

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


_MOST_LINES = 1000


def history_path() -> Path:
    """The history file, in the user's state directory (XDG)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "ostro" / "chat_history"


class History:
    """Input lines of earlier conversations and of this one, for the arrow keys: via Python's readline if available,
    kept in a file. Works without the file if it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._readline = _readline()
        if self._readline is not None:
            with suppress(OSError):
                self._load(self._readline)
        self._num_kept = self._length()

    def keep(self) -> None:
        """Saves new lines now, because a conversation may end without notice."""
        if self._readline is None:
            return
        new, self._num_kept = self._length() - self._num_kept, self._length()
        with suppress(OSError):
            if new > 0 and hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(new, self._path)
            elif new > 0:
                self._readline.write_history_file(self._path)

    def _load(self, readline: ModuleType) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Private: other users must not read it.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDONLY, 0o600))
        readline.read_history_file(self._path)
        readline.set_history_length(_MOST_LINES)
        if readline.get_current_history_length() > _MOST_LINES:
            readline.write_history_file(self._path)

    def _length(self) -> int:
        return 0 if self._readline is None else int(self._readline.get_current_history_length())


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline
