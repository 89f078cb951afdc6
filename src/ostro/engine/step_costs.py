"""What a step costs by its number of rows, learned from the steps that were run. Knows no device and no sequences.

Only ratios between numbers of rows matter. A step also takes longer as contexts grow, or while other processes use the
machine, whatever its rows. So the estimate has two factors, of which the first adapts sooner:

    seconds = pace × shape[rows]
"""

from bisect import bisect_left
from typing import NamedTuple

# Numbers of rows up to which steps are averaged together.
_LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 1 << 30)
_PACE_WEIGHT = 0.2
# How much a step counts for the shape: steps of the same rows in a row say more about the pace.
_SHAPE_WEIGHT = 0.15
_REPEATED_WEIGHT = 0.02
# And the first of its rows, against what was expected: it may have been disturbed, or have had something to set up.
_FIRST_WEIGHT = 0.5
# A step that takes longer than this many times the estimate was disturbed, and counts as much only.
_MOST_SURPRISE = 2.0
# What a further row costs of a step with one row, until more is known.
_ASSUMED_SLOPE = 0.25
# Steps after which what was seen is forgotten, so that what once looked expensive is tried again.
_MEMORY = 500


class _Seen(NamedTuple):
    """Averages of the steps with about as many rows."""

    rows: float
    cost: float
    """In units of pace."""
    latest: int
    """The number of the latest such step."""


class StepCosts:
    def __init__(self) -> None:
        self._pace = 0.0
        # By place in _LIMITS, in order.
        self._seen: dict[int, _Seen] = {}
        self._num_steps = 0
        self._place: int | None = None

    def note(self, rows: int, seconds: float) -> None:
        """Learns from a step."""
        self._num_steps += 1
        if not self._pace:
            self._pace = seconds / _assumed(rows)
        expected = self.of(rows)
        ratio = min(seconds / self._pace, _MOST_SURPRISE * expected) if self._pace else expected
        place = bisect_left(_LIMITS, rows)
        known = self._seen.get(place)
        if known is None:
            known, weight = _Seen(rows, expected, 0), _FIRST_WEIGHT
        else:
            weight = _REPEATED_WEIGHT if place == self._place else _SHAPE_WEIGHT
        self._place = place
        average = known.rows + weight * (rows - known.rows)
        cost = known.cost + weight * (ratio - known.cost)
        self._seen[place] = _Seen(average, cost, self._num_steps)
        self._seen = {
            each: self._seen[each] for each in sorted(self._seen) if self._seen[each].latest > self._num_steps - _MEMORY
        }
        self._pace *= 1.0 + _PACE_WEIGHT * (ratio / cost - 1.0)

    def of(self, rows: int) -> float:
        """The cost of a step, in arbitrary units: interpolated between numbers of rows that were seen, and beyond the
        most of them on the line from the fewest.
        """
        points = list(self._seen.values())
        if not points:
            return _assumed(rows)
        first, last = points[0], points[-1]
        if rows <= first.rows:
            return first.cost * _assumed(rows) / _assumed(first.rows)
        if rows > last.rows:
            # Between numbers that are close together, noise makes the slope.
            if last.rows < 2 * first.rows:
                return last.cost * _assumed(rows) / _assumed(last.rows)
            low, high = first, last
        else:
            at = sum(each.rows < rows for each in points)
            low, high = points[at - 1], points[at]
        slope = max(0.0, (high.cost - low.cost) / max(1.0, high.rows - low.rows))
        return high.cost + slope * (rows - high.rows)


def _assumed(rows: float) -> float:
    return 1.0 + _ASSUMED_SLOPE * (rows - 1.0)
