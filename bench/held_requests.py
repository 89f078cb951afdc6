"""What held requests cost the server and its other clients: memory against the ledger, and waits of a polite key.

    python bench/held_requests.py                  # 200 requests of each kind
    python bench/held_requests.py --no-save --requests 50 --kinds streams background

One key holds as many requests as it may of one kind: bodies that stall, streams, responses in the background, stored
responses, requests whose grammar waits to be compiled, requests that wait for a model to be loaded. Meanwhile another
key sends small requests, one at a time, and /healthz is asked. Each kind has a server of its own, with the fake runner.

`memory` is the growth of the API process over what /metrics says it holds (`ostro_held_bytes`), to stay below 1.5;
`polite` is the p99 of the other key's requests over that of a quiet server, to stay below 2; /healthz is to stay below
50 ms at p99.
"""

import argparse
import json
import platform
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from ostro.weights import open_checkpoint
from serving import Server, resident_bytes, serving

RESULTS = Path(__file__).parent / "results"
HOSTILE, POLITE = "sk-hostile", "sk-polite"
BARS = {"memory": 1.5, "polite": 2.0, "healthz_p99_seconds": 0.05}
_TEXT = 300_000
_LOAD_SECONDS = 30.0
_SMALL: Mapping[str, object] = {"model": "a", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
_RESPONSE: Mapping[str, object] = {"model": "a", "input": "word " * 3000}
_LONG: Mapping[str, object] = {"model": "a", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, slots=True)
class Figures:
    held: int
    grown_bytes: int
    """Growth of the API process's resident memory."""
    ledger_bytes: int
    memory: float
    quiet_p99_seconds: float
    polite_p99_seconds: float
    polite: float
    healthz_p99_seconds: float


class Caller:
    """Sends requests of one key, each on a connection of its own."""

    def __init__(self, server: Server, key: str) -> None:
        self._server = server
        self._key = key

    def send(self, path: str, body: Mapping[str, object], *, share: float = 1.0) -> socket.socket:
        """Sends that share of the body."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        )
        connection = socket.create_connection((self._server.host, self._server.port), timeout=120)
        connection.sendall(head.encode() + data[: int(share * len(data))])
        return connection

    def ask(self, path: str, body: Mapping[str, object]) -> bytes:
        """The whole answer."""
        with self.send(path, body) as connection:
            return read(connection)

    def get(self, path: str) -> bytes:
        url = f"http://{self._server.host}:{self._server.port}{path}"
        asked = urllib.request.Request(url, headers={"authorization": f"Bearer {self._key}"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return bytes(answer.read())


def read(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


# --- kinds: each holds its request number `n`, and returns the connection if that stays open ------------------------


def stalled(caller: Caller, number: int) -> socket.socket | None:
    return caller.send("/v1/completions", {**_SMALL, "prompt": "u" * _TEXT}, share=0.9)


def stream(caller: Caller, number: int) -> socket.socket | None:
    return caller.send("/v1/completions", {**_LONG, "prompt": "word " * (_TEXT // 25), "truncate_prompt_tokens": 4})


def background(caller: Caller, number: int) -> socket.socket | None:
    caller.ask("/v1/responses", {**_RESPONSE, "background": True, "max_output_tokens": 4000})
    return None


def stored(caller: Caller, number: int) -> socket.socket | None:
    caller.ask("/v1/responses", {**_RESPONSE, "max_output_tokens": 1})
    return None


def for_grammar(caller: Caller, number: int) -> socket.socket | None:
    schema = {"enum": [f"{number} {place} {'x' * 90}" for place in range(500)]}
    form = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
    return caller.send("/v1/completions", {**_LONG, "response_format": form})


def for_model(caller: Caller, number: int) -> socket.socket | None:
    return caller.send("/v1/completions", {**_SMALL, "model": "b", "prompt": "u" * _TEXT})


KINDS: Mapping[str, Callable[[Caller, int], socket.socket | None]] = {
    "stalled bodies": stalled,
    "streams": stream,
    "background": background,
    "stored": stored,
    "for a grammar": for_grammar,
    "for a model": for_model,
}


def measure(kind: str, requests: int, polite: int) -> Figures:
    hold, model = KINDS[kind], open_checkpoint().path
    faults = f"fake,step_seconds=0.02,load_seconds={_LOAD_SECONDS if kind == 'for a model' else 0}"
    env = {"OSTRO_API_KEY": f"{HOSTILE},{POLITE}", "OSTRO_FAULTS": faults}
    with (
        serving("--model", f"a={model}", "--model", f"b={model}", "--pin", "a", env=env) as server,
        ExitStack() as open_,
    ):
        hostile, other = Caller(server, HOSTILE), Caller(server, POLITE)
        for number in range(polite // 4):
            # Warm: the first of each kind makes what is then kept.
            other.ask("/v1/completions", _SMALL)
            if number < 4 and kind != "for a model" and (early := hold(hostile, -1 - number)) is not None:
                early.close()
        time.sleep(1)
        quiet = [timed(lambda: other.ask("/v1/completions", _SMALL)) for _ in range(polite)]
        before, ledger = resident_bytes(server.pid), held_bytes(other)
        for number in range(requests):
            if (connection := hold(hostile, number)) is not None:
                open_.enter_context(connection)
        time.sleep(1)
        grown, counted = resident_bytes(server.pid) - before, held_bytes(other) - ledger
        beside = [timed(lambda: other.ask("/v1/completions", _SMALL)) for _ in range(polite)]
        probes = [timed(lambda: other.get("/healthz")) for _ in range(polite)]
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


def held_bytes(caller: Caller) -> int:
    lines = caller.get("/metrics").decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("ostro_held_bytes{"))


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
            f"{kind:<15} grew by {figures.grown_bytes / 2**20:6.1f} MiB, ledger {figures.ledger_bytes / 2**20:6.1f} "
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
