"""What a client sends besides bodies: heads, chunk sizes, trailers, offers to upgrade, requests ahead of their turn."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine

import pytest
from fake_wire import FakeWire, wire_config
from jumping_loop import run_in_jumping_time
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

KIB = 1 << 10
# What a socket gives at a time.
BLOCK = 256 * KIB


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(b"[" + body + b"]")(scope, receive, send)


async def echo_later(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(1)
    await echo(scope, receive, send)


async def deny(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("no", 401)(scope, receive, send)


async def name_fields(scope: Scope, receive: Receive, send: Send) -> None:
    await Request(scope, receive).body()
    names = b",".join(name for name, _ in scope["headers"])
    await PlainTextResponse(b"[" + names + b"]")(scope, receive, send)


def on_wires(app: ASGIApp, *acts: Callable[[FakeWire], Coroutine[object, object, None]]) -> list[FakeWire]:
    """Runs clients' parts, each on a connection of its own, and the server's until a few seconds later."""
    wires: list[FakeWire] = []

    async def run() -> None:
        config = wire_config(app)
        wires.extend(FakeWire(config) for _ in acts)
        await asyncio.gather(*(act(wire) for act, wire in zip(acts, wires, strict=True)))
        await asyncio.sleep(3)

    run_in_jumping_time(run())
    assert not any(wire.error for wire in wires)
    return wires


def sending(*blocks: bytes) -> Callable[[FakeWire], Coroutine[object, object, None]]:
    async def send(wire: FakeWire) -> None:
        for block in blocks:
            wire.client_sends(block)
            await asyncio.sleep(0.01)

    return send


def sent_to(app: ASGIApp, *blocks: bytes) -> FakeWire:
    [wire] = on_wires(app, sending(*blocks))
    return wire


def statuses(wire: FakeWire) -> list[int]:
    return [int(part[:3]) for part in bytes(wire.sent).split(b"HTTP/1.1 ")[1:]]


def echoes(wire: FakeWire) -> list[bytes]:
    """The bodies that were echoed. They hold no brackets themselves."""
    return [part.partition(b"]")[0] for part in bytes(wire.sent).split(b"[")[1:]]


def post(*fields: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([b"POST / HTTP/" + version, b"host: x", *fields, b"", body])


def with_length(body: bytes, *fields: bytes, version: bytes = b"1.1") -> bytes:
    return post(b"content-length: %d" % len(body), *fields, body=body, version=version)


def chunked(*chunks: bytes, extension: bytes = b"") -> bytes:
    """Without the end, which is `0`, trailers and an empty line."""
    body = b"".join(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return post(b"transfer-encoding: chunked", body=body)


# --- chunks and trailers ----------------------------------------------------------------------------------------------


def test_trailers_are_no_headers() -> None:
    """They were appended to the request's headers, for good."""
    wire = sent_to(name_fields, chunked(b"hello") + b"0\r\nx-late: 1\r\nexpect: 100-continue\r\n\r\n")
    assert echoes(wire) == [b"host,transfer-encoding"]


@pytest.mark.parametrize("app", [echo, deny], ids=["read", "denied"])
@pytest.mark.parametrize(
    "flood",
    [b"a: b\r\n" * (64 * KIB), b"a: " + b"b" * 384 * KIB],
    ids=["many", "long"],
)
def test_trailers_end_where_the_limit_is(app: ASGIApp, flood: bytes) -> None:
    """30 MB of them after a 401 took 559 MiB, and 6.9 s of everybody's time."""
    blocks = [flood[at : at + BLOCK] for at in range(0, len(flood), BLOCK)]
    wire = sent_to(app, chunked(b"hello") + b"0\r\n", *blocks, b"a: b\r\n" * 100)
    assert wire.is_closed
    assert statuses(wire) == ([413] if app is echo else [401])


def test_short_trailers_leave_the_connection_in_use() -> None:
    one = chunked(b"hello") + b"0\r\n" + b"a: b\r\n" * 1000 + b"\r\n"
    wire = sent_to(echo, one, one)
    assert echoes(wire) == [b"hello", b"hello"]


