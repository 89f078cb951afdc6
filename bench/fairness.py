"""What a hostile API key can do to a polite one: the time to its first token, alone and beside each attack.

    python bench/fairness.py                      # the default model
    python bench/fairness.py --no-save --requests 5

The attacks: a flood of long answers, the same from a client that reads nothing, one request of 2,048 prompts, long
prompts one after the other, and texts that take seconds to tokenise. The polite key sends one short request at a time.
Its median beside an attack is to stay within three times that of an idle server.
"""

import argparse
import json
import platform
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from serving import Server, serving

RESULTS = Path(__file__).parent / "results"
HOSTILE, POLITE = "sk-hostile", "sk-polite"
BAR = 3.0
_SETTLE_SECONDS = 3.0
_WORDS = "a short walk through the old town on a cold morning "
_POLITE: Mapping[str, object] = {"max_tokens": 8, "temperature": 0, "stream": True}
_LONG: Mapping[str, object] = {"max_tokens": 2000, "ignore_eos": True, "stream": True}

# Attack: connections, the body that each sends again and again, and whether it reads the answers.
ATTACKS: Mapping[str, tuple[int, Mapping[str, object], bool]] = {
    "flood": (200, {**_LONG, "prompt": _WORDS}, True),
    "slow reads": (200, {**_LONG, "prompt": _WORDS, "logprobs": 5}, False),
    "many prompts": (2, {**_LONG, "prompt": [f"{number} {_WORDS}" for number in range(2048)]}, True),
    "long prompts": (8, {"max_tokens": 1, "prompt": _WORDS * 600, "stream": True}, True),
    "long texts": (12, {"max_tokens": 1, "prompt": _WORDS * 20_000, "truncate_prompt_tokens": 4, "stream": True}, True),
}


def send(server: Server, key: str, body: Mapping[str, object]) -> socket.socket:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((server.host, server.port), timeout=300)
    connection.sendall(head.encode() + data)
    return connection


def first_token_seconds(server: Server, number: int) -> float:
    """Time to first token of a request by the polite key, with a unique prompt."""
    began = time.perf_counter()
    with send(server, POLITE, {**_POLITE, "prompt": f"{number} {_WORDS * 8}"}) as connection:
        answer = b""
        while b"data: {" not in answer:
            piece = connection.recv(1 << 16)
            if not piece:
                raise RuntimeError(f"the polite key was refused: {answer[:300]!r}")
            answer += piece
        seconds = time.perf_counter() - began
        while connection.recv(1 << 16):
            pass
    return seconds


@contextmanager
def attack(server: Server, name: str) -> Iterator[None]:
    """Runs the attack's clients while the block runs."""
    clients, body, reads = ATTACKS[name]
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            with send(server, HOSTILE, body) as connection:
                connection.settimeout(0.2)
                while not over.is_set():
                    try:
                        if not reads and connection.recv(1, socket.MSG_PEEK):
                            over.wait(0.2)
                        elif not connection.recv(1 << 20):
                            break
                    except TimeoutError:
                        continue
            # A refusal is no reason to stop, only to let others compute too.
            over.wait(0.05)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(_SETTLE_SECONDS)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def measure(requests: int) -> dict[str, object]:
    keys = {"OSTRO_API_KEY": f"{HOSTILE},{POLITE}"}
    with serving(env=keys) as server:
        first_token_seconds(server, -1)
        idle = [first_token_seconds(server, number) for number in range(requests)]
        print(f"idle          {statistics.median(idle):.3f} s")
        attacks = {}
        for place, name in enumerate(ATTACKS, start=1):
            with attack(server, name):
                beside = [first_token_seconds(server, place * 10_000 + number) for number in range(requests)]
            ratio = statistics.median(beside) / statistics.median(idle)
            attacks[name] = {"median": statistics.median(beside), "worst": max(beside), "times_idle": ratio}
            print(f"{name:<13} {statistics.median(beside):.3f} s, {ratio:.1f} times idle, {max(beside):.3f} s at worst")
            # What the attack left behind is aborted by then.
            time.sleep(_SETTLE_SECONDS)
    return {"machine": platform.machine(), "idle_median": statistics.median(idle), "attacks": attacks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=15, help="of the polite key, alone and beside each attack")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    result = measure(args.requests)
    if not args.no_save:
        (RESULTS / "fairness.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    attacks = result["attacks"]
    assert isinstance(attacks, dict)
    return int(any(each["times_idle"] > BAR for each in attacks.values()))


if __name__ == "__main__":
    sys.exit(main())
