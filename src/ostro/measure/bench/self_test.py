"""Measures the load generator's own overhead, with a server that timestamps every event."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import msgspec

from ostro.measure.bench.figures import Spread
from ostro.measure.bench.jobs import Level
from ostro.measure.bench.load_workers import LoadWorkers
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.workload import Item, Span, Workload

_SECONDS = 1.0
_TTFT = 0.02
_LEAST_TOKENS, _MOST_TOKENS = 8, 200


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds."""

    concurrency: int
    pace: float
    """Time between a stream's events."""
    events_per_second: float
    added_ttft: Spread | None
    """Time to first token, minus the time from the request's arrival at the server to its first event."""
    added_itl: Spread | None
    """Absolute error of the gaps."""
    cpu_share: float
    """CPU use of the busiest load process, as a share of one core."""


def self_test(workers: LoadWorkers, outcomes: Sequence[Outcome]) -> SelfTest | None:
    """Repeats the outcomes' concurrency and pace against a null server. None if no outcome can be repeated.

    An interrupt propagates as KeyboardInterrupt: half a test says nothing.
    """
    good = [each for each in outcomes if each.error is None]
    if not good:
        return None
    gaps = Spread.of(gap for each in good for gap in each.gaps)
    seconds = max(each.start + each.e2e for each in good) - min(each.start for each in good)
    concurrency = max(round(sum(each.e2e for each in good) / seconds), 1) if seconds else 1
    # Single-event answers have no gaps: use their duration as the time per event.
    pace = sum(each.e2e for each in good) / len(good) if gaps is None else gaps.mean
    # A slower pace would only make the test take longer.
    pace = min(max(pace, 1e-4), _SECONDS / _LEAST_TOKENS)
    tokens = min(round(_SECONDS / pace), _MOST_TOKENS)
    level = Level(kind="concurrency", value=concurrency, number=0, requests=2 * concurrency, warmup=concurrency)
    workload = Workload(output_len=Span(tokens, tokens), items=[Item(prompt="Hello")], model="null")
    with null_server(ttft=_TTFT, itl=pace) as url:
        found, whole = workers.run(level, workload, url=url, headers={}, timeout=60.0, progress=lambda _: None)
    if not whole:
        raise KeyboardInterrupt
    streams = [each for share in found for each in share.outcomes if each.error is None]
    if not streams:
        return None
    seconds = max(each.start + each.e2e for each in streams)
    return SelfTest(
        concurrency=concurrency,
        pace=pace,
        events_per_second=sum(len(each.arrivals) for each in streams) / seconds,
        added_ttft=Spread.of(each.arrivals[0] - (each.stamps[0] - each.received) for each in streams),
        added_itl=Spread.of(off for each in streams for off in _off(each)),
        cpu_share=max(share.burden.cpu_share for share in found),
    )


@contextmanager
def null_server(*, ttft: float, itl: float) -> Iterator[str]:
    """The URL of a null server in a subprocess."""
    command = [sys.executable, "-m", "ostro.measure.bench.null_server", "--ttft", f"{ttft:.6f}", "--itl", f"{itl:.6f}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def _off(stream: Outcome) -> Iterator[float]:
    delays = [seen - written for seen, written in zip(stream.arrivals, stream.stamps, strict=True)]
    return (abs(later - earlier) for earlier, later in pairwise(delays))
