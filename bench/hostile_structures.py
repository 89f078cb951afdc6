"""How long hostile structures take to be answered over HTTP, and what they do to others.

    python bench/hostile_structures.py                # the default model, on a warm cache
    python bench/hostile_structures.py --no-save

Each of the structures of tests/hostile/test_grammars.py is asked for alone, three tokens of it: the time until it is
refused or served; any other answer ends the run. And a trivial structure is asked for, alone and behind twenty hostile
ones that were sent before it, while /healthz is probed. Without API keys: each key prepares one request at a time.
"""

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

for _place in ("tests/hostile", "tests/support"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _place))

from test_grammars import BOMBS  # noqa: E402

from serving import Server, serving  # noqa: E402

RESULTS = Path(__file__).parent / "results"
BAR_SECONDS = 2.0
NUM_HOSTILE = 20
# One for all: each would parse all public certificates, and hold up the threads that measure.
CLIENT = httpx.Client(timeout=300, limits=httpx.Limits(max_connections=None))


def ask(server: Server, structure: dict[str, Any], *, expected: tuple[int, ...] = (200, 400)) -> tuple[int, float]:
    """The status, and the seconds until it was known."""
    body = {"prompt": "Answer:", "max_tokens": 3, "structured_outputs": vllm_spelling(structure)}
    began = time.perf_counter()
    status = CLIENT.post(f"http://{server.host}:{server.port}/v1/completions", json=body).status_code
    seconds = time.perf_counter() - began
    if status not in expected:
        raise RuntimeError(f"status {status} after {seconds:.1f} s for {str(structure)[:80]}")
    return status, seconds


def ask_trivial(server: Server, *choices: str) -> float:
    return ask(server, {"choice": choices}, expected=(200,))[1]


def vllm_spelling(structure: dict[str, Any]) -> dict[str, Any]:
    if "json_schema" in structure:
        return {"json": json.loads(structure["json_schema"])}
    return structure


def alone(server: Server) -> dict[str, Any]:
    found = {}
    for name, structure in BOMBS.items():
        status, seconds = ask(server, structure)
        found[name] = {"status": status, "seconds": round(seconds, 3)}
        print(f"{seconds:7.3f} s  {status}  {name}", flush=True)
    return found


def beside_hostile(server: Server) -> dict[str, Any]:
    probes: list[float] = []
    over = threading.Event()

    def probe() -> None:
        while not over.wait(0.02):
            began = time.perf_counter()
            CLIENT.get(f"http://{server.host}:{server.port}/healthz").raise_for_status()
            probes.append(time.perf_counter() - began)

    prober = threading.Thread(target=probe)
    with ThreadPoolExecutor(NUM_HOSTILE) as attackers:
        prober.start()
        sent = [attackers.submit(ask, server, fresh_bomb(number)) for number in range(NUM_HOSTILE)]
        time.sleep(0.2)
        try:
            trivial = ask_trivial(server, "left", "right")
            slowest = max(each.result()[1] for each in sent)
        finally:
            over.set()
            prober.join()
    return {
        "trivial_seconds": round(trivial, 3),
        "slowest_hostile_seconds": round(slowest, 3),
        "healthz_p99_seconds": round(statistics.quantiles(probes, n=100)[98], 3),
    }


def fresh_bomb(number: int) -> dict[str, Any]:
    """Takes the checker to its limits. Nobody has asked for it before: outcomes are remembered."""
    return {"regex": "(a|b|ab)*" * (4_999 - number)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    with serving() as server:
        # The first one starts the processes that check.
        ask_trivial(server, "yes", "no")
        quiet = ask_trivial(server, "up", "down")
        record: dict[str, Any] = {
            "cpu": platform.machine(),
            "bar_seconds": BAR_SECONDS,
            "trivial_alone_seconds": round(quiet, 3),
            "beside_hostile": beside_hostile(server),
            "alone": alone(server),
        }
    slow = [name for name, each in record["alone"].items() if each["seconds"] > BAR_SECONDS]
    print(
        json.dumps({**record, "alone": f"{len(BOMBS)} structures, {len(slow)} over {BAR_SECONDS} s: {slow}"}, indent=1)
    )
    if not args.no_save:
        (RESULTS / "hostile_structures.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
