"""Relays a subprocess's log records to its parent, which logs them in its own format and at its own level.

Knows logging; the caller provides the transport.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

import msgspec


class Logged(msgspec.Struct, frozen=True, tag=True):
    """A log record of a subprocess."""

    logger: str
    level: int
    text: str
    exception: str | None = None
    """Its formatted traceback, if any."""

    def write(self) -> None:
        """Logs it here, under the subprocess's logger name."""
        extra = {} if self.exception is None else {"exception": self.exception}
        logging.getLogger(self.logger).log(self.level, "%s", self.text, extra=extra)


class _Relay(logging.Handler):
    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__()
        self._send = send
        self._format_exception = logging.Formatter().formatException

    def emit(self, record: logging.LogRecord) -> None:
        try:
            exception = None if not record.exc_info else self._format_exception(record.exc_info)
            # File names may have characters that no message can carry.
            text = record.getMessage().encode(errors="backslashreplace").decode()
            line = Logged(record.name, record.levelno, text, exception)
        except Exception:  # noqa: BLE001  like logging's own handlers: a line that cannot be formatted stops nobody
            self.handleError(record)
        else:
            self._send(line)


def log_warnings() -> None:
    """Turns Python's warnings into log records, one line each."""
    warnings.showwarning = _log_warning


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logging.getLogger("py.warnings").warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)


def relay_logs(send: Callable[[Logged], None]) -> None:
    """Sends this process's log records, Python warnings and uncaught exceptions to `send` from now on.

    Includes our own loggers from INFO, libraries' from WARNING; the parent's level decides what is shown.
    """
    root = logging.getLogger()
    root.handlers = [_Relay(send)]
    root.setLevel(logging.WARNING)
    logging.getLogger("ostro").setLevel(logging.INFO)
    log_warnings()
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("ostro").error("%s: %s", kind.__name__, error, exc_info=(kind, error, traceback))
