"""A projection's matmul on a GPU, with the kernels for its weights' format."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostro.kernels.gpu.fp8 import (
    MOST_FEW,
    default_tiling,
    fp8_linear,
    fp8_linear_plain,
    fp8_small_linear,
    fp8_small_linear_plain,
    quantize_weight,
)
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.tilings import Epilogue, Product, Tiling
from ostro.kernels.gpu.vector_linear import Joined
from ostro.runner.gpu.choices import Choices
from ostro.torch_models.layers import Linear, Matrix
from ostro.torch_models.shard import Collective


class Fp8Linear(Linear):
    """A projection with 8-bit weights. Its own `product` is the plain twin of the two functions below."""

    def __init__(self, plain: Linear, group: Collective | None = None) -> None:
        """Of a rank's part of the inputs, the `group` finds the scales, so that they are those of the whole rows."""
        out_features, in_features = plain.weight.shape
        with torch.device("meta"):
            super().__init__(in_features, out_features)
        agree = None if group is None or plain.reduce is None else group.max
        small, scale = quantize_weight(plain.weight.data, agree)
        self.weight = nn.Parameter(small, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias, self.reduce = plain.bias, plain.reduce

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        plain = fp8_small_linear_plain if len(x) <= MOST_FEW else fp8_linear_plain
        return plain(x, self.weight, self.scale, bias)


def product_of(layer: Matrix, epilogue: Epilogue = "plain") -> Product:
    """What a layer's matmul is to the choice of its kernel."""
    out_features, in_features = layer.weight.shape
    return Product(out_features, in_features, 8 * layer.weight.element_size(), epilogue)


def own_tiling(layer: Matrix, rows: int, epilogue: Epilogue, choices: Choices) -> Tiling | None:
    """How our own kernel is to compute a layer's matmul; None if the library is to."""
    if isinstance(layer, Fp8Linear):
        return default_tiling(rows, *layer.weight.shape, gated=epilogue == "gated") if rows <= MOST_FEW else None
    return choices.tiling(product_of(layer, epilogue), rows)


def product(layer: Linear, x: Tensor, *, pdl: bool = False) -> Tensor:
    """Matmul for many rows."""
    if isinstance(layer, Fp8Linear):
        return fp8_linear(x, layer.weight, layer.scale, layer.bias, pdl=pdl)
    return F.linear(x, layer.weight, layer.bias)


def small_product(
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
        assert joined is None
        return fp8_small_linear(
            x,
            layer.weight,
            layer.scale,
            layer.bias,
            norm=norm,
            residual=residual,
            activation=activation,
            gated=gated,
            multiplier=multiplier,
            tiling=tiling,
            pdl=pdl,
        )
    return small_linear(
        x,
        layer.weight,
        layer.bias,
        norm=norm,
        joined=joined,
        residual=residual,
        activation=activation,
        gated=gated,
        multiplier=multiplier,
        tiling=tiling,
        pdl=pdl,
    )
