"""Matmul with packed weights of 4 or 8 bits: see `packed_words` for the form.

For one row, and up to MOST_FEW rows, the kernels of `packed_vector` and `packed_dot` read packed weights and widen them
exactly. For more rows the whole weight is first widened and rounded to 16 bits, into memory that the next matmul
reuses, and the library does the rest. What `small_batch` says about programmatic dependent launch applies here too.

Knows shapes; knows no layers. The plain twins end in `_plain`.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ostro.kernels.gpu import packed_dot, packed_vector
from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue
from ostro.kernels.gpu.packed_vector import PackedVectorTiling
from ostro.kernels.gpu.packed_words import Packed, halves, integers, widened
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Prologue
from ostro.kernels.gpu.small_batch import small_linear_plain
from ostro.kernels.gpu.tilings import MOST_ROWS, DotTiling, Tiling, VectorTiling

MOST_FEW = MOST_ROWS
"""The maximum number of rows that `packed_small_linear` takes."""
_MOST_FUSED = 128
_UNPACKED_OUTS = 32


def is_fused(rows: int, *, gated: bool) -> bool:
    """Whether fusing the epilogue pays. For more than 128 rows there are no registers left for it; and with gate and
    up, for more than one row, there would be too few programs for all the weights to unpack.
    """
    return rows == 1 or (rows <= _MOST_FUSED and not gated)


def default_tiling(rows: int, weight: Packed, *, gated: bool) -> Tiling:
    if rows == 1:
        return packed_vector.default_tiling(*weight.shape, bits=weight.bits, gated=gated)
    return packed_dot.default_tiling(rows, weight, gated=gated)


def packed_small_linear(
    x: Tensor,
    weight: Packed,
    prologue: Prologue = NO_PROLOGUE,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    residual: Tensor | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out], for 1 to MOST_FEW rows. A prologue takes one row, and no delta.
    Where the epilogue adds, the result is added to the `residual` [rows, out] in place, and it is returned.

    The first call on a device must not be inside a graph capture: it allocates the counters of split matmuls.
    """
    rows = len(x)
    assert 1 <= rows <= MOST_FEW
    assert weight.words.is_contiguous()
    assert weight.pairs.is_contiguous()
    tiling = tiling or default_tiling(rows, weight, gated=epilogue.gated)
    out = epilogue.target(x, weight.shape[0], residual)
    if isinstance(tiling, VectorTiling):
        assert isinstance(tiling, PackedVectorTiling)
        assert rows == 1
        packed_vector.packed_vector(x, weight, out, tiling, prologue, epilogue, pdl=pdl)
    else:
        assert isinstance(tiling, DotTiling)
        assert prologue.is_empty
        packed_dot.packed_dot(x, weight, out, tiling, epilogue, pdl=pdl)
    return out


def packed_small_linear_plain(
    x: Tensor,
    weight: Packed,
    prologue: Prologue = NO_PROLOGUE,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    wide = widened(weight)
    return small_linear_plain(
        x, wide if len(x) <= MOST_FEW else wide.to(x.dtype), prologue, epilogue, residual=residual
    )


def packed_linear(x: Tensor, weight: Packed, epilogue: Epilogue = NO_EPILOGUE, *, pdl: bool = False) -> Tensor:
    """x [rows, in] -> [rows, out], for any number of rows. The epilogue may have a bias and nothing else."""
    assert epilogue.kind == "plain"
    if len(x) <= MOST_FEW:
        return packed_small_linear(x, weight, epilogue=epilogue, pdl=pdl)
    return F.linear(x, unpacked(weight, x.dtype), epilogue.bias)


def packed_linear_plain(x: Tensor, weight: Packed, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    return packed_small_linear_plain(x, weight, epilogue=epilogue)


def unpacked(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in a dtype that the library multiplies."""
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
