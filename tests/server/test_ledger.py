"""The ledger of what requests hold: by key, from a body's first byte to the last event."""

import asyncio
import json
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import httpx
import pytest
from http_app import live_app
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer, live_server
from live_service import set_faults, until

from holding import KINDS, SERVER, Holder, Refused, ServerOptions
from ostro.errors import BadRequest, BodyTooLarge, TryLater
from ostro.sampling_params import SamplingParams
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.completions import CompletionRequest
from ostro.schemas.responses import CreateResponse
from ostro.schemas.wire import parse
from ostro.server.admission.ledger import Holding, Ledger
from ostro.server.admission.shares import Shares
from ostro.server.api import HttpOptions
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.dialects.responses.input import ResponseTurn
from ostro.server.dialects.responses.store import ResponseStore
from ostro.server.http.body import memory_of
from ostro.server.models.served import Model

MIB = 1 << 20


def refused(holding: Holding, size: int) -> bool:
    try:
        holding.hold(size)
    except (TryLater, BodyTooLarge):
        return True
    return False


def filled(ledger: Ledger, key: str, size: int) -> int:
    """How many requests of that size the key can hold."""
    number = 0
    while not refused(Holding(ledger, key), size):
        number += 1
    return number


@pytest.mark.parametrize("size", [10 << 10, MIB])
@pytest.mark.parametrize("num_keys", [2, 5])
def test_key_that_holds_all_it_can_leaves_every_other_key_its_part(size: int, num_keys: int) -> None:
    """Two stalled bodies of 64 MiB gave all other keys 503."""
    ledger = Ledger(128 * MIB, num_keys=num_keys)
    assert filled(ledger, "greedy", size) > 0
    others = [filled(ledger, f"key-{number}", size) for number in range(num_keys - 1)]
    assert min(others) >= 128 * MIB // (2 * num_keys) // (size + 64 * 1024) > 0


def test_longest_body_fits_however_many_keys_there_are() -> None:
    for num_keys in (1, 2, 10, 100):
        Holding(Ledger(128 * MIB, num_keys=num_keys), "me").hold(64 * MIB)


def test_request_that_can_never_fit_is_not_asked_to_retry() -> None:
    holding = Holding(Ledger(128 * MIB, num_keys=2), "me")
    with pytest.raises(BodyTooLarge, match="there are"):
        holding.hold(120 * MIB)


def test_short_room_has_a_place_for_every_request_that_may_wait() -> None:
    assert filled(Ledger(MIB, num_places=1000), "me", 60 << 10) >= 1000


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3 * MIB), st.booleans())))
def test_what_is_released_is_what_was_held(steps: list[tuple[str, int, bool]]) -> None:
    """Whatever was refused, grew, shrank or was handed over."""
    ledger = Ledger(4 * MIB, num_keys=3)
    holdings = {key: Holding(ledger, key) for key in "abc"}
    for key, size, hands_over in steps:
        refused(holdings[key], size)
        holdings[key].count_tokens(size % 100)
        if hands_over:
            before = ledger.used
            holdings[key] = holdings[key].hand_over()
            assert ledger.used == before
        assert ledger.long.used <= 4 * MIB
    for holding in holdings.values():
        holding.release()
        holding.release()
    assert ledger.used == 0


def test_operators_have_room_whoever_fills_the_rest() -> None:
    """A server's only key could fill it, and /admin/profile answered 503."""
    ledger = Ledger(MIB)
    with ExitStack() as stack:

        def hold(key: str, *, is_operator: bool = False) -> None:
            stack.enter_context(Holding(ledger, key, is_operator=is_operator)).hold(1000)

        def hold_all(key: str, *, is_operator: bool = False) -> None:
            for _ in range(100):
                hold(key, is_operator=is_operator)

        with pytest.raises(TryLater):
            hold_all("greedy")
        before = ledger.used
        hold("admin", is_operator=True)
        assert ledger.used > before
        with pytest.raises(TryLater):
            hold_all("admin", is_operator=True)
    assert ledger.used == 0


def test_text_with_one_wide_character_counts_as_python_stores_it() -> None:
    assert 1000 <= memory_of("x" * 1000) < 1100
    assert 4000 <= memory_of("x" * 999 + "\U0001f600") < 4200
    assert memory_of([1] * 1000) > 8 * 1000


