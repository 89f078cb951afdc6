"""Structured outputs here and in llama.cpp's server, on the same file, schemas and prompts, over HTTP, in one run.

    bench/build_llama_cpp.sh build/llama.cpp                        # needs llama-server alone
    python bench/constrained_peer.py build/llama.cpp/bin            # 1, 8 and 32 streams, medians of 3

Each server has all cores while it is asked, and they are asked in turn. Each client asks for one call of a tool, whose
signature its answer must follow. Seeds differ from run to run, so that no cache of prompts and no habit helps either.
Speed is of all tokens that the servers counted, from the first request sent to the last answer read.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from constrained import TOOLS, call_schema
from cpu_peers.llama_cpp import LlamaCpp
from cpu_peers.servers import Served, free_port, running
from ostro.system.machine import num_cpus
from ostro.weights import open_checkpoint

ASKED = "Call the tool {} with arguments of your own for request number {}. Answer with JSON only."
MAX_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Run:
    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def body(number: int, seed: int, **more: object) -> dict[str, object]:
    name = list(TOOLS)[number % len(TOOLS)]
    schema = {"name": name, "strict": True, "schema": call_schema(name)}
    return {
        "messages": [{"role": "user", "content": ASKED.format(name, seed)}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": seed,
        **more,
    }


def measure(served: Served, streams: int, seed: int, **more: object) -> Run:
    def ask(number: int) -> int:
        answer = served.ask("/v1/chat/completions", body(number, seed + number, **more))
        [choice] = answer["choices"]
        if choice["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])
        return int(answer["usage"]["completion_tokens"])

    with ThreadPoolExecutor(streams) as clients:
        began = time.perf_counter()
        tokens = sum(clients.map(ask, range(streams)))
        return Run(tokens, time.perf_counter() - began)


def compare(model: Path, llama: LlamaCpp, streams: int, repeats: int) -> dict[str, float]:
    """Tokens a second."""
    ours_port, their_port = free_port(), free_port()
    command = [sys.executable, "-m", "ostro", "serve", str(model), "--port", str(ours_port)]
    their_command = llama.server(model, their_port, slots=streams, slot_tokens=1024)
    with running(command, ours_port) as ours, running(their_command, their_port) as theirs:
        sides: dict[str, Callable[[int], Run]] = {
            "theirs": lambda seed: measure(theirs, streams, seed),
            "ours": lambda seed: measure(ours, streams, seed),
            "jump": lambda seed: measure(ours, streams, seed, jump_forward=True),
        }
        for served in (ours, theirs):
            served.first_token()
        for side in sides.values():
            side(0)
        turns = [{name: side(1000 * (1 + turn)) for name, side in sides.items()} for turn in range(repeats)]
    return {name: statistics.median(turn[name].speed for turn in turns) for name in sides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where llama-server is")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    model = open_checkpoint(None).path
    llama = LlamaCpp(args.directory, threads=num_cpus())
    print(f"{'streams':>7} {'llama-server':>13} {'ostro':>9} {'ratio':>6} {'jump-forward':>13} {'ratio':>6}   tokens/s")
    for streams in args.streams:
        speeds = compare(model, llama, streams, args.repeats)
        ratios = {name: speed / speeds["theirs"] for name, speed in speeds.items()}
        print(
            f"{streams:>7} {speeds['theirs']:>13.1f} {speeds['ours']:>9.1f} {ratios['ours']:>6.2f} "
            f"{speeds['jump']:>13.1f} {ratios['jump']:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
