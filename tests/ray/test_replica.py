"""A replica and the ingress before it, without Ray: the same answers as the server's, and proper ends."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_service import set_faults
from model_directory import write_model
from otlp_collector import collector
from sse_events import events_of
from starlette.types import Message

from ostro.errors import ModelError
from ostro.ray.forwarded_request import ForwardedRequest
from ostro.ray.ingress import Answering, Ingress
from ostro.ray.replica import EngineReplica, WholeAnswer
from ostro.routing.report import Report
from ostro.server.admission.auth import Keyring
from ostro.server.http.body import BodyLimits
from ostro.server.settings import Given

ENDLESS = {"prompt": "Once upon a time", "max_tokens": 5000, "ignore_eos": True, "stream": True}


class Died(Exception):
    pass


class Local:
    """Replicas of this process. The one that is asked ends after `lives` messages."""

    faults = (Died,)

    def __init__(self, *replicas: EngineReplica, lives: int | None = None) -> None:
        self._replicas = replicas
        self._lives = lives

    def ask(self, call: ForwardedRequest) -> Answering:
        return _LocalAnswer(self._replicas[0], call, self._lives)

    def ask_all(self, call: ForwardedRequest) -> Awaitable[Sequence[WholeAnswer | BaseException]]:
        return asyncio.gather(*(replica.answer_whole(call) for replica in self._replicas), return_exceptions=True)


class _LocalAnswer:
    def __init__(self, replica: EngineReplica, call: ForwardedRequest, lives: int | None) -> None:
        self._messages = self._run(replica, call, lives)

    def __aiter__(self) -> AsyncIterator[list[Message]]:
        return self._messages

    async def _run(
        self, replica: EngineReplica, call: ForwardedRequest, lives: int | None
    ) -> AsyncIterator[list[Message]]:
        answers, seen = replica.answer(call), 0
        try:
            async for messages in answers:
                for message in messages:
                    if seen == lives:
                        raise Died
                    seen += 1
                    yield [message]
        finally:
            await answers.aclose()

    def cancel(self) -> None:
        pass


@asynccontextmanager
async def replica(name: str = "one", **settings: object) -> AsyncIterator[EngineReplica]:
    given = {key: Given(value, key) for key, value in settings.items()}
    started = EngineReplica(given, name)
    await started.start()
    try:
        yield started
    finally:
        await started.stop()


def client(
    engines: Local, keyring: Keyring | None = None, root_path: str = "", request_seconds: float = 30
) -> httpx.AsyncClient:
    ingress = Ingress(engines, keyring or Keyring(), BodyLimits(max_bytes=1 << 20), request_seconds=request_seconds)
    transport = httpx.ASGITransport(ingress, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30)


async def until_idle(replica: EngineReplica) -> None:
    async with asyncio.timeout(20):
        while (facts := replica.facts()).requests or facts.running or facts.waiting:
            await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.005")


@pytest.mark.full
def test_ingress_gives_the_application_s_answers() -> None:
    async def scenario() -> None:
        async with replica(api_key=("secret",), admin_key=("admin",), max_body_size=1 << 20) as one:
            keyring = Keyring.of(["secret"], ["admin"])
            async with client(Local(one), keyring) as http:
                assert (await http.get("/healthz")).json() == {"status": "ok"}
                refused = await http.post("/v1/completions", json={"prompt": "x"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
                http.headers["authorization"] = "Bearer secret"
                answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "ignore_eos": True})
                assert answer.json()["usage"]["completion_tokens"] == 3
                assert answer.headers["x-ostro-replica"] == "one"
                long = json.dumps({"prompt": "x" * (2 << 20)}).encode()
                kind = {"content-type": "application/json"}
                assert (await http.post("/v1/completions", content=long, headers=kind)).status_code == 413
                assert (await http.post("/v1/completions", content=_parts(long), headers=kind)).status_code == 413
                assert (await http.get("/admin/stats")).status_code == 401
            async with client(Local(one), keyring, root_path="/llm") as http:
                http.headers["authorization"] = "Bearer secret"
                assert (await http.get("/llm/v1/models")).status_code == 200
                assert (await http.get("/llm/admin/stats")).status_code == 401, "the admin's part has a prefix too"

    asyncio.run(scenario())


async def _parts(body: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(body), 1 << 16):
        yield body[begin : begin + (1 << 16)]


@pytest.mark.full
def test_every_replica_is_asked_for_metrics_and_by_the_admin() -> None:
    async def scenario() -> None:
        async with (
            replica("one", enable_cors=True) as one,
            replica("two", enable_cors=True) as two,
            client(Local(one, two)) as http,
        ):
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "ignore_eos": True})
            metrics = (await http.get("/metrics")).text
            assert metrics.count("ostro_pages_total{") == 2
            stats = (await http.get("/admin/stats")).json()
            assert [stats["replicas"][name]["loads"] for name in ("one", "two")] == [1, 1]
            asked = {"origin": "http://page", "access-control-request-method": "POST"}
            assert (await http.options("/admin/stats", headers=asked)).text == "OK"
            assert (await http.get("/metrics", headers=asked)).headers["access-control-allow-origin"] == "*"
            missing = await http.post("/admin/load/nonsense")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")

    asyncio.run(scenario())


@pytest.mark.full
def test_stream_whose_replica_dies_ends_with_an_error_event() -> None:
    async def scenario() -> None:
        async with replica() as one:
            async with client(Local(one, lives=4)) as http:
                events = events_of((await http.post("/v1/completions", json=ENDLESS)).text)
                assert events[-1]["error"]["code"] == "unavailable"
                assert "Send it again" in events[-1]["error"]["message"]
                assert len(events) == 4
            async with client(Local(one, lives=0)) as http:
                answer = await http.post("/v1/completions", json=ENDLESS)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
                assert answer.headers["retry-after"]
            await until_idle(one)

    asyncio.run(scenario())


@pytest.mark.full
def test_request_that_ran_out_of_time_is_refused_by_its_replica() -> None:
    """The ingress gave up in the same moment, with a 503: clients send that again by themselves."""

    async def scenario() -> None:
        async with replica(request_timeout=0.3) as one, client(Local(one), request_seconds=0.3) as http:
            answer = await http.post("/v1/completions", json={**ENDLESS, "stream": False})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")

    asyncio.run(scenario())


@pytest.mark.full
def test_requests_are_traced_where_the_settings_say(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with replica(otlp_endpoint=url) as one, client(Local(one)) as http:
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "mine"})

    with collector(tmp_path) as spans:
        asyncio.run(scenario(spans.url))
        assert spans.request("mine", 1)


@pytest.mark.full
def test_hanging_up_ends_the_sequence() -> None:
    async def scenario() -> None:
        async with replica() as one:
            for stream in (True, False):
                body = json.dumps({**ENDLESS, "stream": stream}).encode()
                head: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions"}
                call = ForwardedRequest.of({**head, "headers": [(b"content-type", b"application/json")]}, body)
                answers = one.answer(call)
                first = asyncio.ensure_future(anext(answers))
                while not one.facts().running:
                    await asyncio.sleep(0.02)
                if stream:
                    assert (await first)[0]["status"] == 200
                else:
                    first.cancel()
                    await asyncio.wait([first])
                await answers.aclose()
                await until_idle(one)

    asyncio.run(scenario())


def test_model_that_cannot_be_loaded_is_no_replica(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ModelError, match="There is no file or directory"):
            async with replica(model=(str(tmp_path / "nothing"),)):
                pass

    asyncio.run(scenario())


@pytest.mark.full
def test_report_names_what_is_loaded_and_check_fails_for_good(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path / "models" / name)

    async def many() -> None:
        async with replica(models=(str(tmp_path / "models"),)) as one, client(Local(one)) as http:
            assert one.report() == Report()
            await http.post("/v1/completions", json={"model": "b", "prompt": "x", "max_tokens": 1})
            assert one.report() == Report(models=frozenset({"b"}), num_models=1)

    async def alone() -> None:
        path = tmp_path / "models" / "a"
        async with replica(model=(str(path),), served_model_name=("mine",)) as one:
            assert one.report().models == {"a", "default", "mine"}
            one.check()
            path.rename(tmp_path / "hidden")
            [pid] = one.facts().engine_pids
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                while one.report().is_ready or not _has_failed(one):
                    await asyncio.sleep(0.05)
            with pytest.raises(ModelError, match="There is no file"):
                one.check()

    asyncio.run(many())
    asyncio.run(alone())


def _has_failed(replica: EngineReplica) -> bool:
    try:
        replica.check()
    except ModelError:
        return True
    return False
