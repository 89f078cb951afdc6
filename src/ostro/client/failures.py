"""Turns error responses back into the exceptions that the server raised. Knows the error tree and error bodies."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from ostro.errors import (
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    ContextLengthExceeded,
    DiskFull,
    NotAuthorized,
    OstroError,
    QueueFull,
    RequestTimeout,
    ServerError,
    TryLater,
    Unavailable,
    WrongContentType,
)

_LONGEST_MESSAGE = 500
LONGEST_BODY = 64 << 10
"""Maximum bytes of an error's body to read; the rest is ignored."""


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> OstroError:
    """The error in a response with a status other than 200."""
    told = _read(body)
    kind = _BY_STATUS_AND_CODE.get((status, told.code)) or _BY_STATUS.get(status)
    kind = kind or (BadRequest if 400 <= status < 500 else ServerError)
    return _made(kind, told, status, headers.get("retry-after"))


def error_in(event: bytes) -> OstroError | None:
    """The error in a stream event, if it contains one."""
    value = _json(event)
    if not isinstance(value, dict) or not value.get("error"):
        return None
    told = _read(event)
    kind = _BY_CODE.get(told.code) or (BadRequest if told.type == BadRequest.openai_type else ServerError)
    return _made(kind, told)


def words(body: bytes) -> str:
    """The message in an error's body, in any server's format, on one line."""
    value = _json(body)
    if value is None:
        return shortened(body)
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "detail", "message") if value.get(key)), str(value))
    return shortened(str(value).encode(errors="replace"))


def shortened(payload: bytes) -> str:
    """The payload on one line, truncated to the length of a message."""
    text = " ".join(payload.decode(errors="replace").split())
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"


@dataclass(frozen=True, slots=True)
class _Details:
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


def _read(body: bytes) -> _Details:
    match _json(body):
        case {"error": {"message": str(message)} as detail}:
            given = {name: value for name in ("type", "param", "code") if isinstance(value := detail.get(name), str)}
            # JSON can express lone surrogates, which cannot be printed.
            return _Details(" ".join(message.encode(errors="replace").decode().split()), **given)
        case _:
            return _Details(words(body))


def _json(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return None


def _made(
    kind: type[OstroError], told: _Details, status: int | None = None, retry_after: str | None = None
) -> OstroError:
    message = told.message or f"The server answered HTTP {status} without a message."
    if issubclass(kind, ContextLengthExceeded):
        return _context_length_exceeded(message, told.param)
    if issubclass(kind, TryLater):
        seconds = _seconds(retry_after)
        return kind(message) if seconds is None else kind(message, retry_after=seconds)
    if issubclass(kind, ServerError):
        return kind(message, param=told.param, status=status)
    return kind(message, param=told.param)


_LONGEST_READ = 2_000
_CONTEXT = re.compile(
    r"length is (\d{1,15}) tokens.* (?:\((\d{1,15}) in the prompt, (\d{1,15}) to|(\d{1,15}) tokens in the)"
)


def _context_length_exceeded(message: str, param: str | None) -> OstroError:
    """Recovers the numbers from the server's message."""
    # Whoever answers may say anything, at any length.
    numbers = _CONTEXT.search(message[:_LONGEST_READ])
    if numbers is None:
        return BadRequest(message, param=param)
    limit, prompt, output, alone = (int(number or 0) for number in numbers.groups())
    return ContextLengthExceeded(limit=limit, prompt=prompt or alone, output=output, param=param or "prompt")


def _seconds(retry_after: str | None) -> int | None:
    """Parses both forms of the header: a number, or a date."""
    if retry_after is None:
        return None
    try:
        return max(math.ceil(float(retry_after)), 0)
    except (ValueError, OverflowError):
        pass
    try:
        return max(math.ceil(parsedate_to_datetime(retry_after).timestamp() - time.time()), 0)
    except (ValueError, OverflowError):
        return None


def _tree(kind: type[OstroError]) -> Iterator[type[OstroError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


# Among classes that share a code, such as those for models that cannot be served, the topmost stands for all: earlier
# entries override later ones.
_CODED = [
    kind for kind in _tree(OstroError) if kind.openai_code is not None and kind.__module__ == OstroError.__module__
]
_BY_STATUS_AND_CODE = {(kind.http_status, kind.openai_code): kind for kind in reversed(_CODED)}
_BY_CODE = {kind.openai_code: kind for kind in reversed(_CODED)}
_BY_STATUS: dict[int, type[OstroError]] = {
    401: NotAuthorized,
    403: NotAuthorized,
    408: BodyTimeout,
    413: BodyTooLarge,
    415: WrongContentType,
    429: QueueFull,
    503: Unavailable,
    504: RequestTimeout,
    507: DiskFull,
}
