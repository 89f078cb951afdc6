"""How much of the offline engine's speed is left over HTTP, on the default model, in one run.

    python bench/http_vs_offline.py               # 1, 8 and 32 streams, 128 tokens in, 128 out, medians of 3

The offline engine and the server run on all cores, one at a time; the runs alternate, so that a busy moment of the
machine hits both. Prompts are random token ids, new ones for each run, so that the prefix cache helps neither. Clients
run in a process of their own, on the same cores, and stream.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ostro import LLM, SamplingParams
from serving import Server, serving

RESULTS = Path(__file__).parent / "results"
CLIENTS_PROGRAM = Path(__file__).with_name("stream_clients.py")


@dataclass(frozen=True, slots=True)
class Row:
    streams: int
    offline_seconds: list[float]
    http_seconds: list[float]
    offline_tokens_per_second: float
    http_tokens_per_second: float
    ratio: float


def offline(llm: LLM, prompts: list[list[int]], out: int) -> float:
    params = SamplingParams(max_tokens=out, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def over_http(server: Server, prompts: list[list[int]], out: int) -> float:
    shared = {"max_tokens": out, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [{"prompt": prompt, **shared} for prompt in prompts]
    job = {"host": server.host, "port": server.port, "clients": len(prompts), "requests": 1, "bodies": bodies}
    ran = subprocess.run(
        [sys.executable, str(CLIENTS_PROGRAM)], input=json.dumps(job), text=True, check=True, capture_output=True
    )
    found = json.loads(ran.stdout)
    assert found["streams"] == len(prompts), found
    return float(found["seconds"])


def measure(llm: LLM, server: Server, dice: random.Random, streams: int, length: int, out: int, repeats: int) -> Row:
    vocab_size = llm.core.runner.spec.vocab_size

    def prompts() -> list[list[int]]:
        return [[dice.randrange(vocab_size) for _ in range(length)] for _ in range(streams)]

    offline_seconds, http_seconds = [], []
    for _ in range(repeats):
        offline_seconds.append(offline(llm, prompts(), out))
        http_seconds.append(over_http(server, prompts(), out))
    best, over = statistics.median(offline_seconds), statistics.median(http_seconds)
    total = streams * out
    return Row(streams, offline_seconds, http_seconds, total / best, total / over, best / over)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()

    dice = random.Random(0)
    rows = []
    llm = LLM()
    with serving() as server:
        print(f"{'streams':>7} {'offline tok/s':>14} {'HTTP tok/s':>11} {'ratio':>6}")
        for streams in args.streams:
            measure(llm, server, dice, streams, args.input, 8, 1)  # warm up
            row = measure(llm, server, dice, streams, args.input, args.output, args.repeats)
            rows.append(row)
            print(
                f"{row.streams:>7} {row.offline_tokens_per_second:>14.1f} {row.http_tokens_per_second:>11.1f} "
                f"{row.ratio:>6.3f}"
            )
    if not args.no_save:
        record = {
            "model": llm.name,
            "input_tokens": args.input,
            "output_tokens": args.output,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "rows": [asdict(row) for row in rows],
        }
        (RESULTS / "http_vs_offline.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