def test_chunk_extensions_end_where_the_limit_is() -> None:
    wire = sent_to(echo, post(b"transfer-encoding: chunked") + b"5;a", *[b"b" * 60 * KIB] * 2)
    assert wire.is_closed
    assert statuses(wire) == [413]


@pytest.mark.parametrize(("size", "count"), [(1, 8_000), (8, 80_000), (1000, 1000)])
def test_small_chunks_are_read(size: int, count: int) -> None:
    data = chunked(*[b"x" * size] * count) + b"0\r\n\r\n"
    wire = sent_to(echo, *(data[at : at + BLOCK] for at in range(0, len(data), BLOCK)))
    assert echoes(wire) == [b"x" * size * count]


def test_body_of_nothing_but_framing_is_refused() -> None:
    """Each byte of a body in chunks of one took five others, and a microsecond."""
    data = chunked(*[b"x"] * 200_000) + b"0\r\n\r\n"
    wire = sent_to(echo, *(data[at : at + BLOCK] for at in range(0, len(data), BLOCK)))
    assert statuses(wire) == [413]


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [KIB, BLOCK])
@pytest.mark.parametrize(
    "head",
    [post(b"x: " + b"y" * 65 * KIB), post(*[b"a: b"] * 2000), b"GET /" + b"a" * 65 * KIB + b" HTTP/1.1\r\n\r\n"],
    ids=["long", "many", "url"],
)
def test_long_head_is_refused_however_it_arrives(head: bytes, size: int) -> None:
    """One that came in a single block was served, of up to four times the size; and 16,000 short headers were."""
    wire = sent_to(echo, *(head[at : at + size] for at in range(0, len(head), size)))
    assert wire.is_closed
    assert statuses(wire) == [431]


def test_head_that_came_in_one_block_is_refused_before_it_ends() -> None:
    """Its client waited until the time for heads was over, and was told nothing then."""
    wire = sent_to(echo, b"GET / HTTP/1.1\r\nx: " + b"y" * 70 * KIB)
    assert wire.is_closed
    assert statuses(wire) == [431]


@pytest.mark.parametrize("size", [KIB, BLOCK])
def test_head_within_the_limit_is_served_however_it_arrives(size: int) -> None:
    data = post(b"x: " + b"y" * 30 * KIB, *[b"a: b"] * 800, b"content-length: 2", body=b"ab")
    wire = sent_to(echo, *(data[at : at + size] for at in range(0, len(data), size)))
    assert echoes(wire) == [b"ab"]


def test_blank_lines_keep_no_connection() -> None:
    """One after a response took the connection's last timer away."""

    async def send(wire: FakeWire) -> None:
        wire.client_sends(with_length(b"a"))
        for _ in range(10):
            await asyncio.sleep(1)
            wire.client_sends(b"\r\n")

    [wire] = on_wires(echo, send)
    assert echoes(wire) == [b"a"]
    assert wire.is_closed


# --- offers to upgrade ------------------------------------------------------------------------------------------------

OFFER = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABk")
CHUNKED = (b"transfer-encoding: chunked",)


def in_one_chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body) if body else b""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "kind",
    [
        lambda body: with_length(body, *OFFER),
        lambda body: with_length(body, b"upgrade: websocket", b"connection: upgrade"),
        lambda body: with_length(body, b"connection: upgrade"),
        lambda body: with_length(body, b"upgrade: h2c"),
        lambda body: post(*OFFER, *CHUNKED, body=in_one_chunk(body) + b"0\r\na: b\r\n\r\n"),
        lambda body: post(*CHUNKED, body=in_one_chunk(body) + b"0\r\n" + b"\r\n".join(OFFER) + b"\r\n\r\n"),
    ],
    ids=["h2c", "websocket", "no-protocol", "no-connection", "chunked", "trailers"],
)
def test_requests_sent_ahead_that_offer_another_protocol_are_served_in_this_one(kind: Callable[[bytes], bytes]) -> None:
    """The rest of the first was counted from its own start: the second's bytes were read as another request's."""
    bodies = [b"first", b"GET /decoy HTTP/1.1", b"", b"x" * 100]
    data = b"".join(map(kind, bodies))
    wires = on_wires(echo, *(sending(data[:cut], data[cut:]) for cut in range(len(data))))
    assert all(echoes(wire) == bodies for wire in wires)


