"""The server's log: one line per request, and libraries' lines in the same format. Bodies and keys cannot be logged: a
record has no field for them.
"""

import logging
import logging.config
import os
import queue
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Literal, TextIO

import structlog
import yaml
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import EventDict, Processor, WrappedLogger

from ostro.errors import BadRequest
from ostro.processes.log_relay import log_warnings
from ostro.server.dialects.registry import dialect_of
from ostro.server.log.text import TextRenderer
from ostro.server.telemetry.record import RequestRecord

LogFormat = Literal["json", "text"]

# A client's own id is only a label, but it ends up in logs and headers.
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
# Client errors that are worth a warning.
_LEVELS = {503: logging.WARNING, 504: logging.WARNING}
# Queued lines, and how long shutdown waits for them.
_MOST_LINES = 10_000
_FLUSH_SECONDS = 1.0
# Maximum characters of a field, and of a traceback.
_LONGEST_FIELD = 4_000
_LONGEST_TRACEBACK = 32_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


# --- requests -------------------------------------------------------------------------------------------------------


class RequestLog:
    """ASGI middleware, outermost: gives every request a record and an id, and logs it when it is over.

    The record is scope["state"]["record"]; every response has its id as `x-request-id`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        on_end: Callable[[RequestRecord], None],
        access_log: bool = True,
        quiet: Iterable[str] = (),
    ) -> None:
        """`quiet`: paths of probes, which are logged only if something goes wrong."""
        self.app = app
        self.on_end = on_end
        self.access_log = access_log
        self.quiet = frozenset(quiet)
        self._log = structlog.stdlib.get_logger("ostro.access")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(id=_request_id(scope), method=scope["method"], path=scope["path"])
        state = scope.setdefault("state", {})
        state["record"], state["end_record"] = record, self._end
        if self.access_log and record.path not in self.quiet:
            self._log.debug("request begins", request_id=record.id, method=record.method, path=record.path)
        id = record.id.encode("ascii")
        added = [(header, id) for header in dialect_of(scope).id_headers]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                others = [pair for pair in message.get("headers", ()) if pair[0] != b"x-request-id"]
                message = {**message, "headers": [*others, *added]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            record.route = record.route or getattr(scope.get("route"), "path_format", None)
            self._end(record)

    def _end(self, record: RequestRecord) -> None:
        record.ended = time.monotonic()
        self.on_end(record)
        self._write(record)

    def _write(self, record: RequestRecord) -> None:
        # No status means that the client was gone before there was a response.
        level = _LEVELS.get(record.status or 0, logging.ERROR if (record.status or 0) >= 500 else logging.INFO)
        is_wanted = self.access_log and record.path not in self.quiet
        # A probe that gets 503 from an unready server is no news for the log.
        if is_wanted or (level > logging.INFO and not (record.path in self.quiet and record.status == 503)):
            self._log.log(level, "request", **record.fields())


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


# --- configuration --------------------------------------------------------------------------------------------------


def configure_logging(
    *,
    level: str = "info",
    form: LogFormat = "json",
    color: bool = True,
    config: Path | None = None,
    stream: TextIO | None = None,
) -> "PatientHandler":
    """One format for our lines, those of libraries and Python's warnings, on a stream (default: stderr); or the config
    in a logging.yaml (for logging's dictConfig). Without `color`, text is plain even on a terminal.
    """
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _escaped,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            _readable,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            # A child process's traceback: added after escaping, like this process's own.
            structlog.stdlib.ExtraAdder(allow=["exception"]),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            _bounded_traceback,
            *_renderers(form, color=color and shows_color(stream)),
        ],
    )
    handler = PatientHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    log_warnings()
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        library = logging.getLogger(name)
        library.handlers, library.propagate = [], True
    # Its lines repeat ours with less detail.
    logging.getLogger("uvicorn.access").disabled = True
    # The first logs every start and stop, like we do; the others every download, with URLs that may contain secrets.
    for name in ("uvicorn.error", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    if config is not None:
        _apply(config)
    return handler


def shows_color(stream: TextIO) -> bool:
    """Whether it is a terminal whose user wants colour (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class PatientHandler(logging.Handler):
    """Writes lines in its own thread: a pipe that nobody reads blocks that thread and not the event loop.

    If too many lines are queued, new ones are dropped; their number is logged once there is room.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._write = _unlocked(stream)
        self._lines: queue.Queue[str] = queue.Queue(_MOST_LINES)
        self._num_dropped = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.say(self.format(record))
        except Exception:  # noqa: BLE001  like logging's own handlers: a line that cannot be formatted stops nobody
            self.handleError(record)

    def say(self, text: str) -> None:
        """Writes plain text, in order with the log lines."""
        with self.lock or nullcontext():
            try:
                self._lines.put_nowait(text)
            except queue.Full:
                self._num_dropped += 1

    def flush(self) -> None:
        """Waits a limited time for queued lines."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left := deadline - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            with suppress(OSError, ValueError):
                self._write(line + "\n" + self._loss())
            self._lines.task_done()

    def _loss(self) -> str:
        """A line that counts dropped lines; empty if there are none."""
        with self.lock or nullcontext():
            dropped, self._num_dropped = self._num_dropped, 0
        if not dropped:
            return ""
        told = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        message = f"{dropped} log lines were dropped: they were not read fast enough"
        return self.format(logging.makeLogRecord({**told, "msg": message})) + "\n"


def _unlocked(stream: TextIO) -> Callable[[str], object]:
    """Writes directly to the stream's file descriptor: its buffer has a lock that could block the program's exit."""
    try:
        file = open(stream.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115  lives as long as the program
    except OSError:
        return stream.write
    return lambda text: file.write(text.encode(errors="backslashreplace"))


def _renderers(form: LogFormat, *, color: bool) -> list[Processor]:
    if form == "json":
        return [structlog.processors.EventRenamer("message"), structlog.processors.JSONRenderer()]
    return [TextRenderer(color=color)]


def _apply(path: Path) -> None:
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **given})
    except OSError as error:
        raise BadRequest(f"Cannot read the logging config {path}: {error.strerror}. Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise BadRequest(
            f"{path} is not a logging config: {_one_line(error)}. See logging.config's dictConfig."
        ) from error


def _one_line(error: BaseException) -> str:
    causes = [error, *filter(None, [error.__cause__])]
    return " ".join(": ".join(str(each) for each in causes).split())


class _Readable(dict[str, object]):
    """An event whose text is its line: plain formatters, as in a logging.yaml, write `%(message)s`."""

    def __str__(self) -> str:
        return TextRenderer(color=False).message(self)


def _readable(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    return _Readable(event)


def _escaped(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Clients control paths and the like: no text may start a line, move the cursor or fill the disk."""
    return {key: escape(bounded(value)) if isinstance(value, str) else value for key, value in event.items()}


def _bounded_traceback(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    if isinstance(exception := event.get("exception"), str):
        event["exception"] = bounded(exception, _LONGEST_TRACEBACK)
    return event


def bounded(text: str, most: int = _LONGEST_FIELD) -> str:
    """The text itself, or its start and end with the number of characters left out between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}…[{len(text) - 2 * half} characters]…{text[-half:]}"


def escape(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


__all__ = ["LogFormat", "PatientHandler", "RequestLog", "configure_logging", "escape", "shows_color"]


_STDERR = 2
_LAST_LINES_SECONDS = 1.0
# A longer line is logged in pieces: it may never end.
_LONGEST_LINE = 4_000

_log = logging.getLogger("stderr")


@contextmanager
def stderr_logged() -> Iterator[TextIO]:
    """Logs everything that this process or one that it starts writes to standard error, line by line.

    Yields the real standard error, for the log itself, and restores it afterwards.
    """
    sys.stderr.flush()
    real = os.dup(_STDERR)
    reading, writing = os.pipe()
    os.dup2(writing, _STDERR)
    os.close(writing)
    reader = threading.Thread(target=_log_lines, args=[reading], name="stderr", daemon=True)
    reader.start()
    try:
        # Not closed: the log's last lines are written to it when the program ends.
        yield open(real, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os.dup2(real, _STDERR)
        # A process that we do not control may keep its end of the pipe open.
        reader.join(_LAST_LINES_SECONDS)
        logging.getLogger().handlers[0].flush()


def _log_lines(reading: int) -> None:
    with open(reading, encoding="utf-8", errors="backslashreplace") as lines:
        while line := lines.readline(_LONGEST_LINE):
            if text := line.rstrip():
                _log.warning("%s", text)
