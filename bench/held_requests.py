"""What held requests cost the server and its other clients: memory against the ledger, and waits of a polite key.

    python bench/held_requests.py                  # 200 requests of each kind
    python bench/held_requests.py --no-save --requests 50 --kinds streams background

One key has the server hold requests of one kind (`holding.KINDS`): bodies that stall, streams, responses in the
background, stored, continued or replayed, requests that wait for a grammar or a model. Refused ones would not count:
then the benchmark fails. Meanwhile another key sends small requests, one at a time, and /healthz is asked. Each kind
has a server of its own, with the fake runner.

`memory` is the growth of the API process's anonymous memory over what /metrics says it holds (`ostro_held_bytes`), to
stay below 1.5; `polite` is the p99 of the other key's requests over that of a quiet server, to stay below 2; /healthz
is to stay below 50 ms at p99.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holding import COMPLETIONS, KINDS, SERVER, SMALL, Caller, Holder, anonymous_bytes
from serving import serving

RESULTS = Path(__file__).parent / "results"
HOSTILE, POLITE = "sk-hostile", "sk-polite"
BARS = {"memory": 1.5, "polite": 2.0, "healthz_p99_seconds": 0.05}
_TEXT = 300_000


@dataclass(frozen=True, slots=True)
class Figures:
    held: int
    grown_bytes: int
    """Growth of the API process's anonymous memory."""
    ledger_bytes: int
    memory: float
    quiet_p99_seconds: float
    polite_p99_seconds: float
    polite: float
    healthz_p99_seconds: float


def measure(name: str, requests: int, polite: int) -> Figures:
    kind, env = KINDS[name], {"OSTRO_API_KEY": f"{HOSTILE},{POLITE}", "OSTRO_FAULTS": SERVER.faults}
    with (
        serving(*SERVER.arguments, env=env) as server,
        Holder(server.host, server.port, server.pid, HOSTILE, size=_TEXT) as holder,
    ):
        other = Caller(server.host, server.port, POLITE)
        for _ in range(polite // 4):
            other.post(COMPLETIONS, SMALL)
        quiet = [timed(lambda: other.post(COMPLETIONS, SMALL)) for _ in range(polite)]
        holder.begin(kind)
        before, ledger = anonymous_bytes(server.pid), holder.ledger()
        holder.hold(kind, requests)
        grown, counted = anonymous_bytes(server.pid) - before, holder.ledger() - ledger
        beside = [timed(lambda: other.post(COMPLETIONS, SMALL)) for _ in range(polite)]
        probes = [timed(lambda: other.ask("GET", "/healthz")) for _ in range(polite)]
    return Figures(
        held=requests,
        grown_bytes=grown,
        ledger_bytes=counted,
        memory=grown / max(1, counted),
        quiet_p99_seconds=p99(quiet),
        polite_p99_seconds=p99(beside),
        polite=p99(beside) / p99(quiet),
        healthz_p99_seconds=p99(probes),
    )


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="held of each kind")
    parser.add_argument("--polite", type=int, default=200, help="requests of the other key, quiet and beside them")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    found = {}
    for kind in args.kinds:
        figures = found[kind] = measure(kind, args.requests, args.polite)
        print(
            f"{kind:<23} grew by {figures.grown_bytes / 2**20:6.1f} MiB, ledger {figures.ledger_bytes / 2**20:6.1f} "
            f"({figures.memory:.2f}); polite p99 {figures.polite_p99_seconds * 1e3:6.1f} ms "
            f"({figures.polite:.2f} × quiet); /healthz p99 {figures.healthz_p99_seconds * 1e3:5.1f} ms",
            flush=True,
        )
    if not args.no_save:
        result = {"machine": platform.machine(), "kinds": {kind: asdict(each) for kind, each in found.items()}}
        (RESULTS / "held_requests.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(any(getattr(each, name) > bar for each in found.values() for name, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
