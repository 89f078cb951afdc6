"""The random numbers of sampling: a pure function of (seed, choice, position) and an index. Keeps no state.

Each position of each choice owns a SplitMix64 stream, and any number of it can be had without those before it. Nothing
is drawn in sequence, so a token does not depend on which requests ran beside it, on preemption, or on a restart: the
same position of the same request always gets the same numbers, to the same random bits on every device.
"""

import torch
from torch import Tensor

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
# SplitMix64's finaliser: shift and multiply twice, then shift.
_SHIFT_1, _FACTOR_1 = 30, 0xBF58476D1CE4E5B9
_SHIFT_2, _FACTOR_2 = 27, 0x94D049BB133111EB
_SHIFT_3 = 31


def stream_key(seed: int, choice: int, position: int) -> int:
    """Where the stream of one position begins: 64 bits, signed, as an int64 tensor holds them."""
    state = 0
    for word in (seed, choice, position):
        state = _mix(((state ^ (word & _WORD)) + _GOLDEN) & _WORD)
    return _signed(state)


def exponentials(keys: Tensor, count: int) -> Tensor:
    """[keys, count] in float64: the first `count` numbers of each stream, exponentially distributed with mean 1.

    Never zero and never infinite. `keys` are int64, as `stream_key` gives them.
    """
    index = torch.arange(1, count + 1, device=keys.device)
    words = _mix_tensor(keys.unsqueeze(-1) + index * _signed(_GOLDEN))
    # 52 bits and a half are exact in float64, where 53 and a half could round to a uniform number of 1.
    uniform = _shifted(words, 12).double().add_(0.5).mul_(2.0**-52)
    # The race is won by small numbers: taken from the small uniforms they keep all their digits.
    return uniform.neg_().log1p_().neg_()


def _mix(word: int) -> int:
    """The finaliser of SplitMix64: a bijection on 64 bits in which every input bit reaches every output bit."""
    word = ((word ^ (word >> _SHIFT_1)) * _FACTOR_1) & _WORD
    word = ((word ^ (word >> _SHIFT_2)) * _FACTOR_2) & _WORD
    return word ^ (word >> _SHIFT_3)


def _mix_tensor(words: Tensor) -> Tensor:
    """`_mix` on int64, whose products keep their low 64 bits."""
    words = (words ^ _shifted(words, _SHIFT_1)) * _signed(_FACTOR_1)
    words = (words ^ _shifted(words, _SHIFT_2)) * _signed(_FACTOR_2)
    return words ^ _shifted(words, _SHIFT_3)


def _shifted(words: Tensor, bits: int) -> Tensor:
    # Shifting a negative int64 brings in ones; SplitMix64 wants zeros.
    return (words >> bits) & (_WORD >> bits)


def _signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word
