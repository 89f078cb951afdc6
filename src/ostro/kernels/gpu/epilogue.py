"""Matmul epilogues: output scales, bias, activation, and adding to the residual, before the result is stored.

    y ──(· scales)──(+ bias)──┬───────────────────────────> out
                              ├─(· multiplier + residual)─> residual, in place
                              ├─ act ─────────────────────> out
                              └─ act(gate) * up ──────────> out, where the weight holds gate above up

`Epilogue` says which of these; `finish` does it in a kernel, on finished accumulators. Neither knows how they were
computed.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostro.kernels.gpu.mlp import PLAIN, activate
from ostro.kernels.gpu.tilings import EpilogueKind


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """What a matmul does with its result. Built once per layer: kernels are launched with its `flags`."""

    bias: Tensor | None = None
    activation: str | None = None
    """A name in mlp.PLAIN."""
    gated: bool = False
    """Whether the result is act(gate) * up, half as wide as the weight is high."""
    adds: bool = False
    """Whether the result, times the `multiplier`, is added to the residual stream."""
    multiplier: float = 1.0
    flags: dict[str, object] = field(init=False, repr=False, compare=False)
    """The constants of every matmul kernel that depend on nothing but this."""

    def __post_init__(self) -> None:
        assert self.activation is not None or not self.gated
        assert self.activation is None or not self.adds
        assert self.adds or self.multiplier == 1.0
        flags = {
            "has_bias": self.bias is not None,
            "adds": self.adds,
            "activation": self.activation or "",
            "gated": self.gated,
            "multiplier": self.multiplier,
        }
        object.__setattr__(self, "flags", flags)

    @property
    def kind(self) -> EpilogueKind:
        if self.activation is not None:
            return "gated" if self.gated else "activated"
        return "added" if self.adds else "plain"

    @property
    def copies(self) -> int:
        """Rows of the weight per output."""
        return 2 if self.gated else 1

    def target(self, x: Tensor, out_features: int, residual: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Where the result is stored: the residual if it is added, or else new memory, [rows, outs]."""
        assert (residual is not None) == self.adds
        if residual is not None:
            return residual
        return torch.empty(len(x), out_features // self.copies, dtype=dtype or x.dtype, device=x.device)

    def bias_or(self, nothing: Tensor) -> Tensor:
        """The bias as a kernel argument; without one, a stand-in that the kernel does not read."""
        return nothing if self.bias is None else self.bias

    def plain(self, y: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Applies the epilogue to a float32 result y: the plain twin of `finish`."""
        if self.bias is not None:
            y = y + self.bias.float()
        if self.activation is not None:
            y, up = y.chunk(2, -1) if self.gated else (y, None)
            y = PLAIN[self.activation](y) if up is None else PLAIN[self.activation](y) * up
        if residual is not None:
            return residual.copy_(residual.float() + y * self.multiplier)
        return y.to(dtype)


NO_EPILOGUE = Epilogue()


@triton.jit
def previous(at: tl.tensor, mask: tl.tensor, adds: tl.constexpr) -> tl.tensor:
    """The values that the result is added to. Loaded early so as not to delay the store."""
    if adds:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.zeros(at.shape, tl.float32)


@triton.jit
def finish(
    y: tl.tensor,
    y_up: tl.tensor,
    before: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    mask: tl.tensor,
    outs: tl.tensor,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    multiplier: tl.constexpr,
) -> None:
    """Stores outputs n of one or more rows, where the mask is true. If gated, y is the gate and `y_up` the up half."""
    inside = n < outs
    if has_scale:
        y *= tl.load(scale + n, mask=inside, other=0.0)
    if has_bias:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if activation != "":
        y = activate(y, activation)
    if gated:
        if has_scale:
            y_up *= tl.load(scale + outs + n, mask=inside, other=0.0)
        if has_bias:
            y_up += tl.load(bias + outs + n, mask=inside, other=0.0).to(tl.float32)
        y *= y_up
    if multiplier != 1.0:
        y *= multiplier
    if adds:
        y += before
    tl.store(out + n, y.to(out.dtype.element_ty), mask=mask)
