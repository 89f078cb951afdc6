"""A server that may take only so much memory, and requests that want more: it sheds them and lives.

The ceiling is RLIMIT_AS of the API process, which is where bodies, texts and answers are. It is set once the server is
ready, above what it has then, so that it means the same on every machine.
"""

import asyncio
import json
import resource
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ostro.server.error_handlers import install

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = 16 << 20
# Two bodies of the longest kind, what decoding and tokenising make of them, and the arenas of a few threads.
ROOM = 1 << 30
SHED = {400, 413, 429, 503}
QUESTION = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    # Of each thread's arena the library reserves 64 MiB, of which it uses next to nothing.
    env = {"MALLOC_ARENA_MAX": "2"}
    with live_server(tmp_path_factory.mktemp("ceiling"), "--max-body-size", "16M", env=env) as live:
        pages = int(Path(f"/proc/{live.process.pid}/statm").read_text().split()[0])
        ceiling = pages * resource.getpagesize() + ROOM
        resource.prlimit(live.process.pid, resource.RLIMIT_AS, (ceiling, ceiling))
        yield live


@pytest.fixture(autouse=True)
def alive(server: LiveServer) -> Iterator[None]:
    """The same answer after each test as before it, from the same process."""
    with server.client() as client:
        before = client.post(COMPLETIONS, json=QUESTION).json()["choices"]
        yield
        assert server.process.poll() is None
        assert client.post(COMPLETIONS, json=QUESTION).json()["choices"] == before
        assert client.get("/readyz").status_code == 200


def statuses(server: LiveServer, path: str, body: bytes, count: int) -> Counter[int]:
    def post(_: int) -> int:
        with server.client() as client:
            return client.post(path, content=body, headers={"content-type": "application/json"}).status_code

    with ThreadPoolExecutor(count) as threads:
        return Counter(threads.map(post, range(count)))


def body_of(**request: object) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode()


@pytest.mark.full
@pytest.mark.parametrize("wide", [False, True], ids=["ASCII", "one wide character"])
def test_long_bodies_are_shed(server: LiveServer, wide: bool) -> None:
    """Each is within its own bound; a dozen of them at once took all there was. One wide character makes a text's
    memory four times its length.
    """
    text = "a" * (BODY - 1000) + ("\U0001f600" if wide else "")
    found = statuses(server, COMPLETIONS, body_of(prompt=text), 12)
    assert set(found) <= SHED
    # The text with a wide character would never fit.
    assert found[400] + found[503] + (found[413] if wide else 0) == 12


@pytest.mark.full
def test_long_texts_are_shed_though_they_ask_to_be_truncated(server: LiveServer) -> None:
    """Tokenising takes 250 bytes a character, of a text of which nine tokens were to be kept."""
    text = "a b, " * (BODY // 6)
    truncated = body_of(prompt=text, truncate_prompt_tokens=9, max_tokens=1)
    assert set(statuses(server, COMPLETIONS, truncated, 4)) <= SHED
    chat = body_of(messages=[{"role": "user", "content": text}], truncate_prompt_tokens=9, max_tokens=1)
    assert set(statuses(server, CHAT, chat, 4)) <= SHED
    assert set(statuses(server, "/tokenize", body_of(prompt=text), 4)) <= SHED


@pytest.mark.full
def test_messages_full_of_markers_are_shed(server: LiveServer) -> None:
    """A mark of sixteen characters goes before each of them."""
    chat = body_of(messages=[{"role": "user", "content": "<" * (BODY - 1000)}], truncate_prompt_tokens=9)
    assert set(statuses(server, CHAT, chat, 4)) <= SHED


@pytest.mark.full
def test_many_log_probabilities_are_given_or_shed(server: LiveServer) -> None:
    body = body_of(prompt=["a b c d e f g h"] * 2048, max_tokens=1, logprobs=20, echo=True, prompt_logprobs=20)
    assert set(statuses(server, COMPLETIONS, body, 3)) <= {200, *SHED}


def test_memory_that_runs_out_in_the_middle_of_a_request_is_a_503() -> None:
    app = Starlette(routes=[Route("/", _greedy)])
    install(app)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get("/")

    response = asyncio.run(ask())
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "memory" in response.json()["error"]["message"]


async def _greedy(request: Request) -> Response:
    return Response(bytes(1 << 60))
