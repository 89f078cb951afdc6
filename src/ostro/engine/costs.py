"""What steps and fetches cost, learned from measured times. Knows no clock, no device and no sequences."""

from bisect import bisect_left
from typing import NamedTuple

# Upper bounds of the buckets of row counts that are averaged together.
_LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 1 << 30)
_PACE_WEIGHT = 0.2
# Weight of a step in the shape. Low, because consecutive steps with the same number of rows say more about the pace.
_SHAPE_WEIGHT = 0.15
_REPEATED_WEIGHT = 0.02
# Weight of the first step with a number of rows: it may have been disturbed, or have had something to set up.
_FIRST_WEIGHT = 0.5
# A step that takes longer than this many times the estimate was disturbed: it is capped there.
_MOST_SURPRISE = 2.0
# Cost of a further row relative to a step with one row, until more is known.
_ASSUMED_SLOPE = 0.25
# Steps after which what was seen is forgotten, so that what once looked expensive is tried again.
_MEMORY = 500


class _Seen(NamedTuple):
    """Averages over the steps in one bucket of row counts."""

    rows: float
    cost: float
    """Cost in units of pace."""
    latest: int
    """The number of the latest such step."""


class StepCosts:
    """What a step costs by its number of rows.

    Only ratios between numbers of rows matter. A step also takes longer as contexts grow, or while other processes use
    the machine, whatever its rows. So the estimate has two factors, of which the first adapts sooner:

        seconds = pace × shape[rows]
    """

    def __init__(self) -> None:
        self._pace = 0.0
        # Keyed by index in _LIMITS, in order.
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
        """The cost of a step, in arbitrary units: interpolated between the row counts seen so far, and extrapolated
        beyond the largest on the line through the smallest and the largest.
        """
        points = list(self._seen.values())
        if not points:
            return _assumed(rows)
        first, last = points[0], points[-1]
        if rows <= first.rows:
            return first.cost * _assumed(rows) / _assumed(first.rows)
        if rows > last.rows:
            # Between row counts that are close together, the slope would be mostly noise.
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


# Weight that earlier observations keep after each new one.
_DECAY = 0.9
# After this many refusals in a row a fetch is tried anyway, because a slow tier may have become fast again.
_REFUSALS = 32


class _Rate:
    """A decaying average of amounts by seconds."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        self._amount = _DECAY * self._amount + amount
        self._seconds = _DECAY * self._seconds + seconds

    def seconds(self, amount: float) -> float | None:
        """How long this amount would take; None if nothing is known."""
        return self._seconds / self._amount * amount if self._amount else None


class _Tier:
    def __init__(self) -> None:
        self.fetches = _Rate()
        self.refused = 0
        """Fetches refused in a row."""


class FetchCosts:
    """Whether fetching pages from a lower tier is quicker than computing them again, learned tier by tier."""

    def __init__(self) -> None:
        self._host, self._disk, self._prompts = _Tier(), _Tier(), _Rate()

    def note_fetch(self, pages: int, seconds: float, *, disk: bool) -> None:
        """`disk` tells whether the pages came from disk rather than host memory."""
        if pages:
            (self._disk if disk else self._host).fetches.note(pages, seconds)

    def note_prompt(self, tokens: int, seconds: float) -> None:
        """Learns from a step that computed prompts."""
        self._prompts.note(tokens, seconds)

    def pays(self, pages: int, tokens: int, *, disk: bool, is_turn: bool = True) -> bool:
        """Whether to fetch these pages rather than compute the tokens in them. `is_turn` if they would otherwise be
        computed now: only then does a refusal count, not when looking ahead.
        """
        tier = self._disk if disk else self._host
        fetching, computing = tier.fetches.seconds(pages), self._prompts.seconds(tokens)
        if fetching is None or computing is None or fetching < computing:
            tier.refused = 0
            return True
        if not is_turn:
            return False
        tier.refused = (tier.refused + 1) % (_REFUSALS + 1)
        return not tier.refused
