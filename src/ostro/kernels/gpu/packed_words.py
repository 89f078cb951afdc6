"""The packed form of 4-bit and 8-bit weights, and how kernels extract codes from its words.

    weight [out, in] = (code - zero) · scale, or code · scale + minimum        one pair of numbers per group of inputs

    words   int32 [out, in · bits / 32]     four words, a quad, hold 32 inputs in 4 bits, 16 in 8 bits. Of a block of q
                                            quads, input 8 (j q + i) + 2 c + h is code number j in the lower (h = 0) or
                                            upper half of word c of quad i
    pairs   int32 [out, groups]             two float16: the scale, and above it the zero point or minimum

The order matches the registers from which the tensor cores take an operand: a thread needs inputs 2 c and 2 c + 1, and
the same plus 8, as pairs of 16-bit numbers. So one mask extracts a pair of codes from a word, two weights at a time.
And where neighbouring threads have neighbouring quads, the inputs that they need at a time, eight each, are neighbours.

Where single codes are needed, a mask leaves one in the mantissa of a float32, a denormal number, with no conversion:
the inputs that it is multiplied with are scaled up by as many powers of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ostro.kernels.gpu.packed_layout import block_inputs, quad_inputs

_ROWS_AT_A_TIME = 2048
# Triton's interpreter cannot run assembly.
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


class Packed(NamedTuple):
    words: Tensor
    pairs: Tensor
    bits: int
    group: int
    """Inputs that share a pair: a multiple of a quad's."""
    has_minimum: bool

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.words.shape[0], self.words.shape[1] * (32 // self.bits)

    @property
    def block(self) -> int:
        """Inputs that the tensor cores multiply at a time."""
        return block_inputs(self.group)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.pairs.nbytes


def _shifts(bits: int, device: torch.device) -> Tensor:
    """[j, quads, c, h]: where a block's codes are in their words, in the inputs' order."""
    codes = 16 // bits
    places = torch.arange(codes)[:, None] + codes * torch.arange(2)[None, :]
    return (places * bits)[:, None, None, :].to(device)


def pack_codes(codes: Tensor, bits: int, group: int) -> Tensor:
    """uint8 [rows, in] -> int32 [rows, words]."""
    rows, columns = codes.shape
    words = torch.empty(rows, columns * bits // 32, dtype=torch.int32, device=codes.device)
    shifts, quads = _shifts(bits, codes.device), block_inputs(group) // quad_inputs(bits)
    for part, own in zip(codes.split(_ROWS_AT_A_TIME), words.split(_ROWS_AT_A_TIME), strict=True):
        wide = part.view(len(part), -1, len(shifts), quads, 4, 2).long() << shifts
        word = wide.sum((2, 5))
        # Wrapped into a signed 32-bit number.
        own.copy_((word - ((word >> 31) << 32)).view(len(part), -1))
    return words


def unpacked_codes(words: Tensor, bits: int, group: int) -> Tensor:
    """The reverse: int32 [rows, in]."""
    shifts, quads = _shifts(bits, words.device), block_inputs(group) // quad_inputs(bits)
    blocks = words.view(len(words), -1, 1, quads, 4, 1)
    return ((blocks >> shifts) & ((1 << bits) - 1)).view(len(words), -1).int()


def pack_pairs(scales: Tensor, seconds: Tensor) -> Tensor:
    """Two float16 [rows, groups] -> int32."""
    return torch.stack((scales, seconds), -1).contiguous().view(torch.int32).squeeze(-1)


def widened(packed: Packed) -> Tensor:
    """The weight in float32: the plain twin of what kernels make of the words."""
    assert packed.group % quad_inputs(packed.bits) == 0
    codes = unpacked_codes(packed.words, packed.bits, packed.group).float()
    halves = packed.pairs.contiguous().view(torch.float16).view(*packed.pairs.shape, 2).float()
    scale, second = (halves[..., half].repeat_interleave(packed.group, 1) for half in range(2))
    return codes * scale + second if packed.has_minimum else (codes - second) * scale


@triton.jit
def halves(pairs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Scale, and zero point or minimum, in float32."""
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def coded(words: tl.tensor, number: tl.constexpr, half: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    """A code as a denormal float32: code · 2 ** (lifted - 149)."""
    # Codes must stay below bit 23, where the exponent begins.
    moved = words if half == 0 else words >> (12 if bits == 4 else 16)
    mask: tl.constexpr = ((1 << bits) - 1) << lifted(number, half, bits)
    return (moved & mask).to(tl.float32, bitcast=True)


@triton.constexpr_function
def lifted(number: int, half: int, bits: int) -> int:
    """The bit position of a code's lowest bit in the word that `coded` masks."""
    return number * bits + (4 if half and bits == 4 else 0)


@triton.jit
def integers(words: tl.tensor, zero: tl.tensor, bits: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """[outs, words of a block] -> [outs, inputs], in order: codes less a zero point, [outs], exactly."""
    outs: tl.constexpr = words.shape[0]
    quads: tl.constexpr = words.shape[1] // 4
    if bits == 4:
        # [outs, words, h, (j's two bits)]
        first = tl.join(four_bit_pair(words, zero, 0, dtype), four_bit_pair(words, zero, 2, dtype))
        second = tl.join(four_bit_pair(words, zero, 1, dtype), four_bit_pair(words, zero, 3, dtype))
        joined = tl.join(first, second)
        # Without a dimension for one quad, the compiler finds that nothing has to move between threads.
        if quads == 1:
            result = joined.permute(0, 3, 4, 1, 2).reshape(outs, 32)
        else:
            joined = joined.reshape(outs, quads, 4, 2, 2, 2)
            result = joined.permute(0, 4, 5, 1, 2, 3).reshape(outs, quads * 32)
    else:
        first = tl.join(_byte(words, zero, 0, 0, dtype), _byte(words, zero, 0, 1, dtype))
        second = tl.join(_byte(words, zero, 1, 0, dtype), _byte(words, zero, 1, 1, dtype))
        joined = tl.join(first, second)
        if quads == 1:
            result = joined.permute(0, 3, 1, 2).reshape(outs, 16)
        else:
            joined = joined.reshape(outs, quads, 4, 2, 2)
            result = joined.permute(0, 4, 1, 2, 3).reshape(outs, quads * 16)
    return result


@triton.jit
def four_bit_pair(words: tl.tensor, zero: tl.tensor, number: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """[…, outs, words, 2]: code number `number` of either half of each word, less a zero point, […, outs], exactly."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        # 0x4300 with a code below it is 128 + code in bfloat16, and the difference to 128 + zero is exact. Both halves
        # at once; in assembly, as Triton has no such operations. GPUs before Hopper have no plain addition for it, so
        # it is a multiply-add by one.
        bits = (-128.0 - zero).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        zeros = tl.broadcast_to(tl.expand_dims(bits | (bits << 16), -1), words.shape)
        pair = tl.inline_asm_elementwise(
            "{ .reg .b32 t; lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, $3, $2; }",
            "=r,r,r,r",
            [words >> (4 * number), zeros, tl.full(words.shape, 0x3F803F80, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        lower = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
        upper = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        lower = ((words >> (4 * number)) & 15).to(tl.float32) - tl.expand_dims(zero, -1)
        upper = ((words >> (4 * number + 16)) & 15).to(tl.float32) - tl.expand_dims(zero, -1)
        lower, upper = lower.to(dtype), upper.to(dtype)
    return tl.join(lower, upper)


@triton.jit
def _byte(
    words: tl.tensor, zero: tl.tensor, number: tl.constexpr, half: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    raised = coded(words, number, half, 8) * 2.0**100
    return (raised * 2.0 ** (49 - lifted(number, half, 8)) - zero[:, None]).to(dtype)
