"""Small-batch matmul with fused prologue and epilogue.

    x ──(norm)──> · weightᵀ ──(+ bias)──┬───────────────────────────> out
                                        ├─(· multiplier + residual)─> residual, in place
                                        ├─ act ─────────────────────> out
                                        └─ act(gate) * up ──────────> out, where the weight holds gate above up

The tiling decides between `vector_linear`, for one row or very few, and `dot_linear`: see `tilings`.

Programmatic dependent launch (`pdl`): a program starts while the previous kernel is still running, prefetches its
weights, which no kernel writes, and only then waits until the previous kernel has ended and its writes are visible. A
kernel that has waited may rely on everything earlier in the stream, because each kernel waits before it ends: so every
kernel launched this way must wait, and none may read or write anything but weights before that.

Knows shapes; knows no layers. The plain twin is `small_linear_plain`.
"""

import torch
from torch import Tensor
from triton.errors import TritonError

from ostro.kernels.gpu.dot_linear import dot_linear
from ostro.kernels.gpu.mlp import PLAIN
from ostro.kernels.gpu.tilings import Tiling, VectorTiling, default_tiling
from ostro.kernels.gpu.vector_linear import Joined, vector_linear

UNUSABLE = (TritonError, RuntimeError)
"""Raised for a tiling that the device cannot run, such as one that needs more shared memory than there is."""


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    joined: Joined | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    multiplier: float = 1.0,
    out_dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out], for 1 to 256 rows.

    `norm` (weight, eps) applies an RMSNorm to x first, in the vector kernel only; `joined`, for a single row, is added
    to x before that. With `residual` [rows, out], the result times the `multiplier` is added to it in place, and it is
    returned. With `activation`, a name in PLAIN, the result is act(y), or if `gated`, where the weight is gate above
    up, act(gate) * up, [rows, out / 2].

    The first call on a device must not be inside a graph capture: it allocates the counters of split matmuls.
    """
    rows = len(x)
    adds = residual is not None
    assert activation is not None or not gated
    assert activation is None or not adds
    assert adds or multiplier == 1.0
    assert weight.is_contiguous()
    tiling = tiling or default_tiling(rows, *weight.shape, bits=8 * weight.element_size(), gated=gated)
    out = residual
    if out is None:
        outs = weight.shape[0] // (2 if gated else 1)
        out = torch.empty(rows, outs, dtype=out_dtype or x.dtype, device=x.device)
    if isinstance(tiling, VectorTiling):
        vector_linear(
            x,
            weight,
            bias,
            out,
            tiling,
            norm=norm,
            joined=joined,
            adds=adds,
            activation=activation,
            gated=gated,
            multiplier=multiplier,
            pdl=pdl,
        )
    else:
        assert norm is None
        assert joined is None
        dot_linear(
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


def small_linear_plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    joined: Joined | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    multiplier: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if joined is not None:
        added = joined.delta.float()
        added = added * torch.rsqrt(added.square().mean(-1, keepdim=True) + joined.eps) * joined.weight.float()
        x = joined.out.copy_(x.float() + added * joined.multiplier)
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm[1]) * norm[0].float()
    y = wide @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if activation is not None:
        y, up = y.chunk(2, -1) if gated else (y, None)
        y = PLAIN[activation](y) if up is None else PLAIN[activation](y) * up
    if residual is not None:
        return residual.copy_(residual.float() + y * multiplier)
    return y.to(out_dtype or x.dtype)
