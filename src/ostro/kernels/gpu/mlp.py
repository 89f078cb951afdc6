"""The activation of a gated MLP: act(gate) * up, in one pass over both.

Gate and up are adjacent in a row, as the fused projection writes them. The plain twin is `gated_plain`.
"""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 1024

PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""The activations implemented in kernels, by name."""


def gated(gate_up: Tensor, activation: str, *, pdl: bool = False) -> Tensor:
    """gate_up [tokens, 2 * inner] -> act(gate) * up, [tokens, inner]. `activation` is a name in PLAIN."""
    assert activation in PLAIN, activation
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    _gated_kernel[(tokens, triton.cdiv(inner, BLOCK))](
        gate_up,
        out,
        inner,
        gate_up.stride(0),
        activation=activation,
        block=BLOCK,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def gated_plain(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (PLAIN[activation](gate) * up).to(gate_up.dtype)


@triton.jit
def _gated_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    stride: tl.tensor,
    activation: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < inner
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + token * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + inner + column, mask=mask, other=0.0).to(tl.float32)
    product = activate(gate, activation) * up
    tl.store(out + token * inner + column, product.to(out.dtype.element_ty), mask=mask)


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
