"""Gates of what attention's heads attend to: x * sigmoid(gates), in one pass. The plain twin is `scaled_plain`."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 1024


def scaled_by_gates(x: Tensor, gates: Tensor, *, pdl: bool = False) -> Tensor:
    """Both [tokens, width]; the gates may be parts of longer rows. Rows keep their bits, whatever the others."""
    out = torch.empty_like(x)
    _scaled_kernel[(len(x), triton.cdiv(x.shape[1], BLOCK))](
        x, gates, out, x.shape[1], x.stride(0), gates.stride(0), block=BLOCK, pdl=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def scaled_plain(x: Tensor, gates: Tensor) -> Tensor:
    return (x.float() * gates.float().sigmoid()).to(x.dtype)


@triton.jit
def _scaled_kernel(
    x: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    gates_stride: tl.tensor,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < width
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gates + row * gates_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32) * tl.sigmoid(gate)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)
