import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from either_client import Asker
from scripted_http import reply, scripted_server, stream

from ostro import AsyncClient, Client, OstroError
from ostro.client import target
from ostro.client.target import Tries
from ostro.errors import (
    BadAnswer,
    BadRequest,
    BodyTimeout,
    ModelNotFound,
    QueueFull,
    RequestTimeout,
    SequenceFailed,
    ServerError,
    Unavailable,
    Unreachable,
)

VERSION = reply(200, b'{"version": "1.0"}')
CHUNK = b'data: {"index": 0, "text": "a"}\n\n'
END = b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}\n\ndata: [DONE]\n\n'


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _hurry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where connections are tried, the rule's own pauses are not what is tested."""
    if "kind" in request.fixturenames:
        monkeypatch.setattr(target, "_FIRST_SECONDS", 0.01)


def asker(kind: str, url: str, **settings: Any) -> Asker:
    return Asker(kind, url, settings)


# --- the rule -------------------------------------------------------------------------------------------------------


def test_the_pause_doubles_and_is_never_the_same_for_all() -> None:
    for _ in range(50):
        tries = Tries(max_retries=8, timeout=600)
        pauses = [tries.wait_after(Unreachable("Gone.")) for _ in range(8)]
        for number, pause in enumerate(pauses):
            most = min(0.5 * 2**number, 8)
            assert most / 2 <= pause <= most
        with pytest.raises(Unreachable):
            tries.wait_after(Unreachable("Gone."))


@pytest.mark.parametrize("error", [QueueFull("Full.", retry_after=20), Unavailable("Loading.", retry_after=20)])
def test_at_least_what_the_server_asks_for_is_waited(error: OstroError) -> None:
    assert all(20 <= Tries(max_retries=1, timeout=600).wait_after(error) <= 22 for _ in range(50))


@pytest.mark.parametrize(("asked", "timeout"), [(61, 600.0), (20, 10.0)])
def test_a_server_that_asks_for_too_much_is_not_waited_for(asked: int, timeout: float) -> None:
    with pytest.raises(QueueFull) as caught:
        Tries(max_retries=9, timeout=timeout).wait_after(QueueFull("Full.", retry_after=asked))
    assert caught.value.retry_after == asked


@pytest.mark.parametrize("error", [BodyTimeout("Slow."), ServerError("Bad gateway.", status=502)])
def test_transient_failures_are_retried(error: OstroError) -> None:
    assert Tries(max_retries=1, timeout=600).wait_after(error) > 0


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("No."),
        BadAnswer("Nonsense."),
        ModelNotFound("Gone."),
        RequestTimeout("Too long."),
        SequenceFailed("It failed."),
        ServerError("It failed.", status=500),
    ],
)
def test_permanent_failures_are_not_retried(error: OstroError) -> None:
    with pytest.raises(type(error)):
        Tries(max_retries=9, timeout=600).wait_after(error)


# --- over connections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refusal", [reply(503, Retry_After="0"), reply(429, Retry_After="0"), reply(502), b"", b"HTTP"]
)
def test_a_refusal_that_passes_is_not_seen(kind: str, refusal: bytes) -> None:
    with scripted_server(refusal, VERSION) as server:
        assert asker(kind, server.url).call("version").version == "1.0"
        assert len(server.asked) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 500, 504])
def test_other_refusals_are_raised_at_once(kind: str, status: int) -> None:
    with scripted_server(reply(status), VERSION) as server:
        with pytest.raises(OstroError):
            asker(kind, server.url).call("version")
        assert len(server.asked) == 1


def test_retries_can_be_turned_off(kind: str) -> None:
    with scripted_server(reply(503, Retry_After="0"), VERSION) as server:
        with pytest.raises(Unavailable):
            asker(kind, server.url, max_retries=0).call("version")
        assert len(server.asked) == 1


def test_a_stream_is_asked_for_again_before_anything_of_it_came(kind: str) -> None:
    with scripted_server(reply(503, Retry_After="0"), stream(b": ping\n\n", cut=True), stream(CHUNK, END)) as server:
        read = asker(kind, server.url).read("stream_generate", "x")
        assert ([chunk.text for chunk in read.chunks], read.answer.completions) == (["a"], ["a"])
        assert len(server.asked) == 3


def test_a_stream_that_has_begun_is_never_asked_for_again(kind: str) -> None:
    with scripted_server(stream(CHUNK, cut=True), stream(CHUNK, END)) as server:
        with pytest.raises(Unreachable, match="broke off"):
            asker(kind, server.url).read("stream_generate", "x")
        assert len(server.asked) == 1


