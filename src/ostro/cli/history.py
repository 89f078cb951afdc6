"""Input history for the arrow keys, via Python's readline if available, kept in a file."""

import os
from contextlib import suppress
from pathlib import Path
from types import ModuleType

_MOST_LINES = 1000


def history_path() -> Path:
    """In the user's state directory (XDG)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "ostro" / "chat_history"


class History:
    """Input lines of earlier conversations and of this one. Works without its file if it cannot be read or written."""

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
