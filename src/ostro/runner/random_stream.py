"""The random numbers of sampling: a pure function of (seed, choice, position). Keeps no state, knows no tensors.

Because nothing is drawn in sequence, a token does not depend on which requests ran beside it, on preemption, or on a
restart: the same position of the same request always gets the same number.
"""

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    state = 0
    for word in (seed, choice, position):
        state = _mix(((state ^ (word & _WORD)) + _GOLDEN) & _WORD)
    return (state >> 11) * 2.0**-53


def _mix(word: int) -> int:
    """The finaliser of SplitMix64: a bijection on 64 bits in which every input bit reaches every output bit."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
