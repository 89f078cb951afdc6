"""What serving three models with room for two costs: answers, swaps, memory, and whether probes feel any of it.

    python bench/pool.py                     # the default model under three names
    python bench/pool.py --requests 60 --no-save

Three runs of the server. One model, cold: from the load to the first token, the measure for the others. Then swaps, one
at a time: evict, load, first token. Then many requests at once over all three, in a random order, each answer compared
with what the model says when it is asked alone; /healthz is asked all along. Memory is that of the engines' processes.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from ostro.weights import open_checkpoint
from serving import children_of, resident_bytes, serving

RESULTS = Path(__file__).parent / "results"
NAMES = ("a", "b", "c")
BARS = {"swap_over_cold": 1.3, "healthz_p99_seconds": 0.1, "memory_left_share": 0.05}
PROBE_EVERY_SECONDS = 0.01
PROMPTS = ("Once upon a time", "The capital of France is", "Water boils at", "My favourite colour is")


@dataclass(frozen=True, slots=True)
class Figures:
    cold_seconds: list[float]
    swap_seconds: list[float]
    swap_over_cold: float
    memory_left_share: float
    """Most that was left of a model's memory after its eviction."""
    requests: int
    seconds: float
    wrong: int
    failed: int
    loads: int
    evictions: int
    healthz_p50_seconds: float
    healthz_p99_seconds: float
    healthz_max_seconds: float


async def complete(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int = 8) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


async def admin(client: httpx.AsyncClient, what: str, model: str) -> None:
    (await client.post(f"/admin/{what}/{model}")).raise_for_status()


async def stats(client: httpx.AsyncClient) -> dict[str, int]:
    answer = (await client.get("/admin/stats")).json()
    return {"loads": answer["loads"], "evictions": answer["evictions"]}


async def swaps(client: httpx.AsyncClient, server: int, repeats: int) -> tuple[list[float], list[float], float]:
    """Seconds to load and answer with room, the same when another has to go, and what is left of memory."""
    cold, swapped, left = [], [], 0.0
    for _ in range(repeats):
        empty = engines_bytes(server)
        began = time.perf_counter()
        await complete(client, "a", PROMPTS[0], 1)
        cold.append(time.perf_counter() - began)
        full = engines_bytes(server)
        await complete(client, "b", PROMPTS[0], 1)
        before = engines_bytes(server)
        began = time.perf_counter()
        await complete(client, "c", PROMPTS[0], 1)
        swapped.append(time.perf_counter() - began)
        # Two before, two after.
        left = max(left, abs(engines_bytes(server) - before) / (full - empty))
        for name in NAMES:
            await admin(client, "unload", name)
        left = max(left, (engines_bytes(server) - empty) / (full - empty))
    return cold, swapped, left


def engines_bytes(server: int) -> int:
    return sum(resident_bytes(child) for child in children_of(server))


async def crowd(client: httpx.AsyncClient, requests: int) -> tuple[float, int, int]:
    """Seconds, wrong answers, failures."""
    expected = {(name, prompt): await complete(client, name, prompt) for name in NAMES for prompt in PROMPTS}
    dice = random.Random(7)
    asked = [dice.choice(list(expected)) for _ in range(requests)]
    began = time.perf_counter()
    answers = await asyncio.gather(*(complete(client, *each) for each in asked), return_exceptions=True)
    seconds = time.perf_counter() - began
    failed = sum(isinstance(answer, BaseException) for answer in answers)
    for answer in answers:
        if isinstance(answer, BaseException):
            print(f"failed: {answer!r}")
    wrong = sum(
        answer != expected[each] for each, answer in zip(asked, answers, strict=True) if isinstance(answer, str)
    )
    return seconds, wrong, failed


async def probe(url: str, latencies: list[float]) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        while True:
            began = time.perf_counter()
            await client.get("/healthz")
            latencies.append(time.perf_counter() - began)
            await asyncio.sleep(PROBE_EVERY_SECONDS)


async def measure(url: str, pid: int, requests: int, repeats: int) -> Figures:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600, limits=limits) as client:
        latencies: list[float] = []
        probing = asyncio.create_task(probe(url, latencies))
        cold, swapped, left = await swaps(client, pid, repeats)
        before = await stats(client)
        seconds, wrong, failed = await crowd(client, requests)
        after = await stats(client)
        probing.cancel()
    ordered = sorted(latencies)
    return Figures(
        cold_seconds=cold,
        swap_seconds=swapped,
        swap_over_cold=statistics.median(swapped) / statistics.median(cold),
        memory_left_share=left,
        requests=requests,
        seconds=seconds,
        wrong=wrong,
        failed=failed,
        loads=after["loads"] - before["loads"],
        evictions=after["evictions"] - before["evictions"],
        healthz_p50_seconds=statistics.median(ordered),
        healthz_p99_seconds=ordered[int(0.99 * len(ordered))],
        healthz_max_seconds=ordered[-1],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="instead of the default one")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args(arguments)
    path = str(open_checkpoint(options.model).path)
    models = [word for name in NAMES for word in ("--model", f"{name}={path}")]
    with serving(*models, "--max-models", "2", "--kv-memory", "256M", "--load-timeout", "300", ready=False) as server:
        url = f"http://{server.host}:{server.port}"
        figures = asyncio.run(measure(url, server.pid, options.requests, options.repeats))
    print(json.dumps(asdict(figures), indent=2))
    for name, bar in BARS.items():
        print(f"{name}: {getattr(figures, name):.3f} (bar {bar})")
    if not options.no_save:
        text = json.dumps({**asdict(figures), "bars": BARS}, indent=2) + "\n"
        (RESULTS / "pool.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
