"""A projection's matmul on a GPU, with the kernels for its weights' format."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostro.backends.cuda.choices import Choices
from ostro.kernels.gpu.epilogue import Epilogue
from ostro.kernels.gpu.fp8 import (
    MOST_FEW,
    default_tiling,
    fp8_linear,
    fp8_linear_plain,
    fp8_small_linear,
    fp8_small_linear_plain,
    quantize_weight,
)
from ostro.kernels.gpu.packed import default_tiling as packed_tiling
from ostro.kernels.gpu.packed import is_fused, packed_linear, packed_linear_plain, packed_small_linear
from ostro.kernels.gpu.packed_words import Packed
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Prologue
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.tilings import EpilogueKind, Matmul, Tiling
from ostro.torch_models.layers import Linear, Matrix
from ostro.torch_models.shard import Collective


class QuantizedLinear(Linear):
    """A projection whose weights have fewer bits than its inputs. Its own `matmul` is the plain twin of the functions
    below.
    """

    def __init__(self, plain: Linear) -> None:
        """Takes the place of a projection, whose weight need not be in memory."""
        out_features, in_features = plain.shape
        with torch.device("meta"):
            super().__init__(in_features, out_features)
        self.bias, self.reduce, self.own = plain.bias, plain.reduce, plain.own


class Fp8Linear(QuantizedLinear):
    """A projection with 8-bit floats, and one scale per output."""

    def __init__(self, plain: Linear, small: Tensor, scale: Tensor) -> None:
        super().__init__(plain)
        self.weight = nn.Parameter(small, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    @classmethod
    def quantized(cls, plain: Linear, group: Collective | None = None) -> Self:
        """If a rank has only part of the inputs, its `group` agrees on the scales, so that they are those of the whole
        rows.
        """
        agree = None if group is None or plain.reduce is None else group.max
        return cls(plain, *quantize_weight(plain.weight.data, agree))

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) <= MOST_FEW:
            return fp8_small_linear_plain(x, self.weight, self.scale, epilogue=Epilogue(bias))
        return fp8_linear_plain(x, self.weight, self.scale, bias)


class PackedLinear(QuantizedLinear):
    """A projection with integers of 4 or 8 bits, and scales for groups of inputs."""

    def __init__(self, plain: Linear, packed: Packed) -> None:
        super().__init__(plain)
        self._shape = packed.shape
        del self.weight
        # As buffers, because parameters define the model's dtype; as bytes, which tell the number of bits.
        held = packed.words.view(torch.uint8 if packed.bits == 4 else torch.int8)
        self.register_buffer("weight", held, persistent=False)
        self.register_buffer("pairs", packed.pairs, persistent=False)
        self.pairs: Tensor
        self._bits, self._group, self._has_minimum = packed.bits, packed.group, packed.has_minimum

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def packed_weight(self) -> Packed:
        return Packed(self.weight.view(torch.int32), self.pairs, self._bits, self._group, self._has_minimum)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_linear_plain(x, self.packed_weight, Epilogue(bias))


@dataclass(frozen=True, slots=True, eq=False)
class FusedMatmul:
    """A layer's projection with its epilogue, built once per layer by `fused_matmul`."""

    linear: Linear
    epilogue: Epilogue
    """What our own kernel for few rows does with the result."""
    biased: Epilogue
    """The bias alone, for many rows: the rest of the epilogue has kernels of its own there."""
    key: Matmul
    """The key to the choice of its kernel."""

    def tiling(self, rows: int, choices: Choices) -> Tiling | None:
        return own_tiling(self.linear, self.key, rows, choices)


def fused_matmul(
    linear: Linear,
    *,
    activation: str | None = None,
    gated: bool = False,
    adds: bool = False,
    multiplier: float = 1.0,
) -> FusedMatmul:
    """The multiplier applies only to a result that is added to the stream."""
    bias = linear.bias
    epilogue = Epilogue(bias, activation, gated, adds, multiplier if adds else 1.0)
    biased = epilogue if epilogue.kind == "plain" else Epilogue(bias)
    return FusedMatmul(linear, epilogue, biased, matmul_of(linear, epilogue.kind))


def matmul_of(matrix: Matrix, epilogue: EpilogueKind = "plain") -> Matmul:
    """A matrix's matmul as the key to the choice of its kernel."""
    bits = matrix.packed_weight.bits if isinstance(matrix, PackedLinear) else 8 * matrix.weight.element_size()
    return Matmul(*matrix.shape, bits, epilogue)


def own_tiling(matrix: Matrix, matmul: Matmul, rows: int, choices: Choices) -> Tiling | None:
    """How our own kernel is to compute a matrix's matmul; None if the library is to."""
    gated = matmul.is_gated
    if isinstance(matrix, Fp8Linear):
        return default_tiling(rows, *matrix.shape, gated=gated) if rows <= MOST_FEW else None
    if isinstance(matrix, PackedLinear):
        return packed_tiling(rows, matrix.packed_weight, gated=gated) if is_fused(rows, gated=gated) else None
    return choices.tiling(matmul, rows)


def large_matmul(matmul: FusedMatmul, x: Tensor, *, pdl: bool = False) -> Tensor:
    """For many rows: x Wᵀ + b alone."""
    linear = matmul.linear
    if isinstance(linear, Fp8Linear):
        return fp8_linear(x, linear.weight, linear.scale, linear.bias, pdl=pdl)
    if isinstance(linear, PackedLinear):
        return packed_linear(x, linear.packed_weight, matmul.biased, pdl=pdl)
    return F.linear(x, linear.weight, linear.bias)


def small_matmul(
    matmul: FusedMatmul,
    x: Tensor,
    prologue: Prologue = NO_PROLOGUE,
    *,
    residual: Tensor | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Tensor:
    """Small-batch matmul with fused prologue and epilogue: see `small_linear`."""
    linear, epilogue = matmul.linear, matmul.epilogue
    if isinstance(linear, Fp8Linear):
        weight, scale = linear.weight, linear.scale
        return fp8_small_linear(x, weight, scale, prologue, epilogue, residual=residual, tiling=tiling, pdl=pdl)
    if isinstance(linear, PackedLinear):
        packed = linear.packed_weight
        return packed_small_linear(x, packed, prologue, epilogue, residual=residual, tiling=tiling, pdl=pdl)
    return small_linear(x, linear.weight, prologue, epilogue, residual=residual, tiling=tiling, pdl=pdl)
