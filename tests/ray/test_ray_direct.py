"""Ostro on Ray Serve with HAProxy: requests go straight to the replicas' ports, and streams outlive what chose them."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from ray_cluster import RayCluster, ray_cluster, until
from sse_events import events_of

pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STORY = {"max_tokens": 80, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    env = {"OSTRO_FAULTS": "fake,step_seconds=0.3", "OMP_NUM_THREADS": "1"}
    with ray_cluster(tmp_path_factory.mktemp("ray"), direct=True, env=env) as cluster:
        yield cluster


async def stream(client: httpx.AsyncClient, begun: asyncio.Semaphore, **body: object) -> tuple[str, str]:
    """Which replica answered, and how it ended: whole, or broken off."""
    replica = ""
    parts: list[str] = []
    try:
        async with client.stream("POST", "/v1/completions", json={**STORY, **body}) as response:
            assert response.status_code == 200, await response.aread()
            replica = response.headers["x-ostro-replica"]
            async for part in response.aiter_text():
                if not parts:
                    begun.release()
                parts.append(part)
    except httpx.RemoteProtocolError:
        return replica, "broken"
    events = events_of("".join(parts))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return replica, "whole"


async def to_its_end(events: AsyncIterator[openai.types.Completion]) -> None:
    async for event in events:
        assert event.choices[0].finish_reason is None


def ask(client: httpx.Client, prompt: str, **body: object) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **body})


def picker_pid() -> int:
    listed = subprocess.run(["ps", "axo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    ours = [line.split() for line in listed.splitlines() if "ServeReplica:default:Picker" in line]
    return int(ours[0][0])


def test_killed_replica_fails_its_own_streams_alone(cluster: RayCluster) -> None:
    cluster.deploy(replicas=2, max_batch_seqs=256)

    async def scenario() -> None:
        async with cluster.async_client() as client:
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(stream(client, begun, prompt=f"story {n}")) for n in range(40)]
            for _ in streams:
                await begun.acquire()
            victim = max(cluster.facts(), key=lambda facts: facts["requests"])
            os.kill(victim["pid"], signal.SIGKILL)
            fresh = await asyncio.gather(*(stream(client, begun, prompt=f"new {n}", max_tokens=2) for n in range(20)))
            assert {end for _, end in fresh} == {"whole"}
            ended = await asyncio.gather(*streams)
        assert {end for replica, end in ended if replica == victim["replica"]} == {"broken"}
        assert {end for replica, end in ended if replica != victim["replica"]} == {"whole"}

    asyncio.run(scenario())
    until(lambda: len(cluster.facts()) == 2, "a new replica in place of the killed one")


def test_openai_client_of_a_killed_replica_sees_a_broken_stream_and_whole_answers(cluster: RayCluster) -> None:
    cluster.deploy(replicas=2, max_batch_seqs=256)
    body: dict[str, Any] = {"model": "default", "max_tokens": 40, "extra_body": {"ignore_eos": True}}

    async def scenario() -> None:
        # Without retries: all that is seen here, HAProxy does.
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            completions = client.completions.with_raw_response
            begun = await completions.create(prompt="story", stream=True, **body)
            events = aiter(begun.parse())
            assert (await anext(events)).choices[0].finish_reason is None
            plain = [asyncio.ensure_future(completions.create(prompt=f"plain {n}", **body)) for n in range(8)]
            await asyncio.to_thread(until, lambda: sum(each["requests"] for each in cluster.facts()) == 9, "all run")
            [victim] = [each for each in cluster.facts() if each["replica"] == begun.headers["x-ostro-replica"]]
            assert victim["requests"] > 1
            os.kill(victim["pid"], signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                await to_its_end(events)
            answers = await asyncio.gather(*plain)
        assert victim["replica"] not in {answer.headers["x-ostro-replica"] for answer in answers}
        assert {answer.parse().choices[0].finish_reason for answer in answers} == {"length"}

    asyncio.run(scenario())
    until(lambda: len(cluster.facts()) == 2, "a new replica in place of the killed one")


def test_streams_and_prefixes_outlive_the_process_that_chose_their_replica(cluster: RayCluster) -> None:
    cluster.deploy(replicas=2, max_batch_tokens=4096)
    dice = random.Random(7)
    prompts = [f"{n} " + "".join(dice.choice("abcdefgh ") for _ in range(1500)) for n in range(8)]

    async def scenario(client: httpx.Client) -> None:
        homes = {prompt: ask(client, prompt).headers["x-ostro-replica"] for prompt in prompts}
        assert len(set(homes.values())) == 2
        async with cluster.async_client() as other:
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(stream(other, begun, prompt=f"story {n}")) for n in range(10)]
            for _ in streams:
                await begun.acquire()
            before = picker_pid()
            os.kill(before, signal.SIGKILL)
            assert {end for _, end in await asyncio.gather(*streams)} == {"whole"}
        await asyncio.to_thread(until, lambda: ask(client, "x").is_success, "requests are routed again")
        assert picker_pid() != before
        # What the new process knows of prefixes, the replicas have told it.
        again = {prompt: ask(client, prompt).headers["x-ostro-replica"] for prompt in prompts}
        assert again == homes

    with cluster.client() as client:
        asyncio.run(scenario(client))


def test_answers_are_those_of_the_server(cluster: RayCluster) -> None:
    cluster.deploy(replicas=1, api_key="secret", admin_key="admin", max_body_size="1M")
    with cluster.client() as client:
        until(lambda: client.get("/readyz").is_success, "the replica is known to HAProxy")
        refused = ask(client, "x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        client.headers["authorization"] = "Bearer secret"
        unknown = ask(client, "x", nonsense=1)
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "nonsense")
        assert ask(client, "x" * (2 << 20)).status_code == 413
        assert ask(client, "x" * (300 << 10)).status_code == 400, "too long for the model, and for HAProxy's buffer"
        whole = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}, headers={"x-request-id": "mine"})
        assert whole.headers.get_list("x-request-id") == ["mine"]
        assert client.get("/admin/stats").status_code == 401
        [replica] = cluster.facts()
        stats = client.get("/admin/stats", headers={"authorization": "Bearer admin"}).json()
        assert list(stats["replicas"]) == [replica["replica"]]
        assert f'replica="{replica["replica"]}"' in client.get("/metrics").text
    # Slow readers and endless heads are bounded: a replica's port speaks the server's own HTTP.
    assert cluster.haproxy is not None
    [config] = cluster.haproxy.glob("*/haproxy.cfg")
    found = re.search(r"server SERVE_REPLICA_default-Engine-\S+ (\S+):(\d+)", config.read_text())
    assert found is not None
    with socket.create_connection((found[1], int(found[2])), timeout=30) as port:
        port.sendall(b"GET / HTTP/1.1\r\nx: " + b"x" * (70 << 10))
        head, body = port.makefile("rb").read().split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431")
    assert "head is longer" in json.loads(body)["error"]["message"]


def test_client_that_leaves_ends_its_sequence_in_the_engine(cluster: RayCluster) -> None:
    cluster.deploy(replicas=1)
    with cluster.client() as client:
        until(lambda: client.get("/readyz").is_success, "the replica is known to HAProxy")
        with client.stream("POST", "/v1/completions", json={**STORY, "prompt": "x", "max_tokens": 5000}) as response:
            parts = response.iter_bytes()
            first = next(parts)
            until(lambda: any(each["running"] for each in cluster.facts()), f"the sequence runs, after {first!r}")
        until(lambda: not any(each["running"] for each in cluster.facts()), "the sequence ends with its client")