def test_a_stream_without_its_end_mark_is_cut_short(kind: str) -> None:
    with scripted_server(stream(CHUNK)) as server, pytest.raises(BadAnswer, match="cut short"):
        asker(kind, server.url).read("stream_generate", "x")


def test_an_error_in_a_stream_comes_after_what_came_before_it(kind: str) -> None:
    told = b'data: {"error": {"message": "The engine ended.", "type": "server_error", "code": "sequence_failed"}}\n\n'
    with scripted_server(stream(CHUNK + told + b"data: [DONE]\n\n")) as server:
        assert asker(kind, server.url).first("stream_generate", "x").text == "a"
        with pytest.raises(SequenceFailed, match=r"The engine ended\."):
            asker(kind, server.url).read("stream_generate", "x")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"version": 1}', b'{"error": "x"}', b""])
def test_an_answer_from_another_server_is_reported(kind: str, body: bytes) -> None:
    with scripted_server(reply(200, body)) as server, pytest.raises(BadAnswer, match="Ostro server"):
        asker(kind, server.url).call("version")


@pytest.fixture
def silent() -> Iterator[str]:
    """Accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_silent_server_is_given_up_after_the_timeout(kind: str, silent: str) -> None:
    with pytest.raises(RequestTimeout, match=r"silent for 0\.\d+ s"):
        asker(kind, silent, timeout=0.2).call("version")
    with pytest.raises(RequestTimeout, match=r"silent for 0\.\d+ s"):
        asker(kind, silent, timeout=0.2).read("stream_generate", "x")
    assert not asker(kind, silent).call("healthy", timeout=0.2)
    assert not asker(kind, silent).call("ready", timeout=0.2)


@pytest.mark.parametrize("sent", [stream(CHUNK, cut=True), stream(cut=True)], ids=["begun", "accepted"])
def test_a_stream_that_another_task_closes_just_ends(sent: bytes) -> None:
    """It was told as a server that broke off."""

    async def run(url: str) -> list[str]:
        async with AsyncClient(url) as client:
            pieces = []
            answer = client.stream_generate("x")

            async def read() -> None:
                async for piece in answer.text:
                    pieces.append(piece)

            reading = asyncio.create_task(read())
            while not (accepted.is_set() and len(pieces) == sent.count(CHUNK)):
                await asyncio.sleep(0.01)
            await answer.close()
            await asyncio.wait_for(reading, 30)
            return pieces

    accepted, over = threading.Event(), threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(sent)
            accepted.set()
            over.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, args=(listener,))
        serving.start()
        try:
            pieces = asyncio.run(run(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        finally:
            over.set()
            serving.join()
    assert pieces == ["a"] * sent.count(CHUNK)


def test_no_more_of_an_error_is_read_than_could_be_told(kind: str) -> None:
    """The rest never comes, and nobody waits for it."""
    head = b"HTTP/1.1 500 Words\r\nContent-Type: text/html\r\nContent-Length: 999999999\r\n\r\n"
    with scripted_server(head + b"x" * 200_000) as server, pytest.raises(ServerError, match=r"^x{500}…$"):
        asker(kind, server.url).call("version")


def test_an_unreachable_server_is_reported(kind: str) -> None:
    with scripted_server(VERSION) as server:
        pass
    gone = asker(kind, server.url, max_retries=1)
    with pytest.raises(Unreachable, match=r"cannot be reached.*Is the server up"):
        gone.call("version")
    with pytest.raises(Unreachable):
        gone.read("stream_chat", "x")
    assert not gone.call("healthy")
    with pytest.raises(Unavailable, match=r"still not answering after 0\.3 s"):
        gone.call("wait_until_ready", timeout=0.3)


def test_a_server_is_waited_for_until_it_is_ready(kind: str) -> None:
    def readiness(status: int, word: str) -> bytes:
        return reply(status, b'{"status": "%s"}' % word.encode())

    with scripted_server(b"", readiness(503, "loading"), readiness(200, "ready")) as server:
        asker(kind, server.url).call("wait_until_ready", timeout=60)
        assert len(server.asked) == 3
    with scripted_server(readiness(503, "failed")) as server, pytest.raises(OstroError, match="could not load"):
        asker(kind, server.url).call("wait_until_ready", timeout=60)


def test_one_client_serves_many_threads() -> None:
    found = []
    with scripted_server(VERSION) as server, Client(server.url) as client:
        threads = [threading.Thread(target=lambda: found.append(client.version().version)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == ["1.0"] * 8
