"""A projection's matmul on a GPU, with the kernels for its weights' format."""

from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostro.backends.cuda.choices import Choices
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
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.tilings import Epilogue, Matmul, Tiling
from ostro.kernels.gpu.vector_linear import Joined
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
        """Of a rank's part of the inputs, the `group` finds the scales, so that they are those of the whole rows."""
        agree = None if group is None or plain.reduce is None else group.max
        return cls(plain, *quantize_weight(plain.weight.data, agree))

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        plain = fp8_small_linear_plain if len(x) <= MOST_FEW else fp8_linear_plain
        return plain(x, self.weight, self.scale, bias)


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
        return packed_linear_plain(x, self.packed_weight, bias)


def matmul_of(layer: Matrix, epilogue: Epilogue = "plain") -> Matmul:
    """What a layer's matmul is to the choice of its kernel."""
    bits = layer.packed_weight.bits if isinstance(layer, PackedLinear) else 8 * layer.weight.element_size()
    return Matmul(*layer.shape, bits, epilogue)


def own_tiling(layer: Matrix, rows: int, epilogue: Epilogue, choices: Choices) -> Tiling | None:
    """How our own kernel is to compute a layer's matmul; None if `matmul` is to."""
    gated = epilogue == "gated"
    if isinstance(layer, Fp8Linear):
        return default_tiling(rows, *layer.shape, gated=gated) if rows <= MOST_FEW else None
    if isinstance(layer, PackedLinear):
        return packed_tiling(rows, layer.packed_weight, gated=gated) if is_fused(rows, gated=gated) else None
    return choices.tiling(matmul_of(layer, epilogue), rows)


def matmul(layer: Linear, x: Tensor, *, pdl: bool = False) -> Tensor:
    """Matmul for many rows."""
    if isinstance(layer, Fp8Linear):
        return fp8_linear(x, layer.weight, layer.scale, layer.bias, pdl=pdl)
    if isinstance(layer, PackedLinear):
        return packed_linear(x, layer.packed_weight, layer.bias, pdl=pdl)
    return F.linear(x, layer.weight, layer.bias)


def small_matmul(
    layer: Linear,
    x: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    joined: Joined | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    multiplier: float = 1.0,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Tensor:
    """Small-batch matmul with fused prologue and epilogue: see `small_linear`."""
    if isinstance(layer, Fp8Linear):
        multiply = partial(fp8_small_linear, x, layer.weight, layer.scale, layer.bias)
    elif isinstance(layer, PackedLinear):
        multiply = partial(packed_small_linear, x, layer.packed_weight, layer.bias)
    else:
        multiply = partial(small_linear, x, layer.weight, layer.bias, joined=joined)
    assert joined is None or not isinstance(layer, QuantizedLinear)
    return multiply(
        norm=norm,
        residual=residual,
        activation=activation,
        gated=gated,
        multiplier=multiplier,
        tiling=tiling,
        pdl=pdl,
    )
