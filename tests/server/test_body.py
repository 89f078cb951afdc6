"""Bodies: what they may cost to decode, and what all of them may take together."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from http_app import live_app
from hypothesis import given
from hypothesis import strategies as st
from live_service import set_faults, until

from ostro.errors import TryLater
from ostro.sampling_params import MAX_LOGIT_BIAS
from ostro.schemas.chat import MAX_MESSAGES, MAX_PARTS
from ostro.schemas.fields import MAX_PROMPTS, MAX_TOKENS
from ostro.server.admission.ledger import Holding, Ledger
from ostro.server.admission.limits import GateLimits
from ostro.server.api import HttpOptions
from ostro.server.http import body
from ostro.server.http.body import BodyLimits, costs_too_much

COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
LONG = b'{"prompt": "' + b"a" * (200 << 10)


# --- what a body may cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inside",
    [b"," * 600_000, b"{" * 600_000, b'\\"' * 600_000, b"\\\\" * 600_000, b'\\\\\\",' * 150_000],
    ids=["commas", "braces", "escaped quotes", "backslashes", "all of them"],
)
def test_string_contents_add_no_cost(inside: bytes) -> None:
    assert not costs_too_much(b'{"prompt": "' + inside + b'"}')
    assert not costs_too_much(b'{"prompt": "x' + inside + b'", "seed": 1}')
    assert costs_too_much(b'{"prompt": "' + inside + b'", "stop": [' + b"1," * 600_000 + b"1]}")


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"1," * 600_000 + b"1]",
        b"[" + b'"",' * 600_000 + b'""]',
        b"[" * 200_000,
        b'{"a":' * 20_000,
        json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}] * 10}).encode(),
        b'"' * 1_200_000,
        b'"' + b"\\n" * 5_000_000 + b'"',
    ],
    ids=["numbers", "strings", "lists", "fields", "parts", "quotes", "escapes"],
)
def test_too_many_values_cost_too_much(text: bytes) -> None:
    assert costs_too_much(text)


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": [1] * MAX_TOKENS, "max_tokens": 1},
        {"prompt": [[1]] * MAX_PROMPTS, "logit_bias": {str(token): 1 for token in range(MAX_LOGIT_BIAS)}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * MAX_MESSAGES},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * MAX_PARTS}] * 8},
    ],
    ids=["token ids", "prompts", "messages", "parts"],
)
def test_what_the_api_takes_does_not_cost_too_much(request_: dict[str, object]) -> None:
    assert not costs_too_much(json.dumps(request_).encode())


values = st.recursive(
    st.none() | st.integers(0, 9) | st.text(st.sampled_from('",[{:\\ab')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('",[{:\\ab')), inner),
    max_leaves=50,
)


def counted(value: object) -> int:
    """The same cost, of the value itself rather than of its text."""
    if isinstance(value, list):
        return 4 + max(len(value) - 1, 0) + sum(map(counted, value))
    if isinstance(value, dict):
        return 24 + max(len(value) - 1, 0) + sum(16 + counted(entry) for entry in value.values())
    return 0


@pytest.mark.full
@given(values, st.integers(2, 40))
def test_cost_is_that_of_the_values_however_the_text_falls_into_blocks(value: object, block: int) -> None:
    text, cost = json.dumps(value, separators=(",", ":")).encode(), counted(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_BLOCK", block)
        # Escapes cost a fraction, which is another test's matter.
        patch.setattr(body, "_ESCAPES", 1 << 30)
        patch.setattr(body, "_MOST_COST", max(cost, text.count(b'"')))
        assert not costs_too_much(text)
        if cost > text.count(b'"'):
            patch.setattr(body, "_MOST_COST", cost - 1)
            assert costs_too_much(text)


def test_guard_against_costly_bodies_costs_little_itself() -> None:
    """600,000 commas in a string and three million empty strings after it took 11 seconds of a core."""
    text = b'{"prompt": "' + b"," * 600_000 + b'"' + b'""' * 3_000_000
    began = time.thread_time()
    assert costs_too_much(text)
    assert time.thread_time() - began < 1


# --- what all bodies may take together ------------------------------------------------------------------------------


OPTIONS = HttpOptions(body=BodyLimits(max_bytes=256 << 10))


@asynccontextmanager
async def client_of(ledger: Ledger, limits: GateLimits | None = None) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        live_app(OPTIONS, limits, ledger) as (host, port, _),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", headers=JSON, timeout=60) as client,
    ):
        yield client


async def dripping(start: bytes, over: asyncio.Event) -> AsyncIterator[bytes]:
    """All of a body but its end, which comes when it is told to."""
    yield start
    await over.wait()
    yield b'"}'


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)


@pytest.mark.full
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("announced", [True, False])
def test_bodies_share_a_budget_and_one_too_many_is_asked_to_retry(announced: bool) -> None:
    """Twelve bodies of 60 MB took 600 MB at once, since each was within its own bound."""
    ledger = Ledger(512 << 10)

    async def scenario() -> None:
        over, late = asyncio.Event(), LONG + b'"}'
        async with client_of(ledger) as client:
            posts = [client.post(COMPLETIONS, content=dripping(LONG, over)) for _ in range(2)]
            held = [asyncio.create_task(post) for post in posts]
            await until(lambda: ledger.long.used >= 2 * len(LONG))
            refused = await client.post(COMPLETIONS, content=late if announced else _pieces(late))
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "try_later"
            # A question finds room.
            short = await client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 1})
            assert short.status_code == 200
            over.set()
            assert {response.status_code for response in await asyncio.gather(*held)} == {400}
            assert ledger.long.used == 0
            assert (await client.post(COMPLETIONS, content=late)).status_code == 400

    asyncio.run(scenario())


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """Without an announced length."""
    yield body


@pytest.mark.full
@pytest.mark.usefixtures("fake")
def test_body_that_its_client_gives_up_leaves_the_budget() -> None:
    ledger = Ledger(512 << 10)

    async def scenario() -> None:
        async with client_of(ledger) as client:
            posting = asyncio.create_task(client.post(COMPLETIONS, content=dripping(LONG, asyncio.Event())))
            await until(lambda: ledger.long.used >= len(LONG))
            posting.cancel()
            await until(lambda: ledger.long.used == 0)

    asyncio.run(scenario())


@pytest.mark.full
@pytest.mark.usefixtures("fake")
def test_short_bodies_share_a_budget_that_leaves_long_ones_theirs() -> None:
    """They were not counted: 3,000 unfinished ones took 190 MB, whatever --max-bodies-size said."""
    ledger = Ledger(512 << 10)
    short = LONG[: 60 << 10]

    async def scenario() -> None:
        over = asyncio.Event()
        async with client_of(ledger) as client:
            posts = [client.post(COMPLETIONS, content=dripping(short, over)) for _ in range(4)]
            held = [asyncio.create_task(post) for post in posts]
            await until(lambda: ledger.short.used >= 4 * len(short))
            refused = await client.post(COMPLETIONS, content=short + b'"}')
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert (await client.post(COMPLETIONS, content=LONG + b'"}')).status_code == 400
            assert (await client.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 1})).status_code == 200
            over.set()
            assert {response.status_code for response in await asyncio.gather(*held)} == {400}
        assert ledger.short.used == ledger.long.used == 0

    asyncio.run(scenario())


def test_body_that_turns_out_to_be_long_is_counted_once() -> None:
    ledger = Ledger(256 << 10)
    holding = Holding(ledger, "me")
    holding.hold(60 << 10)
    assert ledger.short.used > 60 << 10
    assert ledger.long.used == 0
    holding.hold(70 << 10)
    assert ledger.long.used > 70 << 10
    assert ledger.short.used == 0
    with pytest.raises(TryLater):
        Holding(ledger, "me").check(100 << 10)
    holding.release()
    assert ledger.used == 0


def test_server_for_small_bodies_has_room_for_a_thousand_of_them() -> None:
    assert BodyLimits(max_bytes=16 << 10).budget == 64 << 20
    assert BodyLimits(max_bytes=16 << 10, max_bytes_together=32 << 10).budget == 32 << 10


@pytest.mark.full
def test_body_stays_in_the_budget_until_its_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left once it was tokenised, but was kept to the end: thirty of 20 MB took 800 MB of a budget of 128."""
    set_faults(monkeypatch, "step_seconds=0.1")
    ledger = Ledger(256 << 10)
    endless = {"prompt": "word " * 30_000, "truncate_prompt_tokens": 4, "max_tokens": 4000, "stream": True}

    async def scenario() -> None:
        async with client_of(ledger) as client:
            async with client.stream("POST", COMPLETIONS, json=endless | {"ignore_eos": True}) as response:
                assert response.status_code == 200
                assert ledger.long.used > 150_000
                assert (await client.post(COMPLETIONS, json=endless)).status_code == 503
                short = await client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 1})
                assert short.status_code == 200
            await until(lambda: ledger.long.used == 0)

    asyncio.run(scenario())


@pytest.mark.full
@pytest.mark.usefixtures("fake")
def test_body_is_not_read_where_the_request_would_be_refused() -> None:
    """It was once read and decoded, whatever that cost, and only then told that there was no room."""
    ledger = Ledger(512 << 10)

    async def scenario() -> None:
        endless = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with (
            client_of(ledger, GateLimits(concurrent=1, waiting=0)) as client,
            client.stream("POST", COMPLETIONS, json=endless) as holding,
        ):
            assert holding.status_code == 200
            # Had it begun to read this one, it would wait for the rest.
            assert client.base_url.port is not None
            reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(head.encode() + b"Content-Length: 100000\r\n\r\n" + LONG[:1000])
            assert (await reader.readline()).split()[1] == b"429"
            assert ledger.long.used == 0
            writer.close()

    asyncio.run(scenario())
