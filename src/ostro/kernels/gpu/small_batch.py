"""Small-batch matmul with fused prologue and epilogue.

    x ──(prologue)──> · weightᵀ ──(epilogue)──> out, or the residual

The tiling decides between `vector_linear`, for one row or very few, `slice_linear`, for up to 16, and `dot_linear`: see
`tilings`.

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
from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Prologue
from ostro.kernels.gpu.slice_linear import slice_linear
from ostro.kernels.gpu.tilings import SliceTiling, Tiling, VectorTiling, default_tiling
from ostro.kernels.gpu.vector_linear import vector_linear

UNUSABLE = (TritonError, RuntimeError)
"""Raised for a tiling that the device cannot run, such as one that needs more shared memory than there is."""


def small_linear(
    x: Tensor,
    weight: Tensor,
    prologue: Prologue = NO_PROLOGUE,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out], for 1 to 256 rows. The dot kernel has no prologue. Where the
    epilogue adds, the result is added to the `residual` [rows, out] in place, and it is returned.

    The first call on a device must not be inside a graph capture: it allocates the counters of split matmuls.
    """
    assert weight.is_contiguous()
    if tiling is None:
        tiling = default_tiling(len(x), *weight.shape, bits=8 * weight.element_size(), gated=epilogue.gated)
    out = epilogue.target(x, weight.shape[0], residual, out_dtype)
    if isinstance(tiling, VectorTiling):
        vector_linear(x, weight, out, tiling, prologue, epilogue, pdl=pdl)
    elif isinstance(tiling, SliceTiling):
        slice_linear(x, weight, out, tiling, prologue, epilogue, pdl=pdl)
    else:
        assert prologue.is_empty
        dot_linear(x, weight, out, tiling, epilogue, pdl=pdl)
    return out


def norms_itself(tiling: Tiling | None, dtype: torch.dtype) -> bool:
    """Whether a tiling for several rows has their norm as a prologue, which of float16 none can."""
    return isinstance(tiling, SliceTiling) and tiling.folds and dtype != torch.float16


def small_linear_plain(
    x: Tensor,
    weight: Tensor,
    prologue: Prologue = NO_PROLOGUE,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return epilogue.plain(prologue.plain(x) @ weight.float().T, residual, out_dtype or x.dtype)
