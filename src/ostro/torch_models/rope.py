"""Rotary position embeddings: the cosines and sines that a model's rope settings give for positions.

Frequencies are computed in float32 by the formulas models were trained with: a rounding that differs would grow with
position.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ostro.models.config import ConfigReader
from ostro.models.rope_settings import RopeSettings
from ostro.torch_models.base import Module


class Rotary(Module):
    """Cosines and sines for positions.

    `max_seq_len` is the context that will be served: scalings that switch by length are settled by it once, so that a
    token's keys never depend on which other tokens ran beside it.
    """

    def __init__(self, settings: RopeSettings, *, head_dim: int, max_seq_len: int) -> None:
        super().__init__()
        rotary_dim = settings.rotary_dim(head_dim)
        # On the CPU wherever the model goes: a device's own powers may differ in the last digit.
        with torch.device("cpu"):
            periods = settings.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
            frequencies, self.attention_factor = _SCALINGS[settings.kind](periods, settings, max_seq_len)
        # The first half turns backwards: its cosines are the same, and its sines have the sign that rotating needs.
        self.register_buffer("frequencies", torch.cat((-frequencies, frequencies)), persistent=False)
        self.frequencies: Tensor

    def forward(self, positions: Tensor, dtype: torch.dtype) -> "Rotation":
        angles = positions.to(torch.float32)[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return Rotation(cos=cos.to(dtype), signed_sin=sin.to(dtype))


@dataclass(frozen=True, slots=True)
class Rotation:
    """One step's cosines and sines, [tokens, 1, rotary_dim]."""

    cos: Tensor
    signed_sin: Tensor
    """Negative in the first half, which makes rotating one multiply, one roll and one fused add."""

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotates the leading rotary_dim of [tokens, heads, head_dim]; the rest of a head passes through."""
        width = self.cos.shape[-1]
        if width == heads.shape[-1]:
            return self._rotate(heads)
        return torch.cat((self._rotate(heads[..., :width]), heads[..., width:]), -1)

    def _rotate(self, x: Tensor) -> Tensor:
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.signed_sin)


# Scalings: unscaled periods (positions per radian), settings and served context -> frequencies (radians per position),
# and a factor on cosines and sines.


def _default(periods: Tensor, settings: RopeSettings, max_seq_len: int) -> tuple[Tensor, float]:
    # "dynamic" scales only beyond max_position_embeddings, and no context beyond it is served.
    return 1.0 / periods, 1.0


def _linear(periods: Tensor, settings: RopeSettings, max_seq_len: int) -> tuple[Tensor, float]:
    return 1.0 / periods / settings.table.number("factor"), 1.0


def _llama3(periods: Tensor, settings: RopeSettings, max_seq_len: int) -> tuple[Tensor, float]:
    """Slow rotations are slowed further, fast ones kept, and those between are blended."""
    table, frequencies = settings.table, 1.0 / periods
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    turns = settings.original_positions / (2 * math.pi / frequencies)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / table.number("factor") + keep * frequencies, 1.0


def _yarn(periods: Tensor, settings: RopeSettings, max_seq_len: int) -> tuple[Tensor, float]:
    """Blends as llama3 does, but linearly in the dimension, between two numbers of turns in the original context."""
    table, half = settings.table, len(periods)
    factor = table.number("factor", settings.max_positions / settings.original_positions)

    def dimension_turning(turns: float) -> float:
        return half * math.log(settings.original_positions / (turns * 2 * math.pi)) / math.log(settings.theta)

    low, high = dimension_turning(table.number("beta_fast", 32.0)), dimension_turning(table.number("beta_slow", 1.0))
    if table.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    span = high - low or 0.001
    keep = 1 - ((torch.arange(half, dtype=torch.float32) - low) / span).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep, _yarn_attention_factor(table, factor)


def _yarn_attention_factor(table: ConfigReader, factor: float) -> float:
    given, weight, weight_all = (table.optional_number(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return given

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    return growth(weight) / growth(weight_all) if weight and weight_all else growth(1.0)


def _longrope(periods: Tensor, settings: RopeSettings, max_seq_len: int) -> tuple[Tensor, float]:
    """A factor for each period, of which there is one set for the original context and one for longer contexts."""
    table, original = settings.table, settings.original_positions
    key = "long_factor" if max_seq_len > original else "short_factor"
    factors = table.numbers(key)
    stretch = table.number("factor", settings.max_positions / original)
    attention = table.optional_number("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(max(stretch, 1.0)) / math.log(original))
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods), attention


_SCALINGS: Mapping[str, Callable[[Tensor, RopeSettings, int], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
