"""Decodes server-sent events as their bytes arrive. Knows the stream format; knows no JSON and no sockets."""

from ostro.errors import BadAnswer

DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"
_LINE_ENDS = b"\r\n"


class EventDecoder:
    """Turns bytes into the payloads of complete events, however the bytes are split."""

    def __init__(self, max_event_bytes: int = 16 << 20) -> None:
        self._max_bytes = max_event_bytes
        self._line: list[bytes] = []  # pieces of the current, unfinished line
        self._line_bytes = 0
        self._data: list[bytes] = []  # data lines of the current, unfinished event
        self._data_bytes = 0
        self._at_start = True
        self._skip_newline = False  # the last byte was \r, and a following \n belongs to it

    @property
    def pending(self) -> bool:
        """Whether an event is incomplete: if the stream ends now, it was cut short."""
        return bool(self._data or self._line)

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of events completed by this data, in order. Raises BadAnswer for one that is too long."""
        if self._skip_newline and data:
            data = data.removeprefix(b"\n")
            self._skip_newline = False
        if b"\n" not in data and b"\r" not in data:
            self._hold(data)
            return []
        if self._line:
            data = b"".join((*self._line, data))
            self._line.clear()
            self._line_bytes = 0
        lines = data.splitlines(keepends=True)
        rest = b"" if lines[-1][-1] in _LINE_ENDS else lines.pop()
        self._skip_newline = data.endswith(b"\r")
        events = self._take(lines)
        self._hold(rest)
        return events

    def _take(self, lines: list[bytes]) -> list[bytes]:
        if self._at_start:
            self._at_start = False
            lines[0] = lines[0].removeprefix(_BOM)
        events = []
        for ended in lines:
            line = ended.rstrip(_LINE_ENDS)
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data.clear()
                    self._data_bytes = 0
                continue
            self._check(len(line))
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")
            else:
                continue
            self._data_bytes += len(line)
        return events

    def _hold(self, piece: bytes) -> None:
        if piece:
            self._line.append(piece)
            self._line_bytes += len(piece)
            self._check(self._line_bytes)

    def _check(self, line_bytes: int) -> None:
        if self._data_bytes + line_bytes > self._max_bytes:
            raise BadAnswer(
                f"The server sent an event of more than {self._max_bytes} bytes: is this the right address?"
            )
