"""What a choice and a report cost the router, and what it remembers, by the number of replicas.

    python bench/router.py                # two minutes
    python bench/router.py --no-save

Every choice has a prompt of 40 blocks, or one as long as prompts are told apart, which begins with one of a few texts
that were seen before: half of it, all of it or nothing. Every replica reports after each round, as it would now and
then: all the prefixes that a report has room for, of which those of a few prompts are new.
"""

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ostro.routing.key import DIGEST_BYTES, MOST_BLOCKS, Key, levels_of
from ostro.routing.prefix_index import MOST_PREFIXES
from ostro.routing.report import MOST_HELD, Latest, Report
from ostro.routing.router import Router

RESULTS = Path(__file__).parent / "results"
REPLICAS = (1, 100, 1_000, 10_000)
ROUNDS, CHOICES = 10, 1000
NEW_PROMPTS = 4
TEXTS, SHORT = 16, 40
# Blocks of a prompt, and which share of them was seen before.
PROMPTS = ((SHORT, 0.5), (MOST_BLOCKS, 0.0), (MOST_BLOCKS, 0.5), (MOST_BLOCKS, 1.0))
BAR_MICROSECONDS = 50.0


@dataclass(frozen=True, slots=True)
class Cost:
    replicas: int
    blocks: int
    share_known: float
    median_microseconds: float
    """Median of the rounds' means, in CPU time, so that other load on the machine does not count."""
    report_microseconds: float
    """The same of a report."""
    repeated_report_microseconds: float
    """The mean of reports in which nothing is new."""
    first_report_microseconds: float
    """The mean of the replicas' first reports, of which less is read the more replicas there are."""
    megabytes: float
    """The most that the router took for all that it remembers, while it forgot old prefixes for new ones: those of
    short prompts, which take more, as fewer of them share what is stored.
    """


def keys(dice: random.Random, count: int, num_blocks: int, share_known: float) -> Iterator[Key]:
    num_known = int(num_blocks * share_known)
    texts = [tuple(dice.randbytes(DIGEST_BYTES) for _ in range(num_known)) for _ in range(TEXTS)]
    for _ in range(count):
        rest = tuple(dice.randbytes(DIGEST_BYTES) for _ in range(num_blocks - num_known))
        yield Key("model", dice.choice(texts) + rest, num_blocks)


def measure(num_replicas: int, num_blocks: int, share_known: float) -> Cost:
    dice, names = random.Random(7), [f"replica-{n}" for n in range(num_replicas)]
    router = Router(now=time.monotonic, dice=random.Random(8))
    for name in names:
        router.add(name)
    hot = [Latest.of([dice.randbytes(DIGEST_BYTES * MOST_HELD)], MOST_HELD) for _ in names]
    first, rounds, reports = report_all(router, names, hot), [], []
    num_new = NEW_PROMPTS * len(levels_of(num_blocks))
    for _ in range(ROUNDS):
        prompts = list(keys(dice, CHOICES, num_blocks, share_known))
        # Half a million digests of prompts would be walked through in the middle of the round.
        gc.collect()
        began = time.process_time()
        for key in prompts:
            router.choose(key)
        rounds.append((time.process_time() - began) / CHOICES)
        for name in names:
            router.finished(name, CHOICES)
        hot = [used(dice, latest, num_new) for latest in hot]
        reports.append(report_all(router, names, hot))
    return Cost(
        num_replicas,
        num_blocks,
        share_known,
        statistics.median(rounds) * 1e6,
        statistics.median(reports) * 1e6,
        report_all(router, names, hot) * 1e6,
        first * 1e6,
        memory(num_replicas),
    )


def used(dice: random.Random, latest: Latest, num_new: int) -> Latest:
    """A report's prefixes after `num_new` others have been used."""
    digests = latest.digests + dice.randbytes(DIGEST_BYTES * num_new)
    return Latest(digests[-DIGEST_BYTES * MOST_HELD :], latest.num_ever + num_new)


def report_all(router: Router, names: Sequence[str], hot: Sequence[Latest]) -> float:
    """CPU seconds a report, with the conversion that one goes through in a cluster."""
    told = [Report(models=frozenset({"model"}), num_models=1, held=latest).to_builtins() for latest in hot]
    began = time.process_time()
    for name, each in zip(names, told, strict=True):
        router.report(name, Report.from_builtins(each))
    return (time.process_time() - began) / len(names)


@cache
def memory(num_replicas: int) -> float:
    tracemalloc.start()
    router = Router(now=time.monotonic, dice=random.Random(8))
    for n in range(num_replicas):
        router.report(f"replica-{n}", Report(models=frozenset({"model"}), num_models=1))
    num_choices = 2 * MOST_PREFIXES // len(levels_of(SHORT))
    for key in keys(random.Random(7), num_choices, SHORT, share_known=0.0):
        router.choose(key)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args(arguments)
    costs = [measure(count, blocks, share) for blocks, share in PROMPTS for count in REPLICAS]
    for cost in costs:
        print(json.dumps(asdict(cost)), flush=True)
    worst = max(cost.median_microseconds for cost in costs)
    print(f"a choice: {worst:.1f} µs on average, at most (bar {BAR_MICROSECONDS:g})")
    print(f"a report: {max(cost.report_microseconds for cost in costs):.1f} µs on average, at most")
    print(f"memory: {max(cost.megabytes for cost in costs):.1f} MB at most")
    if not options.no_save:
        text = json.dumps({"costs": [asdict(cost) for cost in costs], "bar_microseconds": BAR_MICROSECONDS}, indent=2)
        (RESULTS / "router.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