def test_fields_that_the_schema_ignores_do_not_count() -> None:
    body = {"prompt": "Hello", "user": "u" * 100_000}
    assert memory_of(body) > 100_000 > 10_000 > memory_of(parse(CompletionRequest, body))


def test_objects_count_by_what_pydantic_makes_of_them() -> None:
    """Measured by the allocator: the estimate is between half and twice of it."""
    messages = [{"role": "user", "content": f"{number}"} for number in range(1000)]
    tracemalloc.start()
    request = parse(ChatCompletionRequest, {"messages": messages})
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 2 < memory_of(request) < 2 * taken


def test_answers_count_by_the_tokens_that_they_have_so_far() -> None:
    """What is generated was counted only once it was stored."""
    ledger, tokens = Ledger(MIB), [0]
    with Holding(ledger, "me") as holding:
        holding.count_answer(lambda: len(tokens))
        before = ledger.used
        tokens += [1] * 1000
        assert 100_000 < ledger.used - before < MIB
    assert ledger.used == 0


# --- conversations that are continued -------------------------------------------------------------------------------


def continued(store: ResponseStore, ledger: Ledger, **fields: object) -> ChatRequest:
    """The chat request, as the gate has it translated."""
    service = SimpleNamespace(run_off_loop=asyncio.to_thread)
    request = parse(CreateResponse, fields)
    turn = ResponseTurn(request, SamplingParams(), store, "me", Holding(ledger, "me"))
    return asyncio.run(turn.request(cast(Model, SimpleNamespace(service=service))))


def message(id: str, text: str, parts: int = 1) -> dict[str, object]:
    content = [{"type": "input_text", "text": text}] * parts
    return {"type": "message", "role": "user", "id": id, "content": content}


def store_with(*items: dict[str, object]) -> ResponseStore:
    store = ResponseStore(Shares(64 * MIB, is_strict=True))
    store.keep("me", {"id": "resp_1", "output": []}, items, None)
    return store


def test_conversation_that_a_request_continues_is_counted_with_it() -> None:
    """A request of 120 bytes kept 75 MiB of history until its last event, and counted as 7 KB."""
    ledger = Ledger(128 * MIB)
    store = store_with(message("msg_1", "x" * MIB + "\U0001f600"))
    chat = continued(store, ledger, input="And then?", previous_response_id="resp_1")
    assert len(chat.messages) == 2
    assert 4 * MIB < ledger.long.used < 6 * MIB


def test_conversation_without_room_for_it_is_not_decoded() -> None:
    store = store_with(message("msg_1", "x" * MIB))
    with pytest.raises(BodyTooLarge):
        continued(store, Ledger(MIB), input="And then?", previous_response_id="resp_1")


def test_references_to_one_item_are_read_once_and_bounded_in_all() -> None:
    """100 references to a message of 1,024 parts took 8 s."""
    store = store_with(message("many", "a", parts=1024), message("long", "x" * MIB))
    references = [{"type": "item_reference", "id": "many"}] * 100
    ledger = Ledger(128 * MIB)
    assert len(continued(store, ledger, input=references).messages) == 100
    assert ledger.used > 1024 * 100, "what it refers to counts"
    with pytest.raises(BadRequest, match="refers to items of more than"):
        continued(store, Ledger(128 * MIB), input=[{"type": "item_reference", "id": "long"}] * 20)


# --- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_background_response_stays_in_the_ledger_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 of them with a description of 8 MiB held 361 MiB that nobody counted."""
    set_faults(monkeypatch, "step_seconds=0.5")
    # Not part of the prompt, which would be too long, so that all of them run on.
    asked = {"input": "Hello", "background": True, "user": "d" * 200_000, "max_output_tokens": 400}
    ledger = Ledger(MIB, most_stored=8 * MIB)

    async def scenario() -> None:
        async with (
            live_app(HttpOptions(), ledger=ledger) as (host, port, _),
            httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client,
        ):
            answers = [await client.post("/v1/responses", json=asked) for _ in range(6)]
            ids = [answer.json()["id"] for answer in answers if answer.status_code == 200]
            assert [answer.status_code for answer in answers] == [200] * 4 + [503] * 2
            assert ledger.long.used > 4 * 200_000
            for id in ids:
                await client.post(f"/v1/responses/{id}/cancel")
            await until(lambda: ledger.long.used == ledger.short.used == ledger.tokens == 0)

    asyncio.run(scenario())


