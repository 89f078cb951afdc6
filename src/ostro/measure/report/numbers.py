"""Percentiles. Pure functions."""

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks of sorted values."""
    at = (len(ordered) - 1) * share
    below, above = ordered[math.floor(at)], ordered[math.ceil(at)]
    # Not (1 - x) * below + x * above: rounding may take that outside the interval.
    return min(below + (above - below) * (at - math.floor(at)), above)
