"""Streams beside long prompts: how long they wait from token to token, with prompts computed by another server.

python bench/prefill_decode.py [--model REF] [--tokens 4000] [--streams 4] [--prompts 4] [--rounds 3]

A prefill and a decode server, each with a core of its own, on one machine. Streams run on the decode server, first
alone, then while prompts come that the prefill server computes and hands over. For comparison, the same on one server
with the decode server's core, which computes the prompts itself. Both must give the same tokens for the prompts.
Clients share the decode server's core: on the other they would be told of a token when the prompt leaves them some
time. Needs Linux with two cores that have nothing else to do.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from serving import Server, serving

RESULTS = Path(__file__).parent / "results"
# Streams settle, and their own prompts are computed, before anything is timed.
SETTLE_SECONDS = 2.0


class Streams:
    """Streams that restart whenever they end, and the times between their tokens while `timed`."""

    def __init__(self, server: Server, count: int) -> None:
        self._url = url_of(server)
        self.gaps: list[float] = []
        self._is_timed = self._is_over = False
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        time.sleep(SETTLE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    @contextmanager
    def timed(self) -> Iterator[list[float]]:
        self.gaps = []
        self._is_timed = True
        yield self.gaps
        self._is_timed = False

    def _run(self, number: int) -> None:
        while not self._is_over:
            body = {"prompt": f"Story number {number}:", "max_tokens": 400, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=600) as response:
                self._read(line for line in response.iter_lines() if line.startswith("data: {"))

    def _read(self, events: Iterator[str]) -> None:
        last: float | None = None
        for _ in events:
            now = time.perf_counter()
            if last is not None and self._is_timed:
                self.gaps.append(now - last)
            last = now
            if self._is_over:
                break


def url_of(server: Server) -> str:
    return f"http://{server.host}:{server.port}"


def prompts(count: int, num_tokens: int, first: int) -> list[list[int]]:
    return [
        [(17 * at + at * at + 101 * each) % 20_000 + 200 for at in range(num_tokens)]
        for each in range(first, first + count)
    ]


def complete(server: Server, prompt: list[int]) -> tuple[str, float, int]:
    """The text, seconds, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    began = time.perf_counter()
    response = httpx.post(f"{url_of(server)}/v1/completions", json=body, timeout=600)
    response.raise_for_status()
    answer = response.json()
    seconds = time.perf_counter() - began
    return answer["choices"][0]["text"], seconds, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def measure(server: Server, args: argparse.Namespace, first: int) -> dict[str, object]:
    with Streams(server, args.streams) as streams:
        with streams.timed() as alone:
            time.sleep(args.alone_seconds)
        with streams.timed() as beside:
            answers = [complete(server, prompt) for prompt in prompts(args.prompts, args.tokens, first)]
    return {
        "alone": distribution(alone),
        "beside": distribution(beside),
        "p99_ratio": quantile(beside, 0.99) / quantile(alone, 0.99),
        "prompt_seconds": statistics.median(seconds for _, seconds, _ in answers),
        "cached_tokens": [cached for *_, cached in answers],
        "texts": [text for text, *_ in answers],
    }


def distribution(gaps: list[float]) -> dict[str, float]:
    return {"count": len(gaps), **{f"p{round(100 * at)}_ms": 1e3 * quantile(gaps, at) for at in (0.5, 0.9, 0.99, 1.0)}}


def quantile(values: list[float], at: float) -> float:
    return sorted(values)[min(len(values) - 1, int(at * len(values)))]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Pins processes that are started within the block to this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone-seconds", type=float, default=15.0)
    parser.add_argument("--output", type=Path, default=RESULTS / "prefill_decode.json")
    args = parser.parse_args()
    first_core, second_core, *_ = sorted(os.sched_getaffinity(0))
    common = (*([] if args.model is None else [args.model]), "--threads", "1", "--device", "cpu")
    found: dict[str, list[dict[str, object]]] = {"apart": [], "one": []}
    for number in range(args.rounds):
        first = number * args.prompts
        with tempfile.TemporaryDirectory() as shared, ExitStack() as stack:
            sharing = (*common, "--kv-shared", shared)
            with on_core(first_core):
                prefill = stack.enter_context(serving(*sharing, "--role", "prefill"))
            with on_core(second_core):
                decode = stack.enter_context(serving(*sharing, "--role", "decode", "--prefill-url", url_of(prefill)))
            with on_core(second_core):
                found["apart"].append(measure(decode, args, first))
        with ExitStack() as stack:
            with on_core(second_core):
                one = stack.enter_context(serving(*common))
            with on_core(second_core):
                found["one"].append(measure(one, args, first))
        assert found["apart"][-1]["texts"] == found["one"][-1]["texts"], "prompts handed over gave other tokens"
        for name, runs in found.items():
            run = runs[-1]
            print(f"{name}: {run['p99_ratio']:.2f} x p99, {json.dumps({key: run[key] for key in ('alone', 'beside')})}")
            print(f"  a prompt of {args.tokens}: {run['prompt_seconds']:.2f} s, {run['cached_tokens']} cached")
    report = {
        "tokens": args.tokens,
        "streams": args.streams,
        "bar": 1.5,
        "p99_ratio": {name: statistics.median(run["p99_ratio"] for run in runs) for name, runs in found.items()},  # type: ignore[type-var]
        "rounds": found,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["p99_ratio"]))


if __name__ == "__main__":
    main()
