"""The random numbers of sampling: a pure function of (seed, choice, position) and an index. Keeps no state.

Each position of each choice owns a SplitMix64 stream, and any number of it can be had without those before it. Nothing
is drawn in sequence, so a token does not depend on which requests ran beside it, on preemption, or on a restart: the
same position of the same request always gets the same numbers, to the same random bits on every device.
"""

import torch
from torch import Tensor

from ostro.runner.random_key import (
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

    Never zero and never infinite. `keys` are int64, as `stream_key` gives them.
    """
    index = torch.arange(1, count + 1, device=keys.device)
    words = _mix_tensor(keys.unsqueeze(-1) + index * signed(GOLDEN))
    # 52 bits and a half are exact in float64, where 53 and a half could round to a uniform number of 1.
    uniform = _shifted(words, 12).double().add_(0.5).mul_(2.0**-52)
    # The race is won by small numbers: taken from the small uniforms they keep all their digits.
    return uniform.neg_().log1p_().neg_()


def _mix_tensor(words: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products keep their low 64 bits."""
    words = (words ^ _shifted(words, SHIFT_1)) * signed(FACTOR_1)
    words = (words ^ _shifted(words, SHIFT_2)) * signed(FACTOR_2)
    return words ^ _shifted(words, SHIFT_3)


def _shifted(words: Tensor, bits: int) -> Tensor:
    # Shifting a negative int64 brings in ones; SplitMix64 wants zeros.
    return (words >> bits) & (WORD >> bits)
