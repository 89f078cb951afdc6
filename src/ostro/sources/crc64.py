"""CRC-64/NVME, which AWS's command line gives to what it uploads. No library that is always there has it.

A long text is cut into lanes, which are summed side by side, each from zero but the first. A CRC is linear: that of two
neighbours is the left one's, moved on over as many zero bytes as the right one has, XOR the right one's.

  lane 0 │ lane 1 │ lane 2 │ lane 3        two bytes of each lane are one step
  └── moved on, XOR ──┘ └── and so on ──┘
"""

from functools import cache

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x9A6C9329AC4BC9B5
_ONES = (1 << 64) - 1
_LANE_BITS = 9
_LANE_BYTES = 1 << _LANE_BITS

_Words = npt.NDArray[np.uint64]


class Crc64:
    def __init__(self) -> None:
        self._state = _ONES

    def update(self, data: bytes) -> None:
        num_lanes = len(data) // _LANE_BYTES
        if num_lanes:
            self._state = _sum_lanes(self._state, data, num_lanes)
        steps = _steps()
        for byte in data[num_lanes * _LANE_BYTES :]:
            self._state = steps[(self._state ^ byte) & 0xFF] ^ (self._state >> 8)

    def digest(self) -> bytes:
        return (self._state ^ _ONES).to_bytes(8, "big")


def _sum_lanes(state: int, data: bytes, num_lanes: int) -> int:
    pairs = np.frombuffer(data, "<u2", num_lanes * _LANE_BYTES // 2).reshape(num_lanes, -1)
    lanes = np.zeros(num_lanes, np.uint64)
    lanes[0] = state
    steps = _double_steps()
    for column in np.ascontiguousarray(pairs.T):
        lanes = steps[lanes.astype(np.uint16) ^ column] ^ (lanes >> np.uint64(16))
    bits = _LANE_BITS
    while len(lanes) > 1:
        if len(lanes) % 2:
            # Zero, and nothing before it: such a lane changes no sum.
            lanes = np.concatenate([np.zeros(1, np.uint64), lanes])
        lanes = _moved(_move(bits), lanes[::2]) ^ lanes[1::2]
        bits += 1
    return int(lanes[0])


@cache
def _steps() -> list[int]:
    """What the low byte of the state becomes, once it is shifted out."""
    steps = []
    for state in range(256):
        for _ in range(8):
            state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
        steps.append(state)
    return steps


@cache
def _double_steps() -> _Words:
    """The same of the low two bytes."""
    steps = np.array(_steps(), np.uint64)
    states = np.arange(1 << 16, dtype=np.uint64)
    for _ in range(2):
        states = steps[states & np.uint64(0xFF)] ^ (states >> np.uint64(8))
    return states


@cache
def _move(bits: int) -> _Words:
    """Where 2**bits zero bytes move each bit of a state."""
    if bits:
        half = _move(bits - 1)
        return _moved(half, half)
    steps = _steps()
    return np.array([steps[(1 << bit) & 0xFF] ^ ((1 << bit) >> 8) for bit in range(64)], np.uint64)


def _moved(move: _Words, states: _Words) -> _Words:
    moved = np.zeros_like(states)
    for bit, to in enumerate(move):
        moved ^= ((states >> np.uint64(bit)) & np.uint64(1)) * to
    return moved
