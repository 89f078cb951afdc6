"""Request bodies: read with limits on size and time, decoded, checked. Knows JSON; knows no endpoint.

All bodies share a byte budget, from the first byte read until the request ends, since a request is kept that long: its
response depends on it, and a model that is reloaded needs it again. A body that exceeds the budget gets 503 with
Retry-After. Short bodies have a separate budget of the same size, so that a few long ones do not lock out everyone
else.

Decoding and checking each hold the GIL throughout, even in a thread. The number of values in the body bounds how long
everything else waits, so values are counted before any of them is created.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ostro.errors import BadRequest, BodyTimeout, BodyTooLarge, TryLater, WrongContentType
from ostro.schemas.fields import MAX_TOKENS
from ostro.schemas.wire import RequestModel, parse
from ostro.server.http.disconnect import ClientGone

# Most shorter bodies are decoded faster than a thread wakes up, and none takes more than 20 ms: it contains at most
# 2,500 objects with two fields.
_LONG_BODY = 64 << 10
# Limits the cost of decoding a body: MAX_TOKENS token ids, nine thousand objects with two fields, or thirty thousand
# fields take 40 to 70 ms. When a body could take 300 ms, /healthz was delayed by nearly as much.
_MOST_COST = 1 << 19
# Costs by the byte that accompanies each value, outside strings: a list entry, a container, a key. Objects are
# expensive, because each is validated by a Python function.
_COSTS = {b",": 1, b"[": 4, b"{": 24, b":": 16}
# Escaped characters in strings that cost as much as one value.
_ESCAPES = 8
# Scanned at a time: other threads wait a millisecond for it.
_BLOCK = 256 << 10
_RETRY_SECONDS = 1
# Minimum default budget: a server with a small body limit still has room for a thousand of them.
_LEAST_BUDGET = 64 << 20

# Decoding holds the GIL: more threads would only queue for it.
_DECODERS = ThreadPoolExecutor(2, thread_name_prefix="body")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    max_bytes: int = 64 << 20
    seconds: float = 60.0
    """How long a body may take to arrive: sending one byte a second must not keep a connection open."""
    max_bytes_together: int | None = None
    """Byte budget for all long bodies in memory, and the same again for short ones. None has room for two of the
    longest, or for a thousand short ones.
    """

    @property
    def budget(self) -> int:
        if self.max_bytes_together is not None:
            return self.max_bytes_together
        return max(2 * self.max_bytes, _LEAST_BUDGET)


@dataclass(slots=True)
class ByteCount:
    most: int
    used: int = 0


class BodyBudget:
    """Counts the bytes of all bodies in memory: `most` for long ones, as many for short ones. Use in one event loop."""

    def __init__(self, most: int) -> None:
        self.long = ByteCount(most)
        self.short = ByteCount(most)


class BodyLease:
    """One request's share of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._count = budget.short
        self._size = 0

    def expect(self, size: int) -> None:
        """Raises TryLater if there is no room for a body of this size. Reserves nothing yet."""
        if size > _LONG_BODY:
            self._count = self._budget.long
        self._check(size)

    def grow(self, size: int) -> None:
        """Counts received bytes; raises TryLater if there is no room for them."""
        total = self._size + size
        if total > _LONG_BODY and self._count is self._budget.short:
            # Moves to the long budget with all its bytes.
            self.release()
            self._count, size = self._budget.long, total
        self._check(size)
        self._count.used += size
        self._size = total

    def release(self) -> None:
        """Returns the whole lease. Idempotent."""
        self._count.used -= self._size
        self._size = 0

    def _check(self, size: int) -> None:
        count = self._count
        if count.used + size > count.most:
            raise TryLater(
                f"The bodies of current requests already take {count.used} of {count.most} bytes, and there is no room "
                "for this one. Try again in a moment.",
                retry_after=_RETRY_SECONDS,
            )


class BodyLeases:
    """ASGI middleware: gives every request a lease, which ends with the request."""

    def __init__(self, app: ASGIApp, *, budget: BodyBudget) -> None:
        self.app = app
        self.budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        lease = scope.setdefault("state", {})["body"] = BodyLease(self.budget)
        try:
            await self.app(scope, receive, send)
        finally:
            lease.release()


def lease_of(http: Request) -> BodyLease:
    """The request's lease, set by `BodyLeases`."""
    lease = http.scope["state"]["body"]
    assert isinstance(lease, BodyLease)
    return lease


Schema = TypeVar("Schema", bound=RequestModel)


async def read_request(schema: type[Schema], http: Request, limits: BodyLimits) -> Schema:
    """Parses the body; raises an OstroError if it is invalid. Reads no more than allowed."""
    _check_type(http)
    _check_length(http, limits)
    try:
        async with asyncio.timeout(limits.seconds):
            data = await _read(http, limits)
    except TimeoutError as error:
        raise BodyTimeout(f"The body did not arrive within {limits.seconds:g} seconds. Send it faster.") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    if len(data) <= _LONG_BODY:
        return _decode(schema, data)
    return await asyncio.get_running_loop().run_in_executor(_DECODERS, _decode_long, schema, data)


def _decode_long(schema: type[Schema], data: bytes) -> Schema:
    if costs_too_much(data):
        raise BodyTooLarge(
            f"The body holds too many values: at most {MAX_TOKENS} token ids, some 9000 messages or parts of messages, "
            "30000 fields, or four million escapes such as \\u00e9. Send prompts as text, in UTF-8, with few "
            "parts, or split the request."
        )
    return _decode(schema, data)


def _decode(schema: type[Schema], data: bytes) -> Schema:
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from error
    return parse(schema, value)


def costs_too_much(data: bytes) -> bool:
    """Whether decoding the JSON text would hold the GIL for too long.

    Takes linear time, in blocks, so that other threads get their turns. Only counts what is outside strings; invalid
    JSON may be miscounted after the point where the decoder fails.
    """
    cost = num_quotes = begin = 0
    while begin < len(data):
        block = data[begin : begin + _BLOCK]
        # A block must not end between a backslash and the character it escapes.
        odd = (len(block) - len(block.rstrip(b"\\"))) % 2
        end = begin + len(block) - odd if len(block) > 1 else begin + 1
        parts = data[begin:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])
        cost += sum(each * outside.count(byte) for byte, each in _COSTS.items())
        cost += block.count(b"\\") // _ESCAPES
        num_quotes += len(parts) - 1
        # There is a separator between any two strings.
        if cost > _MOST_COST or num_quotes // 2 > _MOST_COST:
            return True
        begin = end
    return False


def _check_type(request: Request) -> None:
    # Any web page can make a browser send other content types here without a CORS preflight.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise WrongContentType("The body must be JSON. Send it with the header Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise WrongContentType("A compressed body cannot be read. Send it as it is, without Content-Encoding.")


def _check_length(request: Request, limits: BodyLimits) -> None:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 20:
        if int(announced) > limits.max_bytes:
            raise _too_large(limits)
        # Fail early rather than after most of it has arrived. Bytes count on arrival: announcing them costs nothing.
        lease_of(request).expect(int(announced))


async def _read(request: Request, limits: BodyLimits) -> bytes:
    lease = lease_of(request)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        # Counted on arrival: there may be no announced length.
        if size > limits.max_bytes:
            raise _too_large(limits)
        lease.grow(len(part))
        parts.append(part)
    return b"".join(parts)


def _too_large(limits: BodyLimits) -> BodyTooLarge:
    return BodyTooLarge(f"The body has more than {limits.max_bytes} bytes. Send less, or split the request.")
