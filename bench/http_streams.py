"""What the server itself costs: tokens streamed over HTTP when the model costs nothing (the fake runner).

    python bench/http_streams.py                  # 64 clients; the API process on one core, all else on another
    python bench/http_streams.py --no-save --clients 8 --pace 0.005
    python bench/http_streams.py --against ../before/.venv/bin/python     # by turns with another checkout

Two settings, each in runs of equal work: `flat out`, where the engine is as fast as it can be and the server merges
what its clients have not been sent yet; and `paced`, where each step of the engine takes a while, as a model would, so
that nearly every token travels as an event of its own. The clients run in a process of their own. Each stream is
`--tokens` long whatever the tokens are.

With `--against`, both servers are up at once and get short bursts by turns, which a busy moment of the machine hits
alike: the median of the bursts' ratios is steady where figures of one server vary by a fifth.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from serving import Server, cpu_seconds, serving

RESULTS = Path(__file__).parent / "results"
CLIENTS_PROGRAM = Path(__file__).with_name("stream_clients.py")


@dataclass(frozen=True, slots=True)
class Run:
    tokens_per_second: float
    events_per_token: float
    """Below one where a client got several tokens in one event."""
    first_event_seconds: float
    api_microseconds_per_token: float
    engine_microseconds_per_token: float
    client_microseconds_per_token: float


def measure(server: Server, clients: int, requests: int, tokens: int) -> Run:
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    job = {"host": server.host, "port": server.port, "clients": clients, "requests": requests, "bodies": [body]}
    before = cpu_seconds(server.pid), cpu_seconds(server.engine_pid)
    ran = subprocess.run([sys.executable, str(CLIENTS_PROGRAM), json.dumps(job)], check=True, capture_output=True)
    after = cpu_seconds(server.pid), cpu_seconds(server.engine_pid)
    found = json.loads(ran.stdout)
    total = clients * requests * tokens
    assert found["streams"] == clients * requests, found
    return Run(
        tokens_per_second=total / found["seconds"],
        events_per_token=found["events"] / total,
        first_event_seconds=found["first_event_seconds"],
        api_microseconds_per_token=(after[0] - before[0]) / total * 1e6,
        engine_microseconds_per_token=(after[1] - before[1]) / total * 1e6,
        client_microseconds_per_token=found["cpu_seconds"] / total * 1e6,
    )


def pin(server: Server) -> None:
    """The API process alone on one core, the engine and (by inheritance) the clients on another."""
    first, *others = sorted(os.sched_getaffinity(0))
    if others:
        _pin_threads(server.pid, {first})
        _pin_threads(server.engine_pid, {others[0]})
        os.sched_setaffinity(0, {others[0]})


def _pin_threads(pid: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)


def compare(before: str, pace: float, clients: int, bursts: int) -> dict[str, float]:
    """Median ratios of this checkout over the other: throughput, and the API process's CPU time for a token."""
    env = {"OSTRO_FAULTS": f"fake,step_seconds={pace}"}
    with serving(env=env, python=before) as old, serving(env=env) as new:
        for server in (old, new):
            pin(server)
            measure(server, clients, 1, 64)  # warm up
        pairs = []
        for number in range(bursts):
            first, second = (old, new) if number % 2 else (new, old)
            ran = {server: measure(server, clients, 1, 128) for server in (first, second)}
            pairs.append((ran[old], ran[new]))
    return {
        "tokens_per_second": statistics.median(b.tokens_per_second / a.tokens_per_second for a, b in pairs),
        "api_microseconds_per_token": statistics.median(
            b.api_microseconds_per_token / a.api_microseconds_per_token for a, b in pairs
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8, help="of each client")
    parser.add_argument("--tokens", type=int, default=256, help="of each request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.004, help="seconds that a step of the paced engine sleeps")
    parser.add_argument("--against", metavar="PYTHON", help="another checkout's interpreter; saves nothing")
    parser.add_argument("--bursts", type=int, default=24, help="of each server, with --against")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()

    cores = os.sched_getaffinity(0)
    if args.against is not None:
        for name, pace in (("flat out", 0.0), ("paced", args.pace)):
            os.sched_setaffinity(0, cores)
            found = compare(args.against, pace, args.clients, args.bursts)
            ratios = ", ".join(f"{field} {ratio:.3f} of the other's" for field, ratio in found.items())
            print(f"{name}: {ratios}", flush=True)
        return
    record: dict[str, object] = {
        "clients": args.clients,
        "tokens_per_stream": args.tokens,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    for name, pace in (("flat out", 0.0), ("paced", args.pace)):
        os.sched_setaffinity(0, cores)
        with serving(env={"OSTRO_FAULTS": f"fake,step_seconds={pace}"}) as server:
            pin(server)
            measure(server, args.clients, 1, args.tokens)  # warm up
            runs = [measure(server, args.clients, args.requests, args.tokens) for _ in range(args.repeats)]
        for run in runs:
            print(f"{name}: " + ", ".join(f"{field} {value:.4g}" for field, value in asdict(run).items()))
        median = statistics.median(run.tokens_per_second for run in runs)
        print(f"{name}: median {median:.0f} tokens/s to {args.clients} clients")
        record[name] = {
            "step_seconds": pace,
            "median_tokens_per_second": median,
            "runs": [asdict(run) for run in runs],
        }
    if not args.no_save:
        (RESULTS / "http_fake.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
