"""The packed form of weights with 4 or 8 bits, and how kernels take codes out of its words.

    weight [out, in] = (code - zero) · scale, or code · scale + minimum        one pair of numbers per group of inputs

    words   int32 [out, in · bits / 32]     a block of 16 words holds 128 inputs (of 8 bits, 64): word t has the inputs
                                            t, 16 + t, 32 + t, … of its block, so that 16 words next to one another
                                            hold runs of 16 inputs each
    pairs   int32 [out, groups]             two float16: the scale, and above it the zero point or minimum

Each word is stored turned left by 15 bits. Turned on by a multiple of 8, it then has one of its four bytes in bits 15
to 22, the upper end of a float32's mantissa. Under a mask, with an exponent of zero, a code there is a denormal number,
code · 2 ** -134, or 2 ** -130 in the byte's upper half: no conversion, and no operation but the mask.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostro.kernels.gpu.packed_layout import SLICE, block_inputs

RAISED = tl.constexpr(2.0**100)
"""Brings codes, which are denormal numbers, into the range of normal ones. Inputs may be so large times 2 ** 27."""
LOWER, UPPER = tl.constexpr(2.0**34), tl.constexpr(2.0**30)
"""What is left to multiply, for codes in the lower half of a byte or all of it, and for those in the upper half."""
_ROTATION = 15
_ROWS_AT_A_TIME = 2048


class Packed(NamedTuple):
    words: Tensor
    pairs: Tensor
    bits: int
    group: int
    """Inputs that share a pair: parts of a block, or a multiple of it."""
    has_minimum: bool

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.words.shape[0], self.words.shape[1] * (32 // self.bits)

    @property
    def blocks_a_group(self) -> int:
        return max(1, self.group // block_inputs(self.bits))

    @property
    def groups_a_block(self) -> int:
        return max(1, block_inputs(self.bits) // self.group)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.pairs.nbytes


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, in] -> int32 [rows, words]."""
    rows, columns = codes.shape
    lanes = 32 // bits
    words = torch.empty(rows, columns // lanes, dtype=torch.int32, device=codes.device)
    for part, own in zip(codes.split(_ROWS_AT_A_TIME), words.split(_ROWS_AT_A_TIME), strict=True):
        wide = part.view(len(part), -1, lanes, SLICE).long()
        shifts = torch.arange(lanes, device=codes.device)[:, None] * bits
        word = (wide << shifts).sum(2)
        turned = (word << _ROTATION) | (word >> (32 - _ROTATION))
        # The lowest 32 bits, as a signed number.
        turned &= 0xFFFFFFFF
        own.copy_((turned - ((turned >> 31) << 32)).view(len(part), -1))
    return words


def unpacked_codes(words: Tensor, bits: int) -> Tensor:
    """The reverse: int32 [rows, in]."""
    lanes = 32 // bits
    turned = words.long() & 0xFFFFFFFF
    word = ((turned >> _ROTATION) | (turned << (32 - _ROTATION))) & 0xFFFFFFFF
    shifts = torch.arange(lanes, device=words.device)[:, None] * bits
    codes = (word.view(len(words), -1, 1, SLICE) >> shifts) & ((1 << bits) - 1)
    return codes.view(len(words), -1).int()


def pack_pairs(scales: Tensor, seconds: Tensor) -> Tensor:
    """Two float16 [rows, groups] -> int32."""
    return torch.stack((scales, seconds), -1).contiguous().view(torch.int32).squeeze(-1)


def widened(packed: Packed) -> Tensor:
    """The weight in float32: the plain twin of what kernels make of the words."""
    codes = unpacked_codes(packed.words, packed.bits).float()
    halves = packed.pairs.contiguous().view(torch.float16).view(*packed.pairs.shape, 2).float()
    scale, second = (halves[..., half].repeat_interleave(packed.group, 1)[:, : codes.shape[1]] for half in range(2))
    return codes * scale + second if packed.has_minimum else (codes - second) * scale


@triton.jit
def coded(words: tl.tensor, byte: tl.constexpr, mask: tl.constexpr) -> tl.tensor:
    """The code under the mask in one of the bytes, as a denormal float32."""
    if byte == 0:
        turned = words
    elif byte == 1:
        turned = words >> 8
    elif byte == 2:
        turned = (words << 16) | ((words >> 16) & 0xFFFF)
    else:
        turned = words << 8
    return (turned & mask).to(tl.float32, bitcast=True)


@triton.jit
def halves(pairs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Scale, and zero point or minimum, in float32."""
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def factors(pairs: tl.tensor, has_minimum: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What raised codes are multiplied by, in the lower half of a byte and in the upper one, and what is added, to make
    weights of them.
    """
    scale, second = halves(pairs)
    offset = second if has_minimum else -second * scale
    return scale * LOWER, scale * UPPER, offset


@triton.jit
def widened_words(words: tl.tensor, by: tl.tuple, bits: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """[outs, words of whole blocks] -> [outs, inputs], in order. `by` has the factors, [outs, words] or [outs, 1], of
    the groups that a block consists of, or of the one that it is part of.
    """
    outs: tl.constexpr = words.shape[0]
    blocks: tl.constexpr = words.shape[1] // 16
    # In the inputs' order, the place of a code in its word stands between block and word; joined dimensions come last.
    if bits == 8:
        first = tl.join(_byte(words, by, 0, dtype), _byte(words, by, 2, dtype))
        second = tl.join(_byte(words, by, 1, dtype), _byte(words, by, 3, dtype))
        joined = tl.join(first, second)
        # Without a dimension for one block, the compiler finds that nothing has to move between threads.
        if blocks == 1:
            result = joined.permute(0, 2, 3, 1).reshape(outs, 64)
        else:
            result = joined.reshape(outs, blocks, 16, 2, 2).permute(0, 1, 3, 4, 2).reshape(outs, blocks * 64)
    else:
        lower0, upper0 = _nibbles(words, by, 0, dtype)
        lower1, upper1 = _nibbles(words, by, 1, dtype)
        lower2, upper2 = _nibbles(words, by, 2, dtype)
        lower3, upper3 = _nibbles(words, by, 3, dtype)
        lower = tl.join(tl.join(lower0, lower2), tl.join(lower1, lower3))
        upper = tl.join(tl.join(upper0, upper2), tl.join(upper1, upper3))
        joined = tl.join(lower, upper)
        if blocks == 1:
            result = joined.permute(0, 2, 3, 4, 1).reshape(outs, 128)
        else:
            result = joined.reshape(outs, blocks, 16, 2, 2, 2).permute(0, 1, 3, 4, 5, 2).reshape(outs, blocks * 128)
    return result


@triton.jit
def _nibbles(words: tl.tensor, by: tl.tuple, byte: tl.constexpr, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    # Exact but for one rounding, if the compiler makes one operation of product and sum.
    lower_scale, upper_scale, offset = by[byte * len(by) // 4]
    lower = coded(words, byte, 0x78000) * RAISED * lower_scale + offset
    upper = coded(words, byte, 0x780000) * RAISED * upper_scale + offset
    return lower.to(dtype), upper.to(dtype)


@triton.jit
def _byte(words: tl.tensor, by: tl.tuple, byte: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    scale, _, offset = by[byte * len(by) // 4]
    return (coded(words, byte, 0x7F8000) * RAISED * scale + offset).to(dtype)