def test_offer_by_an_older_client_is_declined_and_its_connection_closed() -> None:
    wire = sent_to(echo, with_length(b"a", *OFFER, version=b"1.0") + with_length(b"b", *OFFER))
    assert echoes(wire) == [b"a"]
    assert wire.is_closed


def test_tunnel_is_refused_after_the_requests_before_it() -> None:
    tunnel = b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n"
    assert statuses(sent_to(echo, tunnel)) == [400]
    wire = sent_to(echo_later, with_length(b"a", *OFFER) + tunnel + with_length(b"b"))
    assert echoes(wire) == [b"a"]
    assert wire.is_closed


# --- one request after another ----------------------------------------------------------------------------------------

GARBAGE = b"\x16\x03\x01\r\n\r\n"
BAD_CHUNK = b"zz\r\n"


@pytest.mark.parametrize("bad", [GARBAGE, post(*CHUNKED, body=BAD_CHUNK), post(b"x: " + b"y" * 65 * KIB)])
def test_what_is_no_request_does_not_cut_into_the_answers_before_it(bad: bytes) -> None:
    """Its refusal was written at once, as if it were an answer to the first, or in the middle of that."""
    wire = sent_to(echo_later, with_length(b"a") + with_length(b"b") + bad + with_length(b"c"))
    assert statuses(wire) == [200, 200]
    assert echoes(wire) == [b"a", b"b"]
    assert wire.is_closed
    assert bytes(wire.sent).count(b"connection: close") == 1


def test_broken_body_is_refused_once_and_its_reader_told() -> None:
    heard = []

    async def listen(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([(await receive())["type"], (await receive())["type"]])
        await PlainTextResponse("too late")(scope, receive, send)

    wire = sent_to(listen, chunked(b"hello"), BAD_CHUNK)
    assert heard == ["http.request", "http.disconnect"]
    assert statuses(wire) == [400]
    assert wire.is_closed


def test_broken_body_that_was_answered_is_not_answered_again() -> None:
    wire = sent_to(deny, chunked(b"hello"), BAD_CHUNK)
    assert statuses(wire) == [401]
    assert wire.is_closed


def test_nothing_is_read_after_the_last_request() -> None:
    wire = sent_to(echo_later, with_length(b"a", b"connection: close") + with_length(b"b"), GARBAGE)
    assert echoes(wire) == [b"a"]
    assert wire.is_closed


def test_requests_sent_ahead_beyond_the_limit_are_left_to_another_connection() -> None:
    """One block held 14,000 of them, each of which took 2 KB."""
    wire = sent_to(echo, b"".join(with_length(b"%d" % number) for number in range(5000)))
    assert echoes(wire) == [b"%d" % number for number in range(17)]
    assert wire.is_closed
    *_, last = bytes(wire.sent).split(b"HTTP/1.1 ")
    assert b"connection: close" in last


def test_body_that_is_long_in_coming_after_its_answer_may_take_its_time() -> None:
    async def send(wire: FakeWire) -> None:
        wire.client_sends(post(b"content-length: 10", body=b"x"))
        for _ in range(9):
            # Longer than a connection without a request is kept.
            await asyncio.sleep(2)
            wire.client_sends(b"x")
        wire.client_sends(with_length(b"a"))

    [wire] = on_wires(deny, send)
    assert statuses(wire) == [401, 401]


@pytest.mark.parametrize("blocks", [[with_length(b"a")], [with_length(b"a"), GARBAGE], [with_length(b"a") * 3]])
def test_connection_that_has_ended_leaves_nothing_in_memory(blocks: list[bytes]) -> None:
    """It and its last request held each other, and all that was sent, until garbage was collected."""
    gone = []

    async def send(wire: FakeWire) -> None:
        gone.append(weakref.ref(wire.protocol))
        for block in blocks:
            wire.client_sends(block)
        await asyncio.sleep(0.01)
        wire.client_leaves()
        await asyncio.sleep(0.01)
        del wire.protocol

    gc.collect()
    gc.disable()
    try:
        on_wires(echo_later, send)
        assert gone[0]() is None
    finally:
        gc.enable()
