"""Multiplies norms' weights into the matrices after them, once, on loading.

    norm(x) · Wᵀ = (x · (W · diag(norm's weight))ᵀ) · rsqrt(mean x² + eps)

What is left of an RMS norm is a factor for each row, which a matmul's kernel can apply to its result. The products are
rounded to the weights' format once more: `bench/fp8_accuracy.py` says what that costs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ostro.kernels.gpu.norm import NormWeights
from ostro.runner.gpu.layer_plan import LayerPlan
from ostro.torch_models.layers import Linear


def fold_norms(layers: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    """Changes the model that the layers belong to, where it can be done. The norms' weights are one afterwards, so that
    every way to compute the model, its own `forward` as well, still gives the same results up to rounding.
    """
    return tuple(_fold(layer) if layer.can_fold_norms else layer for layer in layers)


def _fold(layer: LayerPlan) -> LayerPlan:
    assert layer.attention_norm is not None
    assert layer.mlp_norm is not None
    _absorb(layer.attention.qkv, layer.attention_norm)
    _absorb(layer.mlp.up, layer.mlp_norm)
    return replace(layer, folded_norms=True)


@torch.no_grad()
def _absorb(linear: Linear, norm: NormWeights) -> None:
    assert linear.packed is None, "a second copy of the weights would not change"
    # Multiplied in float32, rounded once.
    linear.weight.mul_(norm.weight)
    norm.weight.fill_(1.0)
