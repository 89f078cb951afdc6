"""The direct path without Ray: a replica that is its own ingress, and the endpoint that names the replica."""

import asyncio
import json
import os
import signal

import httpx
import pytest
from live_service import set_faults
from test_replica import Local, replica

from ostro.ray.call import key_of
from ostro.ray.direct import DirectReplica, Picking
from ostro.ray.replica import ROUTER_HEADER, EngineReplica
from ostro.routing.key import Key
from ostro.server.body import BodyLimits

LONG = "rules " * 400
TURN = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2, "ignore_eos": True}


def client(*replicas: EngineReplica, root_path: str = "") -> httpx.AsyncClient:
    app = DirectReplica(replicas[0], Local(*replicas), BodyLimits(max_bytes=1 << 20))
    transport = httpx.ASGITransport(app, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.001")


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


def test_report_tells_prefixes_loads_and_whose_requests_have_ended() -> None:
    async def scenario() -> None:
        async with replica("one") as one, client(one) as http:
            assert one.report().held == ()
            sent = http.post("/v1/chat/completions", json=TURN, headers={ROUTER_HEADER.decode(): "router"})
            sending = asyncio.create_task(sent)
            while one.report().load == 0:
                await asyncio.sleep(0)
            assert (await sending).status_code == 200
            key = key_of("/v1/chat/completions", json.dumps(TURN).encode())
            assert key.blocks[-1] in one.report().held
            assert one.report().load == 0
            assert one.finished == {"router": 1}
            refused = await http.post("/v1/chat/completions", json={**TURN, "messages": "none"})
            assert refused.status_code == 400
            assert len(one.report().held) == len(set(one.report().held)) < 30

    asyncio.run(scenario())


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
                while keys[0].blocks[-1] not in one.report().dropped:
                    await asyncio.sleep(0.05)
            assert keys[-1].blocks[-1] in one.report().held
            assert len(one.report().dropped) < len(one.report().held)
            [pid] = one.facts().engine_pids
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while one.report().held:
                    await asyncio.sleep(0.05)
            assert keys[-1].blocks[0] in one.report().dropped

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
