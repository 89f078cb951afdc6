"""Nothing is computed for a request before it is admitted, but reading and parsing its bounded body.

Counted, not timed: calls of functions on the event loop between a body's parsing and admission, for a body with a few
entries and one with a thousand. Work on the entries would make a thousand calls more.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from http_app import live_app
from live_service import set_faults
from served_routes import routes_of_the_app

from ostro.errors import QueueFull
from ostro.server import api as server_api
from ostro.server.admission.limits import Gate, Ticket
from ostro.server.api import HttpOptions
from ostro.server.dialects.responses import input as response_input
from ostro.server.dialects.responses.request import offered_tools
from ostro.server.http.body import read_request
from ostro.server.telemetry.record import RequestRecord

FEW, MANY = 2, 1000
OBJECT = {"type": "object"}

Body = dict[str, Any]


def messages(number: int) -> list[Body]:
    return [{"role": "user", "content": f"{place}"} for place in range(number)]


def texts(number: int) -> list[str]:
    return [f"text {place}" for place in range(number)]


def functions(number: int) -> list[Body]:
    return [{"type": "function", "function": {"name": f"f{place}", "parameters": OBJECT}} for place in range(number)]


def flat_functions(number: int) -> list[Body]:
    return [{"type": "function", "name": f"f{place}", "parameters": OBJECT} for place in range(number)]


def anthropic_tools(number: int) -> list[Body]:
    return [{"name": f"f{place}", "input_schema": OBJECT} for place in range(number)]


# A body with that many entries for each route that reads one; other spellings of a path are the same endpoint's.
BODIES: Mapping[str, Callable[[int], Body]] = {
    "/v1/chat/completions": lambda number: {"messages": messages(number)},
    "/v1/default/chat/completions": lambda number: {"messages": messages(number)},
    "/v1/completions": lambda number: {"prompt": texts(number)},
    "/v1/default/completions": lambda number: {"prompt": texts(number)},
    "/v1/responses": lambda number: {"input": messages(number)},
    "/v1/responses/input_tokens": lambda number: {"input": messages(number)},
    "/v1/messages": lambda number: {"messages": messages(number), "max_tokens": 1},
    "/v1/messages/count_tokens": lambda number: {"messages": messages(number)},
    "/v1/embeddings": lambda number: {"input": texts(number)},
    "/v1/rerank": lambda number: {"query": "which", "documents": texts(number)},
    "/v2/rerank": lambda number: {"query": "which", "documents": texts(number)},
    "/rerank": lambda number: {"query": "which", "documents": texts(number)},
    "/v1/score": lambda number: {"text_1": "which", "text_2": texts(number)},
    "/score": lambda number: {"text_1": "which", "text_2": texts(number)},
    "/generate": lambda number: {"prompts": texts(number)},
    "/generate_stream": lambda number: {"prompts": texts(number)},
    "/loglikelihood": lambda number: {"prompts": texts(number), "continuations": texts(number)},
    "/pseudo_loglikelihood": lambda number: {"prompts": texts(number), "continuations": texts(number)},
    "/hrm/solve": lambda number: {"inputs": [[place] for place in range(number)]},
    "/prefill": lambda number: {"prompts": texts(number)},
    "/tokenize": lambda number: {"messages": messages(number)},
    "/detokenize": lambda number: {"tokens": list(range(number))},
}
# The same for their other long list.
TOOLS: Mapping[str, Callable[[int], Body]] = {
    "/v1/chat/completions": lambda number: {"messages": messages(1), "tools": functions(number)},
    "/v1/responses": lambda number: {"input": "Hello", "tools": flat_functions(number)},
    "/v1/responses/input_tokens": lambda number: {"input": "Hello", "tools": flat_functions(number)},
    "/v1/messages": lambda number: {"messages": messages(1), "max_tokens": 1, "tools": anthropic_tools(number)},
    "/v1/messages/count_tokens": lambda number: {"messages": messages(1), "tools": anthropic_tools(number)},
    "/tokenize": lambda number: {"messages": messages(1), "tools": functions(number)},
}
# They read no body, or an operator's.
WITHOUT = {"/v1/responses/compact", "/v1/responses/default/cancel"}


class Calls:
    """Counts calls on the event loop from a body's parsing to admission, which it refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.refuses, self.was_admitted = True, False

        async def read(*args: Any) -> Any:
            request = await read_request(*args)
            self.number, self.was_admitted = 0, False
            sys.setprofile(self._count)
            return request

        @asynccontextmanager
        async def admit(gate: Gate, record: RequestRecord) -> AsyncIterator[Ticket]:
            sys.setprofile(None)
            self.was_admitted = True
            if self.refuses:
                raise QueueFull("The queue is full.", retry_after=1)
            yield Ticket(gate, record)

        monkeypatch.setattr(server_api, "read_request", read)
        monkeypatch.setattr(Gate, "admit", admit)

    def _count(self, frame: object, event: str, arg: object) -> None:
        self.number += event in ("call", "c_call")


