"""The activation of an MLP: act(y), or if it is gated act(gate) * up, in one pass over both.

Gate and up are adjacent in a row, as the fused projection writes them. The plain twin is `activated_plain`.
"""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.models.architecture import CLAMP, SLOPE

BLOCK = 1024

PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""The activations implemented in kernels, by name."""
GATES = (*PLAIN, "clamped_silu")
"""The activations that may gate."""
_CLAMP, _SLOPE = tl.constexpr(CLAMP), tl.constexpr(SLOPE)


def activated(y: Tensor, activation: str, *, gated: bool, pdl: bool = False) -> Tensor:
    """y [tokens, inner] -> act(y); if gated, [tokens, 2 * inner] -> act(gate) * up, [tokens, inner]. `activation` is a
    name in PLAIN.
    """
    assert activation in PLAIN, activation
    tokens, inner = y.shape[0], y.shape[1] // (2 if gated else 1)
    out = y.new_empty(tokens, inner)
    _activated_kernel[(tokens, triton.cdiv(inner, BLOCK))](
        y,
        out,
        inner,
        y.stride(0),
        activation=activation,
        gated=gated,
        block=BLOCK,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def activated_plain(y: Tensor, activation: str, *, gated: bool) -> Tensor:
    if not gated:
        return PLAIN[activation](y.float()).to(y.dtype)
    gate, up = y.float().chunk(2, -1)
    return (PLAIN[activation](gate) * up).to(y.dtype)


@triton.jit
def _activated_kernel(
    source: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    stride: tl.tensor,
    activation: tl.constexpr,
    gated: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < inner
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(source + token * stride + column, mask=mask, other=0.0).to(tl.float32)
    if gated:
        up = tl.load(source + token * stride + inner + column, mask=mask, other=0.0).to(tl.float32)
        value = activate(value, activation) * up
    else:
        value = activate(value, activation)
    tl.store(out + token * inner + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def activate(x: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    """Applies one of PLAIN's activations to float32."""
    if activation == "silu":
        y = x * tl.sigmoid(x)
    elif activation == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":
        # (1 + tanh z) / 2 is the sigmoid of 2 z.
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(activation == "relu")
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def gate_up(gate: tl.tensor, up: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    """act(gate) * up in float32, or its clamped variant. `activation` is one of GATES."""
    if activation == "clamped_silu":
        # Comparisons rather than min and max: NaN stays NaN.
        gate = tl.where(gate > _CLAMP, _CLAMP, gate)
        up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up))
        y = gate * tl.sigmoid(gate * _SLOPE) * (up + 1.0)
    else:
        y = activate(gate, activation) * up
    return y
