"""Detects that an output is stuck in a loop. Knows token ids only.

A loop is a pattern of at most 64 tokens with which an output ends at least 4 times in a row, over at least 96 tokens.

    output    a b c | x y z  x y z  x y z  x y z …      period 3
    run                     └ x y z  x y z  x y z …     tokens at the end that equal the token one period earlier

A loop of period p is a run of at least max(3 p, 96 - p) tokens, which is never less than 72. So it is enough to look
for periods at every 32nd token, which finds all that have run for 32 tokens, and to follow those token by token: a loop
is detected at the token that completes it, and other outputs cost next to nothing.
"""

from collections.abc import Iterator

MAX_PERIOD = 64
MIN_REPEATS = 4
MIN_TOKENS = 96

_STRIDE = 32
_LONG_ENOUGH = [max((MIN_REPEATS - 1) * period, MIN_TOKENS - period) for period in range(MAX_PERIOD + 1)]


class LoopWatch:
    """Loop detection for one output, which grows by one token at a time."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        # Period -> length of its run, for runs of at least _STRIDE tokens.
        self._runs: dict[int, int] = {}

    def take(self, token_ids: list[int], start: int, end: int, patience: int = 1) -> bool:
        """Whether the output, token_ids[start:end], ends in a loop. Must be called after each of its tokens, in order.

        A loop must be `patience` times as long as usual.
        """
        looping = bool(self._runs) and self._follow(token_ids, end - 1, patience)
        if not (end - start) % _STRIDE:
            self._look(token_ids, start, end)
        return looping

    def _follow(self, token_ids: list[int], last: int, patience: int) -> bool:
        token = token_ids[last]
        self._runs = {period: run + 1 for period, run in self._runs.items() if token_ids[last - period] == token}
        return any(run >= patience * _LONG_ENOUGH[period] for period, run in self._runs.items())

    def _look(self, token_ids: list[int], start: int, end: int) -> None:
        recent, runs = token_ids[end - _STRIDE : end], dict[int, int]()
        for period in _periods(token_ids, start, end):
            if token_ids[end - _STRIDE - period : end - period] != recent:
                continue
            # Skip a multiple of a shorter period whose run spans it: it breaks with that one, and is long enough later.
            if not any(period % shorter == 0 and period <= run + shorter for shorter, run in runs.items()):
                runs[period] = self._runs.get(period) or _run(token_ids, start, end, period)
        self._runs = runs


def _periods(token_ids: list[int], start: int, end: int) -> Iterator[int]:
    """Distances from the last token back to its earlier occurrences, nearest first, as long as a stride fits before."""
    farthest = max(end - 1 - MAX_PERIOD, start + _STRIDE - 1)
    before = token_ids[farthest : end - 1]
    before.reverse()
    at = -1
    for _ in range(before.count(token_ids[end - 1])):
        at = before.index(token_ids[end - 1], at + 1)
        yield at + 1


def _run(token_ids: list[int], start: int, end: int, period: int) -> int:
    at = end - 1
    while at - period >= start and token_ids[at] == token_ids[at - period]:
        at -= 1
    return end - 1 - at
