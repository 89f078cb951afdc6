"""Matmul prologues: what a GEMV kernel does to its input row before it multiplies.

    delta ──(norm)──(· multiplier)──> + x ──┬──> stream
                                            └──(norm)──> the row that is multiplied

Every program of the kernel repeats all of it: for one row, that costs less than launching another kernel. `norm` does
the same as a kernel of its own, for any number of rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ostro.kernels.gpu.norm import NormWeights, add_norm_plain


class Delta(NamedTuple):
    """A matmul's result that is still to be added to the residual stream: normed and multiplied first."""

    value: Tensor
    norm: NormWeights | None
    multiplier: float


@dataclass(frozen=True, slots=True, eq=False)
class Prologue:
    """What a matmul does to its input rows first. All norms are RMS norms."""

    norm: NormWeights | None = None
    delta: Delta | None = None
    """Added to the residual stream x before the norm: a single row, which is normed itself."""
    stream: Tensor | None = None
    """Where the sum is written: not x itself, which other programs still read."""

    def __post_init__(self) -> None:
        assert self.norm is None or self.norm.kind == "rms"
        if self.delta is not None:
            assert self.delta.norm is not None
            assert self.delta.norm.kind == "rms"
            assert self.stream is not None

    @property
    def is_empty(self) -> bool:
        return self.norm is None and self.delta is None

    def norm_arguments(self, nothing: Tensor) -> tuple[Tensor, float]:
        """The norm's weight and epsilon as kernel arguments; without a norm, stand-ins that it does not read."""
        return (nothing, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)

    def delta_arguments(self, nothing: Tensor) -> tuple[Tensor, Tensor, Tensor, float, float]:
        """The delta, its norm's weight, the stream, the epsilon of the delta's norm, and the multiplier, likewise."""
        delta, stream = self.delta, self.stream
        if delta is None or delta.norm is None or stream is None:
            return nothing, nothing, nothing, 0.0, 1.0
        return delta.value, delta.norm.weight, stream, delta.norm.eps, delta.multiplier

    def plain(self, x: Tensor) -> Tensor:
        """Applies the prologue to rows and returns them in float32: the plain twin of what kernels do."""
        if self.delta is not None and self.stream is not None:
            self.stream.copy_(x)
            add_norm_plain(
                self.stream, self.delta.value, None, delta_norm=self.delta.norm, multiplier=self.delta.multiplier
            )
            x = self.stream
        wide = x.float()
        return wide if self.norm is None else add_norm_plain(wide, None, self.norm)


NO_PROLOGUE = Prologue()
