"""Keys of random streams: a pure function of (seed, choice, position). Imports no torch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
# SplitMix64's finaliser: shift and multiply twice, then shift.
SHIFT_1, FACTOR_1 = 30, 0xBF58476D1CE4E5B9
SHIFT_2, FACTOR_2 = 27, 0x94D049BB133111EB
SHIFT_3 = 31
_MANY = 12
"""The number of keys from which computing all at once is faster than one by one."""


def stream_key(seed: int, choice: int, position: int) -> int:
    """The start of one position's stream: signed 64 bits, as in an int64 tensor."""
    state = 0
    for word in (seed, choice, position):
        state = _mix(((state ^ (word & WORD)) + GOLDEN) & WORD)
    return signed(state)


def stream_keys(streams: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.int64]:
    """`stream_key` of each stream."""
    if len(streams) < _MANY:
        return np.array([stream_key(*each) for each in streams], np.int64)
    state = np.zeros(len(streams), np.uint64)
    for words in zip(*streams, strict=True):
        state = (state ^ np.array([word & WORD for word in words], np.uint64)) + np.uint64(GOLDEN)
        for shift, factor in ((SHIFT_1, FACTOR_1), (SHIFT_2, FACTOR_2)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state ^= state >> np.uint64(SHIFT_3)
    return state.view(np.int64)


def signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word


def _mix(word: int) -> int:
    """The finaliser of SplitMix64: a bijection on 64 bits in which every input bit reaches every output bit."""
    word = ((word ^ (word >> SHIFT_1)) * FACTOR_1) & WORD
    word = ((word ^ (word >> SHIFT_2)) * FACTOR_2) & WORD
    return word ^ (word >> SHIFT_3)
