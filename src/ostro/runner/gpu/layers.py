"""Which models the fused kernels can run, by their descriptions, and the modules of such a model's layers."""

from dataclasses import dataclass
from typing import TypeGuard

from ostro.models import architecture as arch
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.layers import Attention, GatedMLP, RMSNorm


def fusible(model: Model) -> TypeGuard[Decoder]:
    """Whether the head and all layers are of the kind that the kernels know."""
    return (
        isinstance(model, Decoder)
        and (model.described.head is None or model.described.head.scale == 1.0)
        and all(map(_is_fusible, model.described.layers))
    )


def _is_fusible(layer: arch.Layer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    return (
        layer.norms == (layer.attention_norm, layer.mlp_norm)
        and all(norm.kind == "rms" and not norm.offset for norm in layer.norms)
        and attention.rope is not None
        and (attention.qk_norm is None or attention.qk_norm.over == "head")
        and mlp.gated
        and layer.residual_scale == 1.0
        and not layer.parallel
    )


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The modules of a fusible layer, by the types that they have there."""

    attention: Attention
    mlp: GatedMLP
    attention_norm: RMSNorm
    mlp_norm: RMSNorm
    rope: int
    activation: arch.Activation


def fused_layers(model: Decoder) -> list[FusedLayer]:
    """Of a model that is fusible."""
    layers = []
    for layer, described in zip(model.layers, model.described.layers, strict=True):
        assert isinstance(layer.mlp, GatedMLP)
        assert isinstance(layer.attention_norm, RMSNorm)
        assert isinstance(layer.mlp_norm, RMSNorm)
        assert described.attention.rope is not None
        layers.append(
            FusedLayer(
                layer.self_attn,
                layer.mlp,
                layer.attention_norm,
                layer.mlp_norm,
                described.attention.rope,
                described.mlp.activation,
            )
        )
    return layers
