"""`ostro bench` and another load tool by turns on one Ostro server: do they see the same?

    python3 -m venv /tmp/guidellm && /tmp/guidellm/bin/pip install guidellm==0.8.1
    python bench/outside.py --guidellm /tmp/guidellm/bin/guidellm

Both read the same file of prompts and output lengths and ask them as streamed chats, in a closed loop. The server keeps
no prefixes, so that neither profits from the other. guidellm needs no tokenizer here, and no network: prompts are
given, and each answer's length is fixed (`ignore_eos`).
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ostro.measure.bench.workload import WORDS
from serving import serving

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Seen:
    """By the tool's own account."""

    succeeded: int
    ttft_p50_seconds: float
    output_tokens_per_second: float
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class Row:
    concurrency: int
    requests: int
    ours: list[Seen]
    theirs: list[Seen]
    ttft_ratio: float
    throughput_ratio: float


def write_prompts(path: Path, number: int, words: int, output: tuple[int, int]) -> None:
    """In the names that both tools know."""
    dice = random.Random(0)
    rows = [
        {"prompt": " ".join(dice.choices(WORDS, k=words)), "output_tokens_count": dice.randint(*output)}
        for _ in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def by_ostro(url: str, prompts: Path, concurrency: int, requests: int) -> Seen:
    output = prompts.with_name("ostro.json")
    command = [sys.executable, "-m", "ostro", "bench", "--url", url, "--prompts", str(prompts), "--ignore-eos"]
    command += ["--concurrency", str(concurrency), "--requests", str(requests), "--output-file", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [level] = json.loads(output.read_text(encoding="utf-8"))["levels"]
    figures = level["figures"]
    return Seen(
        figures["succeeded"],
        figures["ttft"]["p50"],
        figures["output_tokens_per_second"],
        figures["requests_per_second"],
    )


def by_guidellm(tool: Path, url: str, prompts: Path, concurrency: int, requests: int) -> Seen:
    output = prompts.with_name("guidellm.json")
    backend = {"kind": "openai_http", "target": url}
    command = [str(tool), "run", "--backend", json.dumps(backend), "--disable-console"]
    command += ["--profile", f"kind=concurrent,streams={concurrency}"]
    command += ["--constraint", f"kind=max_requests,count={requests}"]
    command += ["--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={output}"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
    [run] = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    metrics = run["metrics"]
    return Seen(
        metrics["request_totals"]["successful"],
        metrics["time_to_first_token_ms"]["successful"]["median"] / 1e3,
        metrics["output_tokens_per_second"]["successful"]["mean"],
        metrics["requests_per_second"]["successful"]["mean"],
    )


def measure(tool: Path, url: str, prompts: Path, concurrency: int, requests: int, rounds: int) -> Row:
    ours, theirs = [], []
    for number in range(rounds):
        # By turns, and each first in every other round: a drift of the machine favours neither.
        for who in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
            if who == "ours":
                ours.append(by_ostro(url, prompts, concurrency, requests))
            else:
                theirs.append(by_guidellm(tool, url, prompts, concurrency, requests))
            seen = (ours if who == "ours" else theirs)[-1]
            assert seen.succeeded == requests, (who, seen)
            print(f"concurrency {concurrency}, round {number + 1}, {who}: {seen}", flush=True)

    def ratio(name: str) -> float:
        mine, other = (statistics.median(getattr(seen, name) for seen in side) for side in (ours, theirs))
        return float(mine / other)

    ttft, throughput = ratio("ttft_p50_seconds"), ratio("output_tokens_per_second")
    return Row(concurrency, requests, ours, theirs, ttft, throughput)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, required=True, metavar="PROGRAM")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=48, help="of each run, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=128, help="of each prompt")
    parser.add_argument("--output", type=int, nargs=2, default=[16, 48], help="tokens of each answer, least and most")
    parser.add_argument("--fake", type=float, metavar="S", help="no model: an engine whose steps take S seconds")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()

    env = {} if args.fake is None else {"OSTRO_FAULTS": f"fake,step_seconds={args.fake}"}
    with tempfile.TemporaryDirectory() as name, serving("--no-prefix-caching", env=env) as server:
        prompts = Path(name) / "prompts.jsonl"
        write_prompts(prompts, args.requests, args.words, tuple(args.output))
        url = f"http://{server.host}:{server.port}"
        rows = [
            measure(args.guidellm, url, prompts, concurrency, args.requests, args.rounds)
            for concurrency in args.concurrency
        ]
    print(f"{'concurrency':>11} {'TTFT p50, ours/theirs':>22} {'tokens/s, ours/theirs':>22}")
    for row in rows:
        print(f"{row.concurrency:>11} {row.ttft_ratio:>22.3f} {row.throughput_ratio:>22.3f}")
    if not args.no_save:
        version = subprocess.run([str(args.guidellm), "--version"], check=True, capture_output=True, text=True).stdout
        record = {
            "tool": version.strip().splitlines()[-1],
            "model": "the default model" if args.fake is None else f"none, {args.fake} s a step",
            "words": args.words,
            "output_tokens": args.output,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "rows": [asdict(row) for row in rows],
        }
        (RESULTS / "outside.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
