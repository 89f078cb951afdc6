"""The direct path without Ray: a replica that is its own ingress, and the endpoint that names the replica."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Sequence

import httpx
import pytest
from live_service import set_faults
from test_replica import Local, replica

from ostro.ray.direct import DirectReplica, Picking
from ostro.ray.forwarded_request import ForwardedRequest, key_of
from ostro.ray.ingress import Ingress
from ostro.ray.replica import ROUTER_HEADER, EngineReplica, WholeAnswer
from ostro.routing.key import Key
from ostro.server.http.body import BodyLimits

LONG = "rules " * 400
TURN = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2, "ignore_eos": True}


def client(*replicas: EngineReplica, root_path: str = "") -> httpx.AsyncClient:
    return client_of(
        DirectReplica(replicas[0], Local(*replicas), replicas[0].settings.keyring(), BodyLimits(max_bytes=1 << 20)),
        root_path,
    )


def client_of(app: DirectReplica, root_path: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30)


class Counting(Local):
    num_asked = 0

    def ask_all(self, call: ForwardedRequest) -> Awaitable[Sequence[WholeAnswer | BaseException]]:
        self.num_asked += 1
        return super().ask_all(call)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.001")


@pytest.mark.full
def test_replica_answers_itself_or_asks_all() -> None:
    async def scenario() -> None:
        async with replica("one", admin_key=("admin",)) as one, replica("two", admin_key=("admin",)) as two:
            async with client(one, two) as http:
                answer = await http.post("/v1/chat/completions", json=TURN, headers={"x-request-id": "mine"})
                assert answer.headers["x-ostro-replica"] == "one"
                assert "x-request-id" not in answer.headers, "Serve adds it"
                assert (await http.get("/metrics")).status_code == 401
                assert (await http.get("/admin/stats")).status_code == 401
                http.headers["authorization"] = "Bearer admin"
                assert (await http.get("/metrics")).text.count("ostro_pages_total{") == 2
                assert set((await http.get("/admin/stats")).json()["replicas"]) == {"one", "two"}
            async with client(one, two, root_path="/llm") as http:
                assert (await http.get("/llm/v1/models")).status_code == 200
                assert (await http.get("/llm/admin/stats")).status_code == 401, "the admin's part has a prefix too"

    asyncio.run(scenario())


@pytest.mark.full
def test_only_what_the_application_admits_reaches_other_replicas() -> None:
    """A body of any length was read and sent to every replica before anybody looked at the key."""
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(16):
            num_read += 1
            yield bytes(1 << 10)

    async def scenario() -> None:
        async with replica("one", admin_key=("admin",)) as one:
            engines = Counting(one)
            limits = BodyLimits(max_bytes=1 << 20)
            async with client_of(DirectReplica(one, engines, one.settings.keyring(), limits)) as http:
                for headers in ({}, {"authorization": "Bearer wrong"}):
                    assert (await http.post("/admin/load/x", content=body(), headers=headers)).status_code == 401
                http.headers["authorization"] = "Bearer admin"
                assert (num_read, engines.num_asked) == (0, 0)
                assert (await http.post("/admin/load/x", content=body())).status_code == 404
                assert (num_read, engines.num_asked) == (16, 1)
            ingress = Ingress(engines, one.settings.keyring(), limits, request_seconds=30)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(ingress), base_url="http://localhost") as http:
                assert (await http.post("/admin/load/x", content=body())).status_code == 401
                assert engines.num_asked == 1

    asyncio.run(scenario())


@pytest.mark.full
def test_report_includes_prefixes_loads_and_finished_requests() -> None:
    async def scenario() -> None:
        async with replica("one") as one, client(one) as http:
            assert one.report().held.since(0) == []
            sent = http.post("/v1/chat/completions", json=TURN, headers={ROUTER_HEADER.decode(): "router"})
            sending = asyncio.create_task(sent)
            while one.report().load == 0:
                await asyncio.sleep(0)
            assert (await sending).status_code == 200
            key = key_of("/v1/chat/completions", json.dumps(TURN).encode())
            assert key.blocks[-1] in one.report().held.since(0)
            assert one.report().load == 0
            assert one.finished == {"router": 1}
            headers = {ROUTER_HEADER.decode(): "made up"}
            assert (await http.get("http://elsewhere/v1/models", headers=headers)).status_code == 403
            assert one.finished == {"router": 1}, "anybody can send a name"
            refused = await http.post("/v1/chat/completions", json={**TURN, "messages": "none"})
            assert refused.status_code == 400
            assert len(one.report().held.since(0)) == len(set(one.report().held.since(0))) < 30

    asyncio.run(scenario())


@pytest.mark.full
def test_prefixes_are_dropped_when_the_engine_has_no_room_for_them_or_is_new() -> None:
    async def scenario() -> None:
        async with replica("one", max_seq_len=2048) as one, client(one) as http:
            assert one._models is not None
            info = next(service.info for _, service in one._models.loaded())
            assert info is not None
            room, tokens, asked = info.num_pages * info.page_size, 0, 0
            while tokens < 1.15 * room:
                body = {"prompt": f"{asked} {LONG * 4}", "max_tokens": 1}
                tokens += (await http.post("/v1/completions", json=body)).json()["usage"]["prompt_tokens"]
                asked += 1
            keys = [key_of("/v1/completions", json.dumps({"prompt": f"{n} {LONG * 4}"}).encode()) for n in range(asked)]
            async with asyncio.timeout(20):
                # The engine's counters come with its heartbeat.
                while keys[0].blocks[-1] not in one.report().dropped.since(0):
                    await asyncio.sleep(0.05)
            assert keys[-1].blocks[-1] in one.report().held.since(0)
            assert len(one.report().dropped.since(0)) < len(one.report().held.since(0))
            [pid] = one.facts().engine_pids
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while one.report().held.since(0):
                    await asyncio.sleep(0.05)
            assert keys[-1].blocks[0] in one.report().dropped.since(0)

    asyncio.run(scenario())


def test_picking_names_the_replica_for_a_body_even_if_only_its_beginning_came() -> None:
    keys: list[Key] = []

    async def pick(key: Key) -> str | None:
        keys.append(key)
        return None if key.model == "nobody's" else "default#Engine#one"

    async def scenario() -> None:
        transport = httpx.ASGITransport(Picking(pick, "me"))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = json.dumps({"model": "m", **TURN}).encode()
            answer = await http.post("/internal/route", content=body)
            assert answer.json() == {
                "replica_id": "default#Engine#one",
                "request_headers": {"x-serve-router-ostro": "me"},
            }
            part = await http.post("/internal/route", content=body[:1500], headers={"x-body-truncated": "1500/9000"})
            assert part.status_code == 200
            assert (await http.post("/internal/route", json={"model": "nobody's"})).status_code == 503
            assert (await http.post("/internal/route", content=b"")).status_code == 200

    asyncio.run(scenario())
    whole, part, _, nothing = keys
    assert whole.model == part.model == "m"
    assert len(part.blocks) == 11
    assert whole.blocks[:11] == part.blocks
    assert nothing == Key("default")
