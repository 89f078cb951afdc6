"""Reads request bodies with limits on size and time, and sends long response bodies. Knows JSON; knows no endpoint.

A request is kept until it ends: its response depends on it, and a model that is reloaded needs it again. So its memory
is entered in the ledger (`server.admission.ledger`) as it arrives: first the body's bytes, then the parsed form in
their place.

Decoding and checking each hold the GIL throughout, even in a thread. The number of values in the body bounds how long
everything else waits, so values are counted before any of them is created.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ostro.errors import BadRequest, BodyTimeout, BodyTooLarge, WrongContentType
from ostro.schemas.fields import MAX_TOKENS
from ostro.schemas.wire import RequestModel, parse
from ostro.server.admission.ledger import SHORT, Holding, Ledger
from ostro.server.http.disconnect import ClientGone

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
# Memory of a header besides its text, and of a model's object besides its fields.
_HEADER = 128
_MODEL = 256
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
    """Memory for all long requests, and at least the same again for short ones. None has room for two of the longest,
    or for a thousand short ones.
    """

    @property
    def budget(self) -> int:
        if self.max_bytes_together is not None:
            return self.max_bytes_together
        return max(2 * self.max_bytes, _LEAST_BUDGET)


class HeldRequests:
    """ASGI middleware, below RequestLog: gives every request a holding, which ends with the request."""

    def __init__(self, app: ASGIApp, *, ledger: Ledger) -> None:
        self.app = app
        self.ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope["state"]
        record = state["record"]
        head = _memory_of_head(scope)
        with Holding(self.ledger, record.key, head=head, is_operator=record.is_operator) as holding:
            state["holding"] = holding
            await self.app(scope, receive, send)


def holding_of(http: Request) -> Holding:
    """The request's holding, set by `HeldRequests`."""
    holding = http.scope["state"]["holding"]
    assert isinstance(holding, Holding)
    return holding


class HeldResponse(Response):
    """A long JSON body, which the request holds until the client has read it. Raises an OstroError without room for it.
    For requests that do not pass the gate, which bounds the others' responses.
    """

    def __init__(self, http: Request, body: bytes) -> None:
        super().__init__(body, media_type="application/json")
        holding_of(http).hold(len(body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # In pieces: sending the next one waits until the client has read most of those before it.
        for start in range(0, len(self.body), SHORT):
            await send({"type": "http.response.body", "body": self.body[start : start + SHORT], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _memory_of_head(scope: Scope) -> int:
    return sum(len(name) + len(value) + _HEADER for name, value in scope["headers"])


_T = TypeVar("_T")
Schema = TypeVar("Schema", bound=RequestModel)


async def read_request(schema: type[Schema], http: Request, limits: BodyLimits) -> Schema:
    """Parses the body; raises an OstroError if it is invalid. Reads no more than allowed."""
    _check_type(http)
    data = await read_body(http, limits, holding_of(http))
    if len(data) <= SHORT:
        # Most are decoded faster than a thread wakes up, and none takes more than 20 ms: it contains at most 2,500
        # objects with two fields.
        request, size = _decode(schema, data)
    else:
        request, size = await decoding(partial(_decode_long, schema, data))
    holding_of(http).hold(size)
    return request


async def decoding(work: Callable[[], _T]) -> _T:
    """The result of work that takes as long as the request has values, off the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_DECODERS, work)


async def read_body(http: Request, limits: BodyLimits, holding: Holding) -> bytearray:
    """Reads no more than allowed; raises an OstroError beyond that."""
    announced = _announced(http, limits)
    # Fail early rather than after most of it has arrived. Bytes count on arrival: announcing them costs nothing.
    holding.check(announced)
    holding.hold(0, expected=announced)
    try:
        async with asyncio.timeout(limits.seconds):
            return await _read(http, limits, holding, announced)
    except TimeoutError as error:
        raise BodyTimeout(f"The body did not arrive within {limits.seconds:g} seconds. Send it faster.") from error
    except ClientDisconnect as error:
        raise ClientGone from error


def _decode_long(schema: type[Schema], data: bytearray) -> tuple[Schema, int]:
    if costs_too_much(data):
        raise BodyTooLarge(
            f"The body holds too many values: at most {MAX_TOKENS} token ids, some 9000 messages or parts of messages, "
            "30000 fields, or four million escapes such as \\u00e9. Send prompts as text, in UTF-8, with few "
            "parts, or split the request."
        )
    return _decode(schema, data)


def _decode(schema: type[Schema], data: bytearray) -> tuple[Schema, int]:
    """The request, and the memory that it takes."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from error
    request = parse(schema, value)
    return request, memory_of(request)


def memory_of(value: object) -> int:
    """Memory that the value takes, with all that it refers to. Fields that the schema ignores are no part of it by now,
    and a text takes up to four bytes a character.
    """
    total, left = 0, [value]
    while left:
        each = left.pop()
        total += sys.getsizeof(each)
        if isinstance(each, BaseModel):
            total += _MODEL + sys.getsizeof(each.__dict__)
            left += each.__dict__.values()
        elif isinstance(each, dict):
            left += each.keys()
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
    return total


def costs_too_much(data: bytes | bytearray) -> bool:
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


def _announced(request: Request, limits: BodyLimits) -> int:
    """The size in its headers; 0 if there is none."""
    given = request.headers.get("content-length", "")
    announced = int(given) if given.isdecimal() and len(given) < 20 else 0
    if announced > limits.max_bytes:
        raise _too_large(limits)
    return announced


async def _read(request: Request, limits: BodyLimits, holding: Holding, announced: int) -> bytearray:
    body = bytearray()
    async for part in request.stream():
        # Counted on arrival: there may be no announced length.
        if len(body) + len(part) > limits.max_bytes:
            raise _too_large(limits)
        holding.hold(len(body) + len(part), expected=announced)
        body += part
    return body


def _too_large(limits: BodyLimits) -> BodyTooLarge:
    return BodyTooLarge(f"The body has more than {limits.max_bytes} bytes. Send less, or split the request.")
