"""Random numbers for sampling: a pure function of (seed, choice, position) and an index. Keeps no state.

Each position of each choice has its own SplitMix64 stream, with random access. Nothing is drawn in sequence, so a token
does not depend on which requests ran beside it, on preemption, or on a restart: the same position of the same request
always gets the same random bits, on every device.
"""

import torch
from torch import Tensor

from ostro.backends.sampling.random_key import (
    FACTOR_1,
    FACTOR_2,
    GOLDEN,
    SHIFT_1,
    SHIFT_2,
    SHIFT_3,
    WORD,
    signed,
    stream_key,
)

__all__ = ["exponentials", "stream_key"]


def exponentials(keys: Tensor, count: int) -> Tensor:
    """[keys, count] in float64: the first `count` numbers of each stream, exponentially distributed with mean 1.

    Never zero or infinite. `keys` are int64 values from `stream_key`.
    """
    index = torch.arange(1, count + 1, device=keys.device)
    words = _mix_tensor(keys.unsqueeze(-1) + index * signed(GOLDEN))
    # 52 bits plus a half are exact in float64; 53 plus a half could round up to 1.
    uniform = _shifted(words, 12).double().add_(0.5).mul_(2.0**-52)
    # Small numbers win the race; derived from small uniforms, they keep full precision.
    return uniform.neg_().log1p_().neg_()


def _mix_tensor(words: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, where products wrap to their low 64 bits."""
    words = (words ^ _shifted(words, SHIFT_1)) * signed(FACTOR_1)
    words = (words ^ _shifted(words, SHIFT_2)) * signed(FACTOR_2)
    return words ^ _shifted(words, SHIFT_3)


def _shifted(words: Tensor, bits: int) -> Tensor:
    # Right-shifting a negative int64 shifts in ones; SplitMix64 needs zeros.
    return (words >> bits) & (WORD >> bits)
