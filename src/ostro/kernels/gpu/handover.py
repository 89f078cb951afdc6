"""Hands rows over to the CPU with their experts: what programs of experts read (`backends.native.expert_steps`).

    staged    [ the row, in float32 | numbers of its experts | their weights ]      a row of the step each

A row that only pads a graph has no KV cache slot: its experts' numbers are -1, so that the CPU does nothing for it. The
plain twin is `hand_over_plain`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostro.kernels.gpu.routing import Routed
from ostro.kernels.gpu.tilings import power_of_two

_BLOCK = 1024


def hand_over(x: Tensor, routed: Routed, slots: Tensor, staged: Tensor) -> None:
    """x [rows, in], slots [rows] -> the first rows of staged, from the first column on."""
    rows, width = x.shape
    chosen = routed.experts.shape[1]
    assert staged.dtype == torch.float32
    assert routed.experts.is_contiguous()
    assert routed.weights.is_contiguous()
    assert staged.shape[0] >= rows
    assert staged.shape[1] >= width + 2 * chosen
    _hand_over_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x,
        routed.experts,
        routed.weights,
        slots,
        staged,
        width,
        x.stride(0),
        staged.stride(0),
        chosen=chosen,
        ranks=power_of_two(chosen),
        block=_BLOCK,
        num_warps=4,
    )


def hand_over_plain(x: Tensor, routed: Routed, slots: Tensor, staged: Tensor) -> None:
    experts = torch.where((slots < 0)[:, None], -1, routed.experts)
    given = torch.cat((x.float(), experts.float(), routed.weights), 1)
    staged[: len(x), : given.shape[1]] = given


@triton.jit
def _hand_over_kernel(
    x: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    slots: tl.tensor,
    staged: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    staged_stride: tl.tensor,
    chosen: tl.constexpr,
    ranks: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    to = staged + row * staged_stride
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    tl.store(to + column, tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32), mask=inside)
    if tl.program_id(1) == 0:
        rank = tl.arange(0, ranks)
        there = rank < chosen
        number = tl.load(experts + row * chosen + rank, mask=there, other=0).to(tl.float32)
        # All of a row are -1 or none is.
        pads = tl.load(slots + row) < 0
        tl.store(to + width + rank, tl.where(pads, -1.0, number), mask=there)
        weight = tl.load(weights + row * chosen + rank, mask=there, other=0.0)
        tl.store(to + width + chosen + rank, weight, mask=there)
