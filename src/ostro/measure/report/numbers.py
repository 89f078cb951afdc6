"""Ranks of measured values. Pure functions."""

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest ranks of ordered values, in proportion."""
    at = (len(ordered) - 1) * share
    below, above = ordered[math.floor(at)], ordered[math.ceil(at)]
    # Not (1 - x) * below + x * above: that may leave the interval by a rounding.
    return min(below + (above - below) * (at - math.floor(at)), above)
