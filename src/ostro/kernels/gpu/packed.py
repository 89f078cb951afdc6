"""Matmul with packed weights of 4 or 8 bits: see `packed_words` for the form.

For one row, and up to MOST_FEW rows, weights are widened after they are read, by kernels that read as few bytes as
there are, exactly: `packed_vector` and `packed_dot`. For more rows the whole weight is widened first and rounded to 16
bits, into memory that the next matmul uses again, and the library does the rest. What `small_batch` says about
programmatic dependent launch applies here too.

Knows shapes; knows no layers. The plain twins end in `_plain`.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ostro.kernels.gpu import packed_dot, packed_vector
from ostro.kernels.gpu.packed_vector import PackedVectorTiling
from ostro.kernels.gpu.packed_words import Packed, halves, integers, widened
from ostro.kernels.gpu.small_batch import small_linear_plain
from ostro.kernels.gpu.tilings import MOST_ROWS, DotTiling

PackedTiling = PackedVectorTiling | DotTiling

MOST_FEW = MOST_ROWS
"""The maximum number of rows that `packed_small_linear` takes."""
_MOST_FUSED = 128
_UNPACKED_OUTS = 32


def is_fused(rows: int, *, gated: bool) -> bool:
    """Whether the matmul had better do what comes after it. For more than 128 rows it has no registers for that; and
    of gate and up, for more than one row, there would be too few programs for all that there is to unpack.
    """
    return rows == 1 or (rows <= _MOST_FUSED and not gated)


def default_tiling(rows: int, weight: Packed, *, gated: bool) -> PackedTiling:
    if rows == 1:
        return packed_vector.default_tiling(*weight.shape, bits=weight.bits, gated=gated)
    return packed_dot.default_tiling(rows, weight, gated=gated)


def packed_small_linear(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    multiplier: float = 1.0,
    tiling: PackedTiling | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out], for 1 to MOST_FEW rows.

    `norm` (weight, eps) applies an RMSNorm to x first, for one row only. With `residual` [rows, out], the result is
    added to it in place, times the `multiplier`, and it is returned. With `activation`, a name in mlp.PLAIN, the result
    is act(y), or if `gated`, where the weight is gate above up, act(gate) * up, [rows, out / 2].

    The first call on a device must not be inside a graph capture: it allocates the counters of split matmuls.
    """
    rows, adds = len(x), residual is not None
    assert 1 <= rows <= MOST_FEW
    assert activation is not None or not gated
    assert activation is None or not adds
    assert adds or multiplier == 1.0
    assert weight.words.is_contiguous()
    assert weight.pairs.is_contiguous()
    tiling = tiling or default_tiling(rows, weight, gated=gated)
    out = residual
    if out is None:
        out = torch.empty(rows, weight.shape[0] // (2 if gated else 1), dtype=x.dtype, device=x.device)
    if isinstance(tiling, PackedVectorTiling):
        assert rows == 1
        packed_vector.packed_vector(
            x,
            weight,
            bias,
            out,
            tiling,
            norm=norm,
            adds=adds,
            activation=activation,
            gated=gated,
            multiplier=multiplier,
            pdl=pdl,
        )
    else:
        assert norm is None
        packed_dot.packed_dot(
            x,
            weight,
            bias,
            out,
            tiling,
            adds=adds,
            activation=activation,
            gated=gated,
            multiplier=multiplier,
            pdl=pdl,
        )
    return out


def packed_small_linear_plain(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    multiplier: float = 1.0,
) -> Tensor:
    wide = widened(weight)
    return small_linear_plain(
        x,
        wide if len(x) <= MOST_FEW else wide.to(x.dtype),
        bias,
        norm=norm,
        residual=residual,
        activation=activation,
        gated=gated,
        multiplier=multiplier,
    )


def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """x [rows, in] -> [rows, out], for any number of rows."""
    if len(x) <= MOST_FEW:
        return packed_small_linear(x, weight, bias, pdl=pdl)
    return F.linear(x, unpacked(weight, x.dtype), bias)


def packed_linear_plain(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    return packed_small_linear_plain(x, weight, bias)


def unpacked(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in a number format of the library's."""
    (outs, ins), block = weight.shape, weight.block
    wide = torch.empty(outs, ins, dtype=dtype, device=weight.words.device)
    _unpack_kernel[(triton.cdiv(outs, _UNPACKED_OUTS), ins // block)](
        weight.words,
        weight.pairs,
        wide,
        outs,
        ins,
        weight.pairs.shape[1],
        weight.group // block,
        bits=weight.bits,
        has_minimum=weight.has_minimum,
        block_out=_UNPACKED_OUTS,
        block=block,
        num_warps=4,
    )
    return wide


@triton.jit
def _unpack_kernel(
    words: tl.tensor,
    pairs: tl.tensor,
    wide: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    groups: tl.tensor,
    blocks_a_group: tl.tensor,
    bits: tl.constexpr,
    has_minimum: tl.constexpr,
    block_out: tl.constexpr,
    block: tl.constexpr,
) -> None:
    block_words: tl.constexpr = block * bits // 32
    n = (tl.program_id(0) * block_out + tl.arange(0, block_out)).to(tl.int64)
    index = tl.program_id(1)
    inside = n < outs
    at = words + n[:, None] * (ins * bits // 32) + index * block_words + tl.arange(0, block_words)[None, :]
    loaded = tl.load(at, mask=inside[:, None], other=0)
    scale, second = halves(tl.load(pairs + n * groups + index // blocks_a_group, mask=inside, other=0))
    zero = tl.zeros_like(second) if has_minimum else second
    values = integers(loaded, zero, bits, wide.dtype.element_ty).to(tl.float32) * scale[:, None]
    if has_minimum:
        values += second[:, None]
    target = wide + n[:, None] * ins + index * block + tl.arange(0, block)[None, :]
    tl.store(target, values.to(wide.dtype.element_ty), mask=inside[:, None])
