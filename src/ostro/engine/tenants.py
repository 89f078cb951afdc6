"""How tenants share a batch. Knows sequences and counts; knows neither page ids nor steps.

Every tenant with work has an equal claim to the batch's seats, its pages and a step's tokens, however many requests it
has queued. What one does not use is free for the others, so a single tenant gets everything.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Line
from heapq import heapify, heappop, heappush

from ostro.engine.sequence import Sequence


class Holdings:
    """How many seats and pages each tenant holds in the batch. A page that two sequences share counts for both."""

    def __init__(self, running: Iterable[Sequence]) -> None:
        self.seats: Counter[str] = Counter()
        self.pages: Counter[str] = Counter()
        for seq in running:
            self.seats[seq.request.tenant] += 1
            self.pages[seq.request.tenant] += len(seq.pages)

    def lose(self, seq: Sequence, num_pages: int) -> None:
        self.seats[seq.request.tenant] -= 1
        self.pages[seq.request.tenant] -= num_pages


def next_in_line(waiting: Line[Sequence], seats: Mapping[str, int], count: int) -> list[Sequence]:
    """The next `count` sequences to admit. Within a priority the tenant with the fewest seats comes first; rank decides
    among a tenant's own sequences, and between tenants with equally many seats.
    """
    lines: dict[str, list[Sequence]] = {}
    for seq in waiting:
        lines.setdefault(seq.request.tenant, []).append(seq)
    heads = [(line[0].request.priority, seats.get(each, 0), line[0].rank, 0, each) for each, line in lines.items()]
    heapify(heads)
    chosen: list[Sequence] = []
    while heads and len(chosen) < count:
        _, held, _, place, tenant = heappop(heads)
        line = lines[tenant]
        chosen.append(line[place])
        if place + 1 < len(line):
            following = line[place + 1]
            heappush(heads, (following.request.priority, held + 1, following.rank, place + 1, tenant))
    return chosen


def divide(budget: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Max-min fair split of the budget: small demands are met in full, and the rest is divided equally."""
    given: dict[str, int] = {}
    left = budget
    for place, (tenant, amount) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        given[tenant] = min(amount, max(1, left // (len(wanted) - place)))
        left = max(0, left - given[tenant])
    return given
