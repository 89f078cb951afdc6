"""A request's body: read within bounds of size and time, decoded, checked. Knows JSON; knows no endpoint.

Decoding and checking each hold the interpreter's lock from beginning to end, in a thread too. What bounds the time that
all others wait is the number of values in the body; so these are counted before any of them is made.
"""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from ostro.errors import BadRequest, BodyTimeout, BodyTooLarge, WrongContentType
from ostro.server.disconnect import ClientGone
from ostro.server.schemas import RequestModel, parse
from ostro.server.schemas.prompts import MAX_TOKENS

# Shorter bodies are decoded sooner than a thread is woken.
_LONG_BODY = 64 << 10
# What a body may cost to decode: MAX_TOKENS token ids, or a hundred thousand fields. At twice that, /healthz was seen
# to wait 0.2 s on a busy machine.
_MOST_COST = 1 << 19
# By the byte that goes with each value, outside strings: an entry of a list, a container, a key.
_COSTS = {b",": 1, b"[": 4, b"{": 4, b":": 4}
_BACKSLASH = ord("\\")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    max_bytes: int = 64 << 20
    seconds: float = 60.0
    """How long a body may take to arrive: one byte a second keeps no connection open."""


Schema = TypeVar("Schema", bound=RequestModel)


async def read_request(schema: type[Schema], http: Request, limits: BodyLimits) -> Schema:
    """The request in the body; raises what is wrong with it. Reads no more than it may."""
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
    return await asyncio.to_thread(_decode, schema, data)


def _decode(schema: type[Schema], data: bytes) -> Schema:
    if _cost(data) > _MOST_COST:
        raise BodyTooLarge(
            f"The body holds too many values: {MAX_TOKENS} token ids, or some 100000 fields, are the most. "
            "Send prompts as text, or split the request."
        )
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from error
    return parse(schema, value)


def _cost(data: bytes) -> int:
    """Of decoding the JSON text; may stop at what is too much."""
    cost = _cost_between(data, 0, len(data))
    # Most bodies end here. In others the bytes may be those of a long text, which costs next to nothing.
    return cost if cost <= _MOST_COST else _cost_outside_strings(data)


def _cost_outside_strings(data: bytes) -> int:
    cost = begin = 0
    while begin < len(data) and cost <= _MOST_COST:
        quote = data.find(b'"', begin)
        end = quote if quote >= 0 else len(data)
        cost += _cost_between(data, begin, end)
        begin = _string_end(data, end)
    return cost


def _cost_between(data: bytes, begin: int, end: int) -> int:
    return sum(cost * data.count(byte, begin, end) for byte, cost in _COSTS.items())


def _string_end(data: bytes, begin: int) -> int:
    """Just after the string that begins there."""
    quote = data.find(b'"', begin + 1)
    while quote >= 0:
        first = quote
        while data[first - 1] == _BACKSLASH:
            first -= 1
        if (quote - first) % 2 == 0:
            return quote + 1
        quote = data.find(b'"', quote + 1)
    return len(data)


def _check_type(request: Request) -> None:
    # A web page of anyone's can make a browser send any other type here without asking us first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise WrongContentType("The body must be JSON. Send it with the header Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise WrongContentType("A compressed body cannot be read. Send it as it is, without Content-Encoding.")


def _check_length(request: Request, limits: BodyLimits) -> None:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.max_bytes:
        raise _too_large(limits)


async def _read(request: Request, limits: BodyLimits) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        # Counted as it comes: the announced length may be missing.
        if size > limits.max_bytes:
            raise _too_large(limits)
        parts.append(part)
    return b"".join(parts)


def _too_large(limits: BodyLimits) -> BodyTooLarge:
    return BodyTooLarge(f"The body has more than {limits.max_bytes} bytes. Send less, or split the request.")