def test_every_route_that_reads_a_body_is_listed() -> None:
    paths = {route.path for route in routes_of_the_app() if route.method == "POST"}
    assert {path for path in paths if not path.startswith("/admin/")} == BODIES.keys() | WITHOUT


@pytest.mark.full
def test_tools_of_background_responses_are_read_where_bodies_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response repeats them before it is admitted. Any number of threads read them, for 0.3 s each."""
    set_faults(monkeypatch)
    threads: list[str] = []

    def offered(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return offered_tools(*args)

    monkeypatch.setattr(response_input, "offered_tools", offered)

    async def scenario() -> None:
        async with (
            live_app(HttpOptions()) as (host, port, _),
            httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client,
        ):
            asked = {"input": "Hello", "tools": flat_functions(FEW), "background": True, "max_output_tokens": 1}
            answer = await client.post("/v1/responses", json=asked)
            assert [tool["name"] for tool in answer.json()["tools"]] == ["f0", "f1"]

    asyncio.run(scenario())
    assert len(threads) == 1
    assert threads[0].startswith("body"), "of which there are two"


@pytest.mark.full
@pytest.mark.parametrize("bodies", [BODIES, TOOLS], ids=["main list", "tools"])
def test_work_before_admission_does_not_grow_with_the_body(
    monkeypatch: pytest.MonkeyPatch, bodies: Mapping[str, Callable[[int], Body]]
) -> None:
    """Conversations were translated first: sixteen linked responses took 20 seconds of everyone's time. 5,000 tools
    took 0.3 seconds.
    """
    set_faults(monkeypatch)
    calls = Calls(monkeypatch)

    async def counted(client: httpx.AsyncClient, path: str, body: Body) -> int:
        """The least of three: other tasks of the event loop may run in between, and are counted as well."""
        numbers = []
        for _ in range(3):
            answer = await client.post(path, json=body)
            assert answer.status_code == 429, (path, answer.text)
            assert calls.was_admitted
            numbers.append(calls.number)
        return min(numbers)

    async def scenario() -> dict[str, tuple[int, int]]:
        async with live_app(HttpOptions()) as (host, port, _):
            found: dict[str, tuple[int, int]] = {}

            def ask() -> None:
                # In a thread of its own, whose calls are not counted.
                asyncio.run(ask_all())

            async def ask_all() -> None:
                async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client:
                    for path, body in bodies.items():
                        found[path] = await counted(client, path, body(FEW)), await counted(client, path, body(MANY))

            await asyncio.to_thread(ask)
            return found

    try:
        found = asyncio.run(scenario())
    finally:
        sys.setprofile(None)
    grown = {path: pair for path, pair in found.items() if pair[1] - pair[0] > (MANY - FEW) / 2}
    assert not grown
