"""Log events as readable lines: one short line per request, one sentence per event. Knows the events' names and fields;
writes nothing.

    12:03:44 POST /v1/chat/completions 200 1.21 s 128 tokens 112 tokens/s
    12:03:51 POST /v1/chat/completions 400 2 ms unsupported: tools
    12:04:02 warning: httpx: connection pool is full  host=localhost
"""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from structlog.typing import EventDict, WrappedLogger

_DIM, _RED, _GREEN, _YELLOW, _RESET = "\033[2m", "\033[31m", "\033[32m", "\033[33m", "\033[0m"
_LEVEL_COLORS = {"warning": _YELLOW, "error": _RED, "critical": _RED}
_NOT_FIELDS = frozenset({"event", "level", "logger", "timestamp", "exception"})
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
# OpenAI's type of most errors. The field that follows is more telling.
_SHORT = {"invalid_request_error": "invalid"}

Fields = Mapping[str, Any]


class TextRenderer:
    """structlog's last processor: renders the line, without a newline."""

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        clock = self._paint(time.strftime("%H:%M:%S"), _DIM)
        if _is_request(event):
            return f"{clock} {self._request(event)}"
        level = event.get("level", "info")
        mark = self._paint(f"{level}: ", _LEVEL_COLORS[level]) if level in _LEVEL_COLORS else ""
        line = f"{clock} {mark}{_source(event)}{self._text(event)}"
        exception = event.get("exception")
        return line if not exception else f"{line}\n{_CONTROL.sub(_escaped, exception)}"

    def message(self, event: Fields) -> str:
        """The line without time, level and source, which a formatter may have fields of its own for."""
        return self._request(event) if _is_request(event) else self._text(event)

    def _text(self, event: Fields) -> str:
        """A sentence for the server's own lifecycle events; the name and fields of any other event."""
        if (sentence := _SENTENCES.get(event["event"])) is not None and event.get("logger") == "ostro.server":
            return sentence(event)
        fields = " ".join(f"{name}={value}" for name, value in event.items() if name not in _NOT_FIELDS)
        return str(event["event"]) + (f"  {self._paint(fields, _DIM)}" if fields else "")

    def _request(self, event: Fields) -> str:
        status: int | None = event.get("status")
        color = _RED if status is None or status >= 500 else _YELLOW if status >= 400 else _GREEN
        # No status means that the client was gone before there was a response.
        outcome = self._paint("gone" if status is None else str(status), color)
        parts = [event["method"], event["path"], outcome, _duration(event["seconds"]), *_tokens(event)]
        if error := event.get("error"):
            parts.append(self._paint(_complaint(error, event.get("param")), color))
        if status is not None and status >= 500:
            # The log lines about the error have the same id.
            parts.append(event["request_id"])
        return " ".join(parts)

    def _paint(self, text: str, color: str) -> str:
        return f"{color}{text}{_RESET}" if self._color else text


def _is_request(event: Fields) -> bool:
    return event["event"] == "request" and event.get("logger") == "ostro.access"


def _tokens(event: Fields) -> list[str]:
    generated, prompt = event.get("completion_tokens"), event.get("prompt_tokens")
    if not generated:
        return [] if prompt is None or "error" in event else [f"{prompt} prompt tokens"]
    parts = [f"{generated} token{'' if generated == 1 else 's'}"]
    if (speed := event.get("tokens_per_second")) is not None:
        parts.append(f"{speed:.{0 if speed >= 100 else 1}f} tokens/s")
    reasons = set(event.get("finish_reason", "stop").split(",")) - {"stop"}
    return [*parts, *([f"({', '.join(sorted(reasons))})"] if reasons else [])]


def _complaint(code: str, param: str | None) -> str:
    kind = _SHORT.get(code, code.replace("_", " "))
    return kind if param is None else f"{kind}: {param}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def _source(event: Fields) -> str:
    """The library that logged the line; empty if it is ours."""
    name = str(event.get("logger") or "")
    return "" if not name or name.partition(".")[0] == "ostro" else f"{name}: "


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found.group()):04x}"


# --- lifecycle events -----------------------------------------------------------------------------------------------


def _starting(event: Fields) -> str:
    parts = [f"Ostro {event['version']}"]
    for place, settings in event.get("settings", {}).items():
        parts.append(f"from {place}: " + ", ".join(f"{name} = {value}" for name, value in settings.items()))
    return " · ".join(parts)


def _listening(event: Fields) -> str:
    return f"listening on {event['url']}"


def _ready(event: Fields) -> str:
    parts = [
        f"{event['model']} is ready after {event['seconds']:.1f} s",
        f"{event['backend']}, {event['precision']}",
        f"up to {event['max_seq_len']} tokens",
    ]
    return " · ".join(parts)


def _draining(event: Fields) -> str:
    requests, text = event["requests"], "draining; Ctrl-C again ends at once"
    if not requests:
        return text
    return f"{text} ({requests} request{'' if requests == 1 else 's'} running, {event['seconds']:g} s at most)"


_SENTENCES: Mapping[str, Callable[[Fields], str]] = {
    "starting": _starting,
    "listening": _listening,
    "ready": _ready,
    "draining": _draining,
}
