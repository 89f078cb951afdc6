"""Small-batch matmul with fused prologue and epilogue: chooses the kernel and its tiling.

    x ──(norm)──> · weightᵀ ──(+ bias)──┬──────────────────> out
                                        ├─(+ residual)─────> residual, in place
                                        └─ act(gate) * up ─> out, where the weight holds gate above up

One row goes to `vector_linear`, more go to `dot_linear`, unless something else was measured to be faster.

Programmatic dependent launch (`pdl`): a program starts while the previous kernel is still running, prefetches its
weights, which no kernel writes, and only then waits until the previous kernel has ended and its writes are visible. A
kernel that has waited may rely on everything earlier in the stream, because each kernel waits before it ends: so every
kernel launched this way must wait, and none may read or write anything but weights before that.

Knows shapes; knows no layers. The plain twin is `small_linear_plain`.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from ostro.kernels.gpu import dot_linear as dot
from ostro.kernels.gpu import vector_linear as vector
from ostro.kernels.gpu.dot_linear import DotTiling, dot_linear
from ostro.kernels.gpu.mlp import PLAIN
from ostro.kernels.gpu.vector_linear import VectorTiling, vector_linear

Tiling: TypeAlias = VectorTiling | DotTiling

TILINGS: Mapping[tuple[int, int, int], Tiling] = {
    (1, 4096, 1024): VectorTiling(4, 256, 2),
    (1, 1024, 2048): VectorTiling(8, 256, 4),
    (1, 6144, 1024): VectorTiling(4, 256, 4),
    (1, 1024, 3072): VectorTiling(8, 256, 8),
    (1, 151936, 1024): VectorTiling(8, 256, 8),
    (1, 6144, 4096): VectorTiling(2, 1024, 4),
    (1, 4096, 4096): VectorTiling(2, 1024, 4),
    (1, 28672, 4096): VectorTiling(1, 1024, 4),
    (1, 4096, 14336): VectorTiling(2, 2048, 8),
    (1, 128256, 4096): VectorTiling(1, 1024, 4),
    (4, 4096, 1024): VectorTiling(4, 256, 4),
    (4, 1024, 2048): DotTiling(64, 128, 4, stages=10, splits=8, held=2),
    (4, 6144, 1024): DotTiling(64, 128, 4, stages=5),
    (4, 1024, 3072): VectorTiling(2, 1024, 4),
    (4, 151936, 1024): DotTiling(128, 128, 4, stages=2),
    (16, 4096, 1024): DotTiling(128, 128, 4, stages=2, splits=4, held=2),
    (16, 1024, 2048): DotTiling(64, 128, 4, stages=10, splits=8, held=2),
    (16, 6144, 1024): DotTiling(64, 128, 4, stages=4),
    (16, 1024, 3072): DotTiling(64, 128, 4, stages=5, splits=8, held=1),
    (16, 151936, 1024): DotTiling(128, 128, 4, stages=2),
    (16, 6144, 4096): DotTiling(64, 128, 4, stages=5, held=2),
    (16, 4096, 4096): DotTiling(64, 128, 4, stages=5, splits=2, held=1),
    (16, 28672, 4096): DotTiling(64, 128, 4, stages=2, held=1),
    (16, 4096, 14336): DotTiling(64, 128, 4, stages=5, splits=2, held=1),
    (16, 128256, 4096): DotTiling(128, 128, 4, stages=3),
    (64, 4096, 1024): DotTiling(64, 128, 4, stages=6),
    (64, 1024, 2048): DotTiling(64, 128, 4, stages=6),
    (64, 6144, 1024): DotTiling(64, 128, 4, stages=4),
    (64, 1024, 3072): DotTiling(64, 128, 4, stages=6, splits=4),
    (64, 151936, 1024): DotTiling(128, 64, 8, stages=3),
    (64, 6144, 4096): DotTiling(64, 128, 4, stages=6),
    (64, 4096, 4096): DotTiling(64, 128, 4, stages=6, splits=2),
    (64, 28672, 4096): DotTiling(64, 128, 4, stages=2),
    (64, 4096, 14336): DotTiling(64, 128, 4, stages=6, splits=2),
    (64, 128256, 4096): DotTiling(64, 128, 4, stages=3),
    (128, 6144, 4096): DotTiling(64, 64, 4, stages=8),
    (128, 4096, 4096): DotTiling(64, 64, 4, stages=9, splits=2),
    (128, 28672, 4096): DotTiling(64, 64, 4, stages=3),
    (128, 4096, 14336): DotTiling(64, 128, 4, stages=4, splits=2),
    (128, 128256, 4096): DotTiling(128, 64, 4, stages=3),
}
"""Tilings with which these kernels beat cuBLAS on an H200, keyed by (maximum rows, out, in). See
bench/kernels/linear.py."""
ROWS = (1, 4, 16, 64, 128)


def measured(rows: int, out_features: int, in_features: int) -> Tiling | None:
    """The best measured tiling for a matmul; None if there is none or if cuBLAS is faster."""
    keys = ((most, out_features, in_features) for most in ROWS if rows <= most)
    return next((TILINGS[key] for key in keys if key in TILINGS), None)


def default_tiling(rows: int, out_features: int, in_features: int, *, gated: bool, element_size: int = 2) -> Tiling:
    """For shapes without a measured tiling. `out_features` counts the weight's rows, both gate and up."""
    if rows == 1:
        return vector.default_tiling(out_features, in_features, gated=gated)
    outs = out_features // (2 if gated else 1)
    return dot.default_tiling(rows, outs, in_features, gated=gated, element_size=element_size)


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out], for 1 to 256 rows.

    `norm` (weight, eps) applies an RMSNorm to x first, in the vector kernel only. With `residual` [rows, out], the
    result is added to it in place, and it is returned. With `activation`, a name in PLAIN, the weight is gate above up
    and the result is act(gate) * up, [rows, out / 2].

    The first call on a device must not be inside a graph capture: it allocates the counters of split matmuls.
    """
    rows, in_features = x.shape
    gated, adds = activation is not None, residual is not None
    assert not (gated and adds)
    assert weight.is_contiguous()
    if tiling is None:
        known = measured(rows, weight.shape[0], in_features)
        size = weight.element_size()
        tiling = known or default_tiling(rows, weight.shape[0], in_features, gated=gated, element_size=size)
    out = residual
    if out is None:
        outs = weight.shape[0] // (2 if gated else 1)
        out = torch.empty(rows, outs, dtype=out_dtype or x.dtype, device=x.device)
    if isinstance(tiling, VectorTiling):
        vector_linear(x, weight, bias, out, tiling, norm=norm, adds=adds, activation=activation, pdl=pdl)
    else:
        assert norm is None
        dot_linear(x, weight, bias, out, tiling, adds=adds, activation=activation, pdl=pdl)
    return out


def small_linear_plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm[1]) * norm[0].float()
    y = wide @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if activation is not None:
        gate, up = y.chunk(2, -1)
        y = PLAIN[activation](gate) * up
    if residual is not None:
        return residual.copy_(residual.float() + y)
    return y.to(out_dtype or x.dtype)
