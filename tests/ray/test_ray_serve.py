"""Ostro on Ray Serve, two replicas on this machine: streams, deaths, scaling, disconnects, prefixes, models, health.

Each test deploys what it needs on one cluster: a cluster takes ten seconds to start, a deployment five.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ray_cluster import RayCluster, ray_cluster, until
from sse_events import events_of

pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEP_SECONDS = 0.3
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 5000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    env = {
        "OSTRO_FAULTS": f"fake,step_seconds={STEP_SECONDS}",
        "OMP_NUM_THREADS": "1",
        # Scaling need not take as long as it should elsewhere.
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    }
    with ray_cluster(tmp_path_factory.mktemp("ray"), env=env) as cluster:
        yield cluster


@dataclass
class Streamed:
    replica: str
    events: list[dict[str, Any]]

    @property
    def error(self) -> str | None:
        return self.events[-1].get("error", {}).get("code") if self.events else "nothing"

    @property
    def reason(self) -> str | None:
        return next((e["choices"][0]["finish_reason"] for e in reversed(self.events) if e.get("choices")), None)


async def stream(client: httpx.AsyncClient, begun: asyncio.Semaphore | None = None, **body: object) -> Streamed:
    """One stream to its end, framed as the server frames it, whatever happened. Releases `begun` at its first event."""
    async with client.stream("POST", "/v1/completions", json={**ENDLESS, **body}) as response:
        assert response.status_code == 200, await response.aread()
        parts: list[str] = []
        async for part in response.aiter_text():
            if not parts and begun is not None:
                begun.release()
            parts.append(part)
    return Streamed(response.headers["x-ostro-replica"], events_of("".join(parts)))


async def to_its_end(events: AsyncIterator[openai.types.Completion]) -> None:
    async for event in events:
        assert event.choices[0].finish_reason is None


def all_idle(cluster: RayCluster) -> bool:
    facts = cluster.facts()
    return bool(facts) and all(each["requests"] == each["running"] == each["waiting"] == 0 for each in facts)


def test_killed_replica_fails_its_own_streams_alone_and_new_ones_succeed(cluster: RayCluster) -> None:
    cluster.deploy(replicas=2, max_batch_seqs=256)
    openai_client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)

    async def scenario() -> None:
        async with cluster.async_client() as client, openai_client:
            begun = asyncio.Semaphore(0)
            # One on each replica: the second goes where there is less to do.
            endless = []
            for n in range(2):
                endless.append(asyncio.create_task(stream(client, begun, prompt=f"endless {n}")))
                await begun.acquire()
            streams = [
                asyncio.create_task(stream(client, begun, prompt=f"story {n}", max_tokens=80)) for n in range(200)
            ]
            for _ in streams:
                await begun.acquire()
            seen = await openai_client.completions.with_raw_response.create(
                model="default", prompt="story", stream=True, max_tokens=5000, extra_body={"ignore_eos": True}
            )
            [victim] = [each for each in cluster.facts() if each["replica"] == seen.headers["x-ostro-replica"]]
            os.kill(victim["pid"], signal.SIGKILL)
            with pytest.raises(openai.APIError, match="Send it again") as raised:
                await to_its_end(seen.parse())
            assert raised.value.code == "unavailable"
            # How long they take is measured by bench/ray_serve.py.
            fresh = await asyncio.gather(*(stream(client, prompt=f"new {n}", max_tokens=2) for n in range(20)))
            assert [each.reason for each in fresh] == ["length"] * 20
            [lost], [still_open] = await asyncio.wait(endless, return_when=asyncio.FIRST_COMPLETED)
            # New streams need not wait for the old ones.
            still_open.cancel()
            await asyncio.gather(still_open, return_exceptions=True)
            done = await asyncio.gather(lost, *streams)
        broken = [each for each in done if each.replica == victim["replica"]]
        whole = [each for each in done if each.replica != victim["replica"]]
        assert len(broken) + 1 == victim["requests"] >= 50
        assert {each.error for each in broken} == {"unavailable"}
        assert {(each.error, each.reason) for each in whole} == {(None, "length")}

    asyncio.run(scenario())
    until(lambda: len(cluster.facts()) == 2, "a new replica in place of the killed one")
    until(lambda: all_idle(cluster), "nothing under way")


def test_client_that_leaves_ends_its_sequence_in_the_engine(cluster: RayCluster) -> None:
    cluster.deploy(replicas=1)
    with cluster.client() as client:
        with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
            assert response.status_code == 200, response.read()
            # Kept: an iterator that is dropped closes the connection, and the client would have left already.
            parts = response.iter_bytes()
            first = next(parts)
            until(lambda: any(each["running"] for each in cluster.facts()), f"the sequence runs, after {first!r}")
        until(lambda: all_idle(cluster), "the sequence of a stream ends with its client")
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={**ENDLESS, "stream": False}, timeout=3)
        until(lambda: all_idle(cluster), "the sequence of a plain answer ends with its client")


def test_answers_are_those_of_the_server(cluster: RayCluster) -> None:
    cluster.deploy(replicas=1, api_key="secret", admin_key="admin", max_body_size="1M")
    with cluster.client() as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").json() == {"status": "ready"}
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
        client.headers["authorization"] = "Bearer secret"
        unknown = client.post("/v1/completions", json={"prompt": "x", "nonsense": 1})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "nonsense")
        assert client.post("/v1/completions", json={"model": "no", "prompt": "x"}).status_code == 404
        assert client.post("/v1/completions", content=b"{", headers={"content-type": "text/plain"}).status_code == 415
        assert client.post("/v1/completions", json={"prompt": "x" * (2 << 20)}).status_code == 413
        assert client.get("/admin/stats").status_code == 401
        chat = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True},
            headers={"x-request-id": "mine"},
        )
        assert chat.json()["usage"]["completion_tokens"] == 3
        assert chat.headers.get_list("x-request-id") == ["mine"]
        metrics = client.get("/metrics").text
        [replica] = cluster.facts()
        assert (
            f'vllm:generation_tokens_total{{model_name="{replica["models"][0]}",replica="{replica["replica"]}"}} 3.0'
            in metrics
        )
        stats = client.get("/admin/stats", headers={"authorization": "Bearer admin"}).json()
        assert stats["replicas"][replica["replica"]]["loads"] == 1


def test_events_come_as_they_are_made(cluster: RayCluster) -> None:
    cluster.deploy(replicas=1)
    with cluster.client() as client, client.stream("POST", "/v1/completions", json=ENDLESS) as response:
        events = (line for line in response.iter_lines() if line.startswith("data: "))
        # Each is read while the engine has thousands of tokens to go: nobody holds them back.
        for _ in range(5):
            assert json.loads(next(events).removeprefix("data: "))["choices"][0]["finish_reason"] is None
    until(lambda: all_idle(cluster), "nothing under way")


def test_load_adds_a_replica_and_its_end_takes_one_away(cluster: RayCluster) -> None:
    cluster.deploy(replicas=1, max_replicas=2, target_requests=4, upscale_delay=1, downscale_delay=2, look_back=2)
    assert len(cluster.facts()) == 1

    async def scenario() -> list[Streamed]:
        async with cluster.async_client() as client:
            begun = asyncio.Semaphore(0)
            load = [asyncio.create_task(stream(client, begun)) for _ in range(10)]
            await asyncio.to_thread(until, lambda: len(cluster.facts()) == 2, "a second replica")
            others = [asyncio.create_task(stream(client, begun, prompt=f"more {n}", max_tokens=100)) for n in range(4)]
            for _ in range(14):
                await begun.acquire()
            assert all(each["requests"] for each in cluster.facts())
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
            # One of the replicas has to go while it is still at work.
            await asyncio.to_thread(until, lambda: cluster.status()["replicas"]["RUNNING"] == 1, "one replica again")
            return await asyncio.gather(*others)

    for each in asyncio.run(scenario()):
        assert (each.error, each.reason) == (None, "length")
    until(lambda: len(cluster.facts()) == 1, "one replica again")


def test_shared_prefixes_are_found_more_often_than_by_round_robin(cluster: RayCluster) -> None:
    dice = random.Random(7)
    groups = [f"{n} " + "".join(dice.choice("abcdefgh ") for _ in range(1500)) for n in range(8)]
    asked = [f"{group} question {n}" for group in groups for n in range(4)]
    dice.shuffle(asked)

    def hit_rate(routing: str) -> float:
        cluster.deploy(replicas=2, routing=routing, max_batch_tokens=4096)
        with cluster.client() as client:
            usages = [
                client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()["usage"]
                for prompt in asked
            ]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return float(cached / sum(usage["prompt_tokens"] for usage in usages))

    by_prefix, in_turn = hit_rate("prefix"), hit_rate("round_robin")
    # Of four requests the first cannot hit; in turn, the first of each replica cannot.
    assert by_prefix > 0.6
    assert by_prefix > in_turn + 0.1


def test_requests_go_where_their_model_is_loaded(cluster: RayCluster, tmp_path: Path) -> None:
    from model_directory import write_model

    for name in ("a", "b"):
        write_model(tmp_path / "models" / name)
    cluster.deploy(replicas=2, models=str(tmp_path / "models"), max_models=1)
    dice = random.Random(7)
    with cluster.client() as client:
        told = [
            (model, client.post("/v1/completions", json={"model": model, "prompt": f"{n} x", "max_tokens": 1}))
            for n in range(20)
            for model in dice.sample(["a", "b"], 2)
        ]
        assert {answer.status_code for _, answer in told} == {200}
        homes = {(model, answer.headers["x-ostro-replica"]) for model, answer in told}
        stats = client.get("/admin/stats").json()["replicas"].values()
    assert len(homes) == 2, "each model stays on one replica"
    assert [(each["loads"], each["evictions"]) for each in stats] == [(1, 0), (1, 0)]


def test_engine_that_dies_is_restarted_by_its_replica(cluster: RayCluster) -> None:
    cluster.deploy(replicas=1)
    [before] = cluster.facts()
    os.kill(before["engine_pids"][0], signal.SIGKILL)
    with cluster.client() as client:
        until(
            lambda: cluster.facts()[0]["engine_pids"] != before["engine_pids"] and client.get("/readyz").is_success,
            "a new engine",
        )
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200
    [after] = cluster.facts()
    assert (after["replica"], after["pid"]) == (before["replica"], before["pid"])


def test_replica_whose_model_is_gone_for_good_is_unhealthy(cluster: RayCluster, tmp_path: Path) -> None:
    from model_directory import write_model

    directory = write_model(tmp_path / "model")
    cluster.deploy(replicas=1, model=str(directory))
    [before] = cluster.facts()
    hidden = directory.rename(tmp_path / "hidden")
    os.kill(before["engine_pids"][0], signal.SIGKILL)
    until(lambda: cluster.status()["status"] != "HEALTHY", "Serve notices", seconds=120)
    hidden.rename(directory)
    until(
        lambda: [each["pid"] for each in cluster.facts()] not in ([], [before["pid"]]), "another replica", seconds=120
    )
    with cluster.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
