"""Conversations whose prefixes do not fit into the KV cache, with host memory below it and without, on one GPU.

    python bench/gpu_tiers.py --config bench/configs/llama-3.1-8b.json

Users take turns: each adds to its conversation and waits for an answer, and by the time it is back, the others have
used up the KV cache. A few are served at a time. First the copies are checked, at the model's sizes, and timed. Then
conversations that take four times the KV memory are served without and with tiers; then some that fit, where tiers
must cost nothing. Weights are random, so tokens mean nothing; prompts and lengths are the same in all runs.
"""

import argparse
import gc
import json
import random
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from gpu import defaults, random_model, settings

RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30


@dataclass(frozen=True)
class Served:
    seconds: float
    requests: int
    first_tokens: list[float]
    """Seconds to the first token, of turns after a conversation's first."""
    computed: int
    cached: int
    prompts: int
    fetched: int
    stored: int
    fetch_seconds: float

    @property
    def told(self) -> str:
        ordered = sorted(self.first_tokens)
        return (
            f"{self.seconds:7.2f} s, {self.requests / self.seconds:6.2f} requests/s, TTFT p50 "
            f"{1e3 * median(ordered):7.1f} ms p95 {1e3 * ordered[int(0.95 * len(ordered))]:7.1f} ms, "
            f"{self.cached / self.prompts:4.0%} of prompt tokens cached, {self.computed} computed, pages stored "
            f"{self.stored} and fetched {self.fetched} in {self.fetch_seconds:.2f} s"
        )


def serve(core, conversations: int, options: argparse.Namespace) -> Served:  # type: ignore[no-untyped-def]
    """Every conversation has its turn, then every one its next."""
    from ostro.engine.request import Request
    from ostro.sampling_params import SamplingParams

    draw = random.Random(1)
    said = [draw.choices(range(1000, 30_000), k=options.first) for _ in range(conversations)]
    line = deque((turn, who) for turn in range(options.turns) for who in range(conversations))
    params = SamplingParams(max_tokens=options.output, temperature=0, ignore_eos=True)
    active: dict[int, tuple[int, int, float]] = {}
    firsts: list[float] = []
    before = replace(core.scheduler.counters)
    next_id, began = 0, time.perf_counter()
    while line or active:
        while line and len(active) < options.active:
            turn, who = line.popleft()
            core.add(Request(id=next_id, prompt_ids=tuple(said[who]), params=params, seed=0))
            active[next_id] = turn, who, time.perf_counter()
            next_id += 1
        for gain in core.step():
            turn, who, asked = active[gain.request_id]
            if asked and gain.token_ids:
                if turn:
                    firsts.append(time.perf_counter() - asked)
                active[gain.request_id] = turn, who, 0.0
            said[who] += gain.token_ids
            if gain.finish_reason is not None:
                del active[gain.request_id]
                said[who] += draw.choices(range(1000, 30_000), k=options.further)
    seconds, after = time.perf_counter() - began, core.scheduler.counters
    return Served(
        seconds=seconds,
        requests=next_id,
        first_tokens=firsts,
        computed=after.computed_tokens - before.computed_tokens,
        cached=after.cache_hits - before.cache_hits,
        prompts=after.cache_queries - before.cache_queries,
        fetched=after.fetched_pages - before.fetched_pages,
        stored=after.stored_pages - before.stored_pages,
        fetch_seconds=after.fetch_seconds - before.fetch_seconds,
    )


