"""What Ray Serve costs and brings: deaths, routing by prefix, and the way to a replica.

    python bench/ray_serve.py                # needs the extra `ray`; some ten minutes
    python bench/ray_serve.py --no-save

Two replicas on this machine, whose engines run no model: the tokens are the fake runner's; the caches, the scheduler
and the HTTP application are real. Everything is measured both ways: straight to replicas, through HAProxy, and through
Serve's proxy and the ingress. Deaths: 200 streams, one replica killed; whose streams end, how long new ones take.
Prefixes: conversations of several turns over a few system prompts, once with each way of routing; the share of prompt
tokens found in a cache, and next to it the share that was seen before: the rest is new text, which no cache has. One
replica alone sees every prompt, so what it misses of that is not the routing's: caches hold whole pages, and the fake
runner's answers are random tokens, many of which are others once their text comes back in the next prompt. The way:
streamed tokens a second and the time to the first one, in turn with `ostro serve` itself, since the machine's speed may
vary.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import httpx

from serving import serving

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from ray_cluster import RayCluster, ray_cluster, until

RESULTS = Path(__file__).parent / "results"
BARS = {
    "other_streams_failed": 0,
    "new_streams_seconds": 10.0,
    "share_of_speed": 0.7,
    "added_seconds": 0.005,
    "prefix_hits": 0.9,
}
STREAMS, NEW_STREAMS = 200, 20
STEP_SECONDS = 0.3
ROUTINGS = ("prefix", "power_of_two", "round_robin")
ROUNDS = 5
Message = dict[str, str]
SYSTEMS, CONVERSATIONS, TURNS, AT_A_TIME = 4, 24, 4, 8
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Deaths:
    streams: int
    own_streams_failed: int
    other_streams_failed: int
    new_streams_seconds: float
    """From the kill until the last of the new streams has ended."""
    replaced_seconds: float


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Shares of all prompt tokens."""

    found: float
    """In a cache."""
    seen: float
    """In the prefix that a prompt shares with an earlier prompt or its answer: the most that any cache can find."""
    seen_in_pages: float
    """The same, in whole pages."""
    found_of_seen: float


@dataclass(frozen=True, slots=True)
class Way:
    """Medians over rounds, and medians of each round's comparison."""

    ray_tokens_per_second: float
    server_tokens_per_second: float
    share_of_speed: float
    ray_first_token_seconds: float
    server_first_token_seconds: float
    added_seconds: float


async def stream(client: httpx.AsyncClient, prompt: str, max_tokens: int, begun: asyncio.Semaphore) -> tuple[str, str]:
    """The replica, and what the last event but [DONE] says."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    last, is_first = "", True
    async with client.stream("POST", "/v1/completions", json=body) as response:
        replica = response.headers.get("x-ostro-replica", "")
        try:
            async for line in response.aiter_lines():
                if is_first:
                    begun.release()
                    is_first = False
                if line.startswith("data: {"):
                    last = line
        except httpx.RemoteProtocolError:
            # Straight from a replica that was killed.
            last = '"error"'
    return replica, last


async def kill_one(cluster: RayCluster) -> Deaths:
    begun = asyncio.Semaphore(0)
    async with cluster.async_client() as client:
        streams = [asyncio.create_task(stream(client, f"story {n}", 80, begun)) for n in range(STREAMS)]
        for _ in streams:
            await begun.acquire()
        victim = max(cluster.facts(), key=lambda facts: facts["requests"])
        os.kill(victim["pid"], signal.SIGKILL)
        killed = time.perf_counter()
        await asyncio.gather(*(stream(client, f"new {n}", 2, begun) for n in range(NEW_STREAMS)))
        new_seconds = time.perf_counter() - killed
        await asyncio.to_thread(until, lambda: len(cluster.facts()) == 2, "a new replica")
        replaced = time.perf_counter() - killed
        ended = await asyncio.gather(*streams)
    failed = [replica for replica, last in ended if '"error"' in last]
    return Deaths(
        streams=STREAMS,
        own_streams_failed=failed.count(victim["replica"]),
        other_streams_failed=len(failed) - failed.count(victim["replica"]),
        new_streams_seconds=new_seconds,
        replaced_seconds=replaced,
    )


def words(dice: random.Random, count: int) -> str:
    return " ".join(dice.choice(["harbour", "lantern", "seven", "quietly", "of", "the", "rain"]) for _ in range(count))


async def prefixes(cluster: RayCluster, routing: str, replicas: int = 2) -> Prefixes:
    """Measures concurrent conversations, each turn sent after the answer to the last."""
    cluster.deploy(replicas=replicas, routing=routing, max_batch_tokens=8192, page_size=PAGE_SIZE)
    with cluster.client() as waiting:
        until(lambda: waiting.get("/readyz").is_success, "the replicas are known")
    dice = random.Random(7)
    systems = [f"{n} {words(dice, 300)}" for n in range(SYSTEMS)]
    questions = [[words(dice, 40) for _ in range(TURNS)] for _ in range(CONVERSATIONS)]
    order = dice.sample(range(CONVERSATIONS), CONVERSATIONS)
    seats, cached, told = asyncio.Semaphore(AT_A_TIME), 0, list[Sequence[Message]]()
    async with cluster.async_client() as client:

        async def converse(number: int) -> None:
            nonlocal cached
            messages = [{"role": "system", "content": systems[number % SYSTEMS]}]
            for question in questions[number]:
                messages.append({"role": "user", "content": question})
                async with seats:
                    told.append([*messages])
                    body = {"messages": messages, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
                    answer = (await client.post("/v1/chat/completions", json=body)).json()
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                told.append([*messages])
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        await asyncio.gather(*map(converse, order))
        sizes = await seen_before(client, told)
    asked, seen = sum(size for size, _ in sizes), sum(seen for _, seen in sizes)
    # The last token of a prompt is computed in any case.
    in_pages = sum(min(seen, size - 1) // PAGE_SIZE * PAGE_SIZE for size, seen in sizes)
    return Prefixes(cached / asked, seen / asked, in_pages / asked, cached / seen)


async def seen_before(client: httpx.AsyncClient, told: Sequence[Sequence[Message]]) -> list[tuple[int, int]]:
    """Each prompt's number of tokens, and how many of them begin an earlier conversation."""
    earlier, sizes = list[list[int]](), []
    for messages in told:
        is_prompt = messages[-1]["role"] == "user"
        body = {"messages": messages, "add_generation_prompt": is_prompt}
        tokens: list[int] = (await client.post("/tokenize", json=body)).json()["tokens"]
        if is_prompt:
            sizes.append((len(tokens), max((num_common(tokens, each) for each in earlier), default=0)))
        earlier.append(tokens)
    return sizes


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


