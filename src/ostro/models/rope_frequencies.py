"""Rotation frequencies for a model's rope settings, in numpy.

Intermediate results are rounded to float32 exactly where the original training code does: any difference in rounding
would grow with position.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.models.config import ConfigReader
from ostro.models.rope_settings import RopeSettings

Floats = npt.NDArray[np.float32]
_ONE = np.float32(1)


class RopeFrequencies(NamedTuple):
    frequencies: Floats
    """Radians per position, for each pair of dimensions."""
    attention_factor: float
    """Multiplies cosines and sines."""


def rope_frequencies(settings: RopeSettings, *, head_dim: int, max_seq_len: int) -> RopeFrequencies:
    """`max_seq_len` is the context length to serve. Scalings that depend on length are fixed from it once and for
    all, so that a token's keys never depend on the other tokens in its batch.
    """
    rotary_dim = settings.rotary_dim(head_dim)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    # The power is taken in float64 and rounded once: float32 powers differ in the last digit between libraries.
    periods = (np.float64(np.float32(settings.theta)) ** exponents.astype(np.float64)).astype(np.float32)
    return _SCALINGS[settings.kind](periods, settings, max_seq_len)


# Scalings map unscaled periods (positions per radian), settings and context length to frequencies (radians per
# position) and a factor on cosines and sines.


def _default(periods: Floats, settings: RopeSettings, max_seq_len: int) -> RopeFrequencies:
    # "dynamic" only scales beyond max_position_embeddings, and no longer context is served.
    return RopeFrequencies(_ONE / periods, 1.0)


def _linear(periods: Floats, settings: RopeSettings, max_seq_len: int) -> RopeFrequencies:
    return RopeFrequencies(_ONE / periods / np.float32(settings.table.number("factor")), 1.0)


def _proportional(periods: Floats, settings: RopeSettings, max_seq_len: int) -> RopeFrequencies:
    """The first pairs of a head turn as if all of them did, and the others not at all."""
    frequencies = _ONE / periods / np.float32(settings.table.number("factor", 1.0))
    frequencies[settings.turning_dim(2 * len(periods)) // 2 :] = 0
    return RopeFrequencies(frequencies, 1.0)


def _llama3(periods: Floats, settings: RopeSettings, max_seq_len: int) -> RopeFrequencies:
    """Slows slow rotations further, keeps fast ones, and blends those in between, if any."""
    table, frequencies = settings.table, _ONE / periods
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    turns = np.float32(settings.original_positions) / (np.float32(2 * math.pi) / frequencies)
    factor = np.float32(table.number("factor"))
    if low == high:
        return RopeFrequencies(np.where(turns < np.float32(low), frequencies / factor, frequencies), 1.0)
    keep = ((turns - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    slowed = (_ONE - keep) * frequencies / factor
    return RopeFrequencies(slowed + keep * frequencies, 1.0)


def _yarn(periods: Floats, settings: RopeSettings, max_seq_len: int) -> RopeFrequencies:
    """Blends like llama3, but linearly in the dimension, between two numbers of turns in the original context."""
    table, half = settings.table, len(periods)
    factor = table.number("factor", settings.max_positions / settings.original_positions)

    def dimension_turning(turns: float) -> float:
        return half * math.log(settings.original_positions / (turns * 2 * math.pi)) / math.log(settings.theta)

    low, high = dimension_turning(table.number("beta_fast", 32.0)), dimension_turning(table.number("beta_slow", 1.0))
    if table.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    span = high - low or 0.001
    keep = _ONE - ((np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(span)).clip(0, 1)
    blended = _ONE / (np.float32(factor) * periods) * (_ONE - keep) + _ONE / periods * keep
    return RopeFrequencies(blended, _yarn_attention_factor(table, factor))


def _yarn_attention_factor(table: ConfigReader, factor: float) -> float:
    given, weight, weight_all = (table.optional_number(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return given

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    return growth(weight) / growth(weight_all) if weight and weight_all else growth(1.0)


def _longrope(periods: Floats, settings: RopeSettings, max_seq_len: int) -> RopeFrequencies:
    """A factor per period, with one set for the original context and one for longer contexts."""
    table, original = settings.table, settings.original_positions
    key = "long_factor" if max_seq_len > original else "short_factor"
    factors = np.array(table.numbers(key), np.float32)
    stretch = table.number("factor", settings.max_positions / original)
    attention = table.optional_number("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(max(stretch, 1.0)) / math.log(original))
    return RopeFrequencies(_ONE / (factors * periods), attention)


_SCALINGS: Mapping[str, Callable[[Floats, RopeSettings, int], RopeFrequencies]] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