def check_copies(store, memory) -> None:  # type: ignore[no-untyped-def]
    """Stores pages, overwrites them on the stream of steps, fetches them elsewhere; then compares and times."""
    import torch

    from ostro.engine.page_store import Fetch, Store

    count = min(256, store.num_slots, (memory.shape[2] - 1) // 2)
    numbers = memory.view(torch.uint8)
    for page in range(count):
        numbers[:, :, page].random_(0, 256)
    kept = numbers[:, :, :count].clone()
    torch.cuda.synchronize()
    began = time.perf_counter()
    store.carry_out([Store(page, count - 1 - page) for page in range(count)])
    numbers[:, :, :count] = 0
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    out = time.perf_counter() - began
    store.carry_out([Fetch(1, tuple(range(count)), tuple(range(count, 2 * count)))])
    while not (arrived := store.arrivals(timeout=1.0)):
        pass
    assert arrived[0].num_good == count
    assert torch.equal(numbers[:, :, count : 2 * count].flip(2), kept), "pages came back changed"
    moved = count * store.page_bytes / 1e9
    print(
        f"copies: {count} pages of {store.page_bytes / 1e6:.1f} MB are right; out {moved / out:.1f} GB/s (queued in "
        f"{1e3 * queued:.1f} ms), in {moved / arrived[0].seconds:.1f} GB/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a config.json that names the shape")
    parser.add_argument("--kv-memory", type=float, default=12.0, help="GiB")
    parser.add_argument("--times", type=float, default=4.0, help="how often the KV memory the conversations would fill")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first", type=int, default=8000, help="tokens of a conversation's first prompt")
    parser.add_argument("--further", type=int, default=500, help="tokens that each further turn adds")
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--active", type=int, default=6, help="requests at a time")
    parser.add_argument("--only", choices=("more", "fits"), help="conversations that need more memory, or that fit")
    parser.add_argument("--runs", type=int, default=3, help="of those that fit, with and without tiers in turn")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    from ostro.backends.loading import make_runner
    from ostro.engine.core import EngineCore
    from ostro.engine.tiers import Tiers

    last = options.first + (options.turns - 1) * (options.further + options.output) + options.output
    config = json.loads(options.config.read_text(encoding="utf-8"))
    shared = defaults(max_batch_tokens=8192, max_seq_len=last)
    runner = make_runner(
        random_model(config, shared), replace(settings(shared), kv_memory=int(options.kv_memory * GIB), serving=True)
    )
    gc.collect()
    gc.freeze()
    spec, memory = runner.spec, runner.part.attention.pages.memory  # type: ignore[attr-defined]
    room = spec.num_pages * spec.page_size
    many, few = round(options.times * room / last), max(1, int(0.9 * room / last))
    page_bytes = memory[:, :, 0].nbytes
    # Everything that does not fit, and what is in both.
    num_slots = 512 if options.only == "fits" else int(1.1 * many * (last // spec.page_size + 1))
    began = time.perf_counter()
    store = runner.host_store(num_slots)  # type: ignore[attr-defined]
    print(
        f"{spec.num_pages} pages of {spec.page_size} tokens ({room} tokens); {many} conversations of up to {last} "
        f"tokens are {many * last / room:.1f} times as much, {few} fit; {store.num_slots * page_bytes / GIB:.1f} GiB "
        f"of host memory, pinned in {time.perf_counter() - began:.1f} s",
        flush=True,
    )
    check_copies(store, memory)

    def engine(*, tiers: bool) -> EngineCore:
        return EngineCore(runner, tiers=Tiers(store) if tiers else None)

    found: dict[str, list[Served]] = {}

    def measure(name: str, count: int) -> None:
        for tiers in ("without", "with"):
            served = serve(engine(tiers=tiers == "with"), count, options)
            found.setdefault(f"{name}, {tiers}", []).append(served)
            print(f"{name + ', ' + tiers:18} {served.told}", flush=True)

    # Kernels are compiled and graphs captured.
    serve(engine(tiers=False), few, options)
    if options.only != "fits":
        measure("more", many)
        [without], [with_] = found["more, without"], found["more, with"]
        print(
            f"throughput {without.seconds / with_.seconds:.2f} times, p50 TTFT "
            f"{median(with_.first_tokens) / median(without.first_tokens):.0%} of without",
            flush=True,
        )
    if options.only != "more":
        for _ in range(options.runs):
            measure("fits", few)
        least, without_least = (min(each.seconds for each in found[f"fits, {name}"]) for name in ("with", "without"))
        print(f"where they fit {least / without_least - 1:+.1%} time, least of {options.runs}")
    if options.save:
        rows = {name: [asdict(each) for each in runs] for name, runs in found.items()}
        (RESULTS / "gpu_tiers.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
