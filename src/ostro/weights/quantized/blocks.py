"""Rows of numbers as rows of GGUF's blocks of 32, which the native core packs. Imports no torch.

Q4_0   float16 scale, 32 × 4 bits             value = scale · (code - 8)
Q4_1   float16 scale, minimum, 32 × 4 bits    value = scale · code + minimum
Q8_0   float16 scale, 32 × int8               value = scale · code
MXFP4  exponent, 32 × 4-bit floats             value = 2^(exponent - 127) · float
"""

import numpy as np
import numpy.typing as npt

from ostro.weights.arrays import Bytes, Floats

GROUP = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "MXFP4": 17}
_Halves = npt.NDArray[np.float16]


class DoesNotFit(Exception):
    """The reason why a weight cannot be repacked as its format says."""


def q4_0(codes: npt.NDArray[np.uint8], scales: Floats) -> Bytes:
    return _joined(_octets(halves(scales)), _nibbles(codes))


def q4_1(codes: npt.NDArray[np.uint8], scales: Floats, minima: Floats) -> Bytes:
    return _joined(_octets(halves(scales)), _octets(halves(minima)), _nibbles(codes))


def q8_0(codes: npt.NDArray[np.int8], scales: Floats) -> Bytes:
    return _joined(_octets(halves(scales)), codes.view(np.uint8).reshape(len(codes), -1, GROUP))


def mxfp4(codes: npt.NDArray[np.uint8], exponents: Bytes) -> Bytes:
    return _joined(exponents[..., None], _nibbles(codes))


def requantized(values: Floats) -> Bytes:
    """The closest Q8_0. A block with NaN or infinity becomes NaN as a whole, so that it does not vanish."""
    groups = values.reshape(len(values), -1, GROUP)
    peaks = np.abs(groups).max(axis=-1)
    scales = halves(np.where(np.isfinite(peaks), peaks / 127, np.float32(np.nan))).astype(np.float32)
    codes = groups / np.where(scales == 0, np.float32(np.inf), scales)[..., None]
    np.rint(codes, out=codes)
    # If the scale was rounded down, the peak would exceed the largest code.
    np.clip(codes, -127, 127, out=codes)
    return q8_0(codes.astype(np.int8).reshape(values.shape), scales)


def halves(values: Floats) -> _Halves:
    found = values.astype(np.float16)
    if bool((np.isinf(found) & np.isfinite(values)).any()):
        raise DoesNotFit("its scales are too large for float16")
    return found


def _octets(numbers: _Halves) -> Bytes:
    return np.ascontiguousarray(numbers)[..., None].view(np.uint8)


def _nibbles(codes: npt.NDArray[np.uint8]) -> Bytes:
    """Each block's first sixteen codes in the low halves of its bytes, the others in the high ones."""
    pairs = codes.reshape(len(codes), -1, 2, GROUP // 2)
    return pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)


def _joined(*pieces: Bytes) -> Bytes:
    joined = np.concatenate(pieces, axis=-1)
    return joined.reshape(len(joined), -1)
