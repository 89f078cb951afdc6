"""Multiplier and soft cap of logits, after the head's matmul.

In one pass, because a vocabulary's rows are the widest there are. The plain twin is `finished_logits_plain`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def finished_logits(logits: Tensor, *, multiplier: float = 1.0, softcap: float | None = None) -> Tensor:
    """[rows, tokens] -> cap * tanh(multiplier * logits / cap), in float32; without a cap, in place. Rows must be
    contiguous.
    """
    if multiplier == 1.0 and softcap is None:
        return logits
    assert logits.is_contiguous()
    out = logits if softcap is None else torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _finish_kernel[(triton.cdiv(logits.numel(), _BLOCK),)](
        logits,
        out,
        logits.numel(),
        multiplier,
        softcap or 0.0,
        capped=softcap is not None,
        block=_BLOCK,
        num_warps=8,
    )
    return out


def finished_logits_plain(logits: Tensor, *, multiplier: float = 1.0, softcap: float | None = None) -> Tensor:
    wide = logits.float() * multiplier
    return wide.to(logits.dtype) if softcap is None else torch.tanh(wide / softcap) * softcap


@triton.jit(do_not_specialize=["count"])
def _finish_kernel(
    logits: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    multiplier: tl.tensor,
    softcap: tl.tensor,
    capped: tl.constexpr,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(logits + at, mask=at < count, other=0.0).to(tl.float32) * multiplier
    if capped:
        # tanh, by way of an exponential that cannot overflow.
        shrunk = tl.exp(tl.abs(value) * (-2.0 / softcap))
        capped_size = (1.0 - shrunk) / (1.0 + shrunk) * softcap
        value = tl.where(value < 0, -capped_size, capped_size)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)
