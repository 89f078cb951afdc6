"""CRC-64/NVME, which the AWS CLI assigns to its uploads. None of our required dependencies implements it.

The input is split into lanes that numpy processes side by side, all but the first starting from zero. A CRC is linear:
the CRC of two neighbouring lanes is the left one's, advanced over as many zero bytes as the right one has, XOR the
right one's.

  lane 0 │ lane 1 │ lane 2 │ lane 3        one step consumes two bytes of every lane
  └─ advance, XOR ──┘ └─ and so on ──┘
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
            # A zero lane in front leaves the sum unchanged.
            lanes = np.concatenate([np.zeros(1, np.uint64), lanes])
        lanes = _moved(_move(bits), lanes[::2]) ^ lanes[1::2]
        bits += 1
    return int(lanes[0])


@cache
def _steps() -> list[int]:
    """For each low byte of the state, its contribution once shifted out."""
    steps = []
    for state in range(256):
        for _ in range(8):
            state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
        steps.append(state)
    return steps


@cache
def _double_steps() -> _Words:
    """The same for the low two bytes."""
    steps = np.array(_steps(), np.uint64)
    states = np.arange(1 << 16, dtype=np.uint64)
    for _ in range(2):
        states = steps[states & np.uint64(0xFF)] ^ (states >> np.uint64(8))
    return states


@cache
def _move(bits: int) -> _Words:
    """For each bit of a state, its image after 2**bits zero bytes."""
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
