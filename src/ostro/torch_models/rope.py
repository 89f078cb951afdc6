"""Rotary position embeddings: cosines and sines of positions for a model's rope settings."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ostro.models.rope_frequencies import rope_frequencies
from ostro.models.rope_settings import RopeSettings
from ostro.torch_models.base import Module


class Rotary(Module):
    """Cosines and sines of positions, for the served context length."""

    def __init__(self, settings: RopeSettings, *, head_dim: int, max_seq_len: int) -> None:
        super().__init__()
        found = rope_frequencies(settings, head_dim=head_dim, max_seq_len=max_seq_len)
        self.attention_factor = found.attention_factor
        # Computed on the CPU wherever the model runs: a device's own powers may differ in the last digit.
        frequencies = torch.from_numpy(found.frequencies)
        # The first half is negated: its cosines are unchanged, and its sines get the sign that rotating needs.
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