async def speed(url: str, clients: int = 16, max_tokens: int = 400) -> tuple[float, float]:
    """Tokens a second of many streams, and the median time to the first token of one alone."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as client:
        await stream(client, "warm", 8, asyncio.Semaphore(0))
        firsts = []
        for n in range(20):
            began, begun = time.perf_counter(), asyncio.Semaphore(0)
            task = asyncio.create_task(stream(client, f"alone {n}", 4, begun))
            await begun.acquire()
            firsts.append(time.perf_counter() - began)
            await task
        began, begun = time.perf_counter(), asyncio.Semaphore(0)
        await asyncio.gather(*(stream(client, f"many {n}", max_tokens, begun) for n in range(clients)))
        return clients * max_tokens / (time.perf_counter() - began), statistics.median(firsts)


def compared(cluster: RayCluster, server: str) -> Way:
    """In turn, so that a slow minute of the machine slows both."""
    cluster.deploy(replicas=1)
    with cluster.client() as waiting:
        until(lambda: waiting.get("/readyz").is_success, "the replica is known")
    pairs = [(asyncio.run(speed(cluster.url)), asyncio.run(speed(server))) for _ in range(ROUNDS)]
    return Way(
        ray_tokens_per_second=statistics.median(ray for (ray, _), _ in pairs),
        server_tokens_per_second=statistics.median(own for _, (own, _) in pairs),
        share_of_speed=statistics.median(ray / own for (ray, _), (own, _) in pairs),
        ray_first_token_seconds=statistics.median(ray for (_, ray), _ in pairs),
        server_first_token_seconds=statistics.median(own for _, (_, own) in pairs),
        added_seconds=statistics.median(ray - own for (_, ray), (_, own) in pairs),
    )


def measured(directory: Path, *, direct: bool) -> dict[str, object]:
    slow, fast = {"OSTRO_FAULTS": f"fake,step_seconds={STEP_SECONDS}"}, {"OSTRO_FAULTS": "fake,step_seconds=0.002"}
    with ray_cluster(directory, direct=direct, env=slow) as cluster:
        cluster.deploy(replicas=2, max_batch_seqs=256)
        deaths = asyncio.run(kill_one(cluster))
    with ray_cluster(directory, direct=direct, env=fast) as cluster, serving(env=fast) as server:
        way = compared(cluster, f"http://{server.host}:{server.port}")
        by_routing = {routing: asyncio.run(prefixes(cluster, routing)) for routing in ROUTINGS}
        by_routing["one_replica"] = asyncio.run(prefixes(cluster, "prefix", replicas=1))
    shares = {name: asdict(each) for name, each in by_routing.items()}
    figures: dict[str, object] = {"deaths": asdict(deaths), "way": asdict(way), "prefixes": shares}
    print(json.dumps({"direct" if direct else "proxy": figures}, indent=2), flush=True)
    told = {**asdict(deaths), **asdict(way), "prefix_hits": by_routing["prefix"].found}
    for name, bar in BARS.items():
        print(f"{name}: {told[name]:.3g} (bar {bar})", flush=True)
    found, alone = by_routing["prefix"], by_routing["one_replica"]
    print(f"prefix hits of what could be found: {found.found_of_seen:.1%} (seen: {found.seen:.1%})", flush=True)
    print(f"prefix hits of what one replica finds: {found.found / alone.found:.1%}", flush=True)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        figures = {name: measured(Path(directory), direct=name == "direct") for name in ("direct", "proxy")}
    if not options.no_save:
        text = json.dumps({**figures, "bars": BARS}, indent=2) + "\n"
        (RESULTS / "ray.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
