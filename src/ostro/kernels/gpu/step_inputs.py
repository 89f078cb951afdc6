"""Unpacks one step's inputs on the device: what the host sent, and tokens that it did not know yet.

A token that the previous step is still sampling is sent as -1 - (its row there), and read from that step's results:

    sent       [ 17, -1, -3 ]       results of the step before   [ 801, 5, 42 ]
    tokens     [ 17, 801, 42 ]

The plain twin is `unpack_plain`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of the array that the host sends.
TOKEN, POSITION, LENGTH, SLOT, SAMPLER, STATE, CAPTURED = range(7)
FIELDS = 7

_BLOCK = 256


class StepInputs(NamedTuple):
    """One entry per token."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    """The token's KV cache slot, int64; -1 for none."""


def unpack(sent: Tensor, sampled: Tensor) -> StepInputs:
    """`sent` is int32 [FIELDS, tokens], possibly a view of wider rows; `sampled` has the previous step's results."""
    count = sent.shape[1]
    tokens, positions, slots = (torch.empty(count, dtype=torch.int64, device=sent.device) for _ in range(3))
    _unpack_kernel[(triton.cdiv(count, _BLOCK),)](
        sent, sampled, tokens, positions, slots, count, sent.stride(0), block=_BLOCK, num_warps=4
    )
    return StepInputs(tokens, positions, slots)


def unpack_plain(sent: Tensor, sampled: Tensor) -> StepInputs:
    token, position, slot = sent[[TOKEN, POSITION, SLOT]].long()
    token = torch.where(token < 0, sampled[(-1 - token).clamp(min=0)].long(), token)
    return StepInputs(token, position, slot)


@triton.jit(do_not_specialize=["sent", "count", "stride"])
def _unpack_kernel(
    sent: tl.tensor,
    sampled: tl.tensor,
    tokens: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    token = tl.load(sent + at, mask=inside, other=0)
    waits = token < 0
    told = tl.load(sampled + tl.where(waits, -1 - token, 0), mask=inside & waits, other=0)
    tl.store(tokens + at, tl.where(waits, told, token).to(tl.int64), mask=inside)
    tl.store(positions + at, tl.load(sent + stride + at, mask=inside, other=0).to(tl.int64), mask=inside)
    tl.store(slots + at, tl.load(sent + 3 * stride + at, mask=inside, other=-1).to(tl.int64), mask=inside)