@pytest.mark.full
def test_one_busy_key_does_not_lock_out_the_operator(tmp_path: Path) -> None:
    """/admin/profile passes the gate's check and has a body, and the only key's requests took all of both."""
    env = {"OSTRO_API_KEY": "greedy", "OSTRO_ADMIN_KEY": "boss"}
    limits = ["--max-concurrent-requests", "2", "--max-queue-requests", "2"]
    with live_server(
        tmp_path, *SERVER.arguments, *limits, "--profile", str(tmp_path), faults=SERVER.faults, env=env
    ) as server:
        url = urlsplit(server.url)
        with (
            server.client(authorization="Bearer boss") as boss,
            Holder(url.hostname or "", url.port or 0, server.process.pid, "greedy", size=100) as greedy,
        ):
            greedy.hold(KINDS["background"], 4)
            with pytest.raises(Refused):
                greedy.hold(KINDS["background"], 1)
            answer = boss.post("/admin/profile", json={"model": "a", "seconds": 0.1})
            assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = {"OSTRO_API_KEY": "greedy,polite"}
    with live_server(tmp_path_factory.mktemp("server"), "--max-body-size", "2M", env=keys) as live:
        yield live


def stalled(server: LiveServer, key: str, body: bytes) -> socket.socket:
    """A request whose last byte does not come."""
    url = urlsplit(server.url)
    connection = socket.create_connection((url.hostname or "", url.port or 0), timeout=30)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[:-1])
    return connection


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def held(server: LiveServer) -> int:
    with server.client(authorization="Bearer polite") as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("ostro_held_bytes{"))


@pytest.mark.full
def test_stalled_bodies_of_one_key_do_not_refuse_another(server: LiveServer) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 1, "user": "u" * (2 * MIB - 1000)}).encode()
    polite = {"prompt": "Hello", "max_tokens": 1, "user": "u" * 100_000}
    with ExitStack() as stack, server.client(authorization="Bearer polite") as client:
        for _ in range(32):
            stack.enter_context(stalled(server, "greedy", body))
        # All that the key may hold: its own quarter, and the half that is common.
        wait_until(lambda: held(server) > 44 * MIB)
        assert client.post("/v1/completions", json=polite).status_code == 200


@pytest.mark.full
def test_background_responses_are_in_the_memory_budget(tmp_path: Path) -> None:
    """40 of them with a description of 8 MiB held 361 MiB that nobody counted."""
    env = {"OSTRO_API_KEY": "greedy"}
    arguments = [*SERVER.arguments, "--max-body-size", "1M", "--max-bodies-size", "4M"]
    with live_server(tmp_path, *arguments, faults=SERVER.faults, env=env) as server:
        url = urlsplit(server.url)
        with Holder(url.hostname or "", url.port or 0, server.process.pid, "greedy", size=500_000) as holder:
            holder.begin(KINDS["background, for a model"])
            with pytest.raises(Refused):
                holder.hold(KINDS["background, for a model"], 16)


@pytest.mark.full
def test_one_key_does_not_empty_the_store_of_another(tmp_path: Path) -> None:
    """Requests in the background did: what runs cannot be dropped, so what others had stored was."""
    env, kind = {"OSTRO_API_KEY": "greedy,polite"}, KINDS["background, for a model"]
    with live_server(tmp_path, *ServerOptions(store="1M").arguments, faults=SERVER.faults, env=env) as server:
        url = urlsplit(server.url)
        with (
            server.client(authorization="Bearer polite") as polite,
            Holder(url.hostname or "", url.port or 0, server.process.pid, "greedy", size=60_000) as greedy,
        ):
            id = polite.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 1, "model": "a"}).json()[
                "id"
            ]
            greedy.begin(kind)
            for greedy.size in (60_000, 100):
                with pytest.raises(Refused):
                    greedy.hold(kind, 200)
            assert polite.get(f"/v1/responses/{id}").status_code == 200
