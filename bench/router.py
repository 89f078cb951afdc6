"""What a choice of the router costs, and what it remembers, by the number of replicas.

    python bench/router.py                # a minute
    python bench/router.py --no-save

Every choice has a prompt of its own: a conversation of 40 blocks over one of a few system prompts, or one as long as
prompts are told apart. Replicas report after each round, as they would now and then.
"""

import argparse
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ostro.routing.key import MOST_BLOCKS, Key, levels_of
from ostro.routing.prefix_index import MOST_PREFIXES
from ostro.routing.router import Report, Router

RESULTS = Path(__file__).parent / "results"
REPLICAS = (1, 100, 10_000)
ROUNDS, CHOICES = 10, 1000
SYSTEMS, SHORT = 16, 40
BAR_MICROSECONDS = 50.0


@dataclass(frozen=True, slots=True)
class Cost:
    replicas: int
    blocks: int
    median_microseconds: float
    """Of the rounds' means, in CPU time: what else runs on the machine does not count."""
    megabytes: float
    """All that the router remembers, once it forgets the oldest prefixes for new ones."""


def keys(dice: random.Random, count: int, num_blocks: int) -> Iterator[Key]:
    """Half of each prompt is one of the system prompts."""
    systems = [tuple(dice.randbytes(8) for _ in range(num_blocks // 2)) for _ in range(SYSTEMS)]
    for _ in range(count):
        start = dice.choice(systems)
        rest = tuple(dice.randbytes(8) for _ in range(num_blocks - len(start)))
        yield Key("model", start + rest, num_blocks)


def measure(num_replicas: int, num_blocks: int) -> Cost:
    dice, names = random.Random(7), [f"replica-{n}" for n in range(num_replicas)]
    router = Router(now=time.monotonic, dice=random.Random(8))
    report = Report(models=frozenset({"model"}), num_models=1)
    for name in names:
        router.report(name, report)
    rounds = []
    for _ in range(ROUNDS):
        prompts = list(keys(dice, CHOICES, num_blocks))
        began = time.process_time()
        for key in prompts:
            router.choose(key)
        rounds.append((time.process_time() - began) / CHOICES)
        for name in names:
            router.finished(name, CHOICES)
            router.report(name, report)
    return Cost(num_replicas, num_blocks, statistics.median(rounds) * 1e6, memory(num_replicas, num_blocks))


def memory(num_replicas: int, num_blocks: int) -> float:
    tracemalloc.start()
    router = Router(now=time.monotonic, dice=random.Random(8))
    for n in range(num_replicas):
        router.report(f"replica-{n}", Report(models=frozenset({"model"}), num_models=1))
    num_choices = 2 * MOST_PREFIXES // len(levels_of(num_blocks))
    for key in keys(random.Random(7), num_choices, num_blocks):
        router.choose(key)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args(arguments)
    costs = [measure(count, blocks) for blocks in (SHORT, MOST_BLOCKS) for count in REPLICAS]
    for cost in costs:
        print(json.dumps(asdict(cost)), flush=True)
    worst = max(cost.median_microseconds for cost in costs)
    print(f"a choice: {worst:.1f} µs at most (bar {BAR_MICROSECONDS:g})")
    if not options.no_save:
        text = json.dumps({"costs": [asdict(cost) for cost in costs], "bar_microseconds": BAR_MICROSECONDS}, indent=2)
        (RESULTS / "router.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
