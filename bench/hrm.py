"""HRM on a CPU: continuous batching against one by one, a rate of requests held for a minute, memory over runs.

    python bench/hrm.py                         # all three, on a random brain of AI-OS's dialect

The brain is generated: hidden 256, 2 + 2 layers, 2/2 cycles, 8 heads, a vocabulary of 4096, dense. Requests have
prompts of 4 to 12 tokens and 8 tokens of output, unless told otherwise. The rate is held by `ostro serve`, to which
requests come evenly over HTTP; the rest is measured in process.
"""

import argparse
import asyncio
import json
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from hrm_brain import write_brain
from live_server import live_server
from model_directory import write_model

from ostro.backends.torch.recompute import RecomputeRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits
from ostro.sampling_params import SamplingParams
from ostro.torch_models.hrm import HrmConfig, load_hrm
from ostro.weights.hrm_checkpoint import open_hrm

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Held:
    rate: float
    seconds: float
    finished: int
    p50: float
    p99: float


def requests(count: int, shortest: int, longest: int, output: int) -> list[Request]:
    dice = random.Random(0)
    params = SamplingParams(max_tokens=output, temperature=0.7, ignore_eos=True)
    return [
        Request(
            id=id,
            prompt_ids=tuple(dice.randrange(VOCABULARY) for _ in range(dice.randint(shortest, longest))),
            params=params,
            seed=id,
        )
        for id in range(count)
    ]


def core_of(runner: RecomputeRunner, seats: int) -> EngineCore:
    return EngineCore(runner, Limits(max_batch_tokens=runner.spec.max_batch_tokens, max_batch_seqs=seats))


def finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def batching(runner: RecomputeRunner, works: list[Request], seats: int, repeats: int) -> tuple[float, float]:
    """Seconds of all together, and of one after the other; medians, the two taken in turn."""
    together: list[float] = []
    alone: list[float] = []
    for _ in range(repeats):
        for times, width in ((together, seats), (alone, 1)):
            core = core_of(runner, width)
            start = time.perf_counter()
            for work in works:
                core.add(work)
            finish(core)
            times.append(time.perf_counter() - start)
    return statistics.median(together), statistics.median(alone)


async def held(url: str, works: list[Request], rate: float) -> Held:
    """Sends the requests evenly at the rate, over HTTP, and waits for all answers."""
    latencies: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client:

        async def ask(work: Request) -> None:
            body = {"prompts": [work.prompt_ids], "max_tokens": work.params.max_tokens, "seed": work.seed}
            start = time.perf_counter()
            response = await client.post("/generate", json=body)
            response.raise_for_status()
            latencies.append(time.perf_counter() - start)

        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, work in enumerate(works):
                await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
                group.create_task(ask(work))
        took = time.perf_counter() - begin
    latencies.sort()
    return Held(
        rate=len(latencies) / took,
        seconds=took,
        finished=len(latencies),
        p50=latencies[len(latencies) // 2],
        p99=latencies[int(0.99 * (len(latencies) - 1))],
    )


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--shortest", type=int, default=4)
    parser.add_argument("--longest", type=int, default=12)
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--seats", type=int, default=8)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", type=Path, help=f"such as {RESULTS.name}/hrm.json")
    args = parser.parse_args()

    def works(count: int) -> list[Request]:
        return requests(count, args.shortest, args.longest, args.output)

    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        inner = -(-round(4 * args.hidden * 2 / 3) // 256) * 256
        brain = write_brain(home / "brain", vocab=VOCABULARY, hidden=args.hidden, heads=8, inner=inner, moe=args.moe)
        checkpoint = open_hrm(brain)
        model = load_hrm(HrmConfig.read(checkpoint.config), checkpoint.tensors(), torch.float32)
        options = ("--model-path", str(brain), "--tokenizer-path", str(write_model(home / "tok")))
        with live_server(home, *options, "--max-batch-size", str(args.seats), faults="") as live:
            held_up = asyncio.run(held(live.url, works(int(args.rate * args.seconds)), args.rate))
    runner = RecomputeRunner(model)

    batching(runner, works(8), args.seats, 1)  # warm up
    together, alone = batching(runner, works(args.seats), args.seats, args.repeats)
    print(f"{args.seats} requests: {together:.3f} s together, {alone:.3f} s one by one: {alone / together:.2f} times")
    print(
        f"{held_up.finished} requests in {held_up.seconds:.1f} s, {held_up.rate:.1f} a second asked for {args.rate:g}; "
        f"latency p50 {held_up.p50:.3f} s, p99 {held_up.p99:.3f} s"
    )
    memory = []
    for _ in range(5):
        core = core_of(runner, 16)
        for work in works(16):
            core.add(work)
        finish(core)
        memory.append(resident_mib())
    print("memory after each of 5 batches of 16: " + ", ".join(f"{each:.0f}" for each in memory) + " MiB")
    if args.save is not None:
        record = {
            "hidden": args.hidden,
            "experts": args.moe,
            "prompt_tokens": [args.shortest, args.longest],
            "output_tokens": args.output,
            "seats": args.seats,
            "together_seconds": together,
            "one_by_one_seconds": alone,
            "ratio": alone / together,
            "held": asdict(held_up),
            "memory_mib": memory,
            "threads": torch.get_num_threads(),
            "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        }
        args.save.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
