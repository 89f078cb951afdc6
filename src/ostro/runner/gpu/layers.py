"""Decides from its description whether the fused kernels can run a model, and collects its layers' modules."""

from dataclasses import dataclass
from typing import TypeGuard

from ostro.models import architecture as arch
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.layers import Attention, GatedMLP, RMSNorm


def fusible(model: Model) -> TypeGuard[Decoder]:
    return why_not_fused(model) is None


def why_not_fused(model: Model) -> str | None:
    """The part of the model that the kernels do not support; None if they support all."""
    return unfused_part(model.described) if isinstance(model, Decoder) else "its layers run several times a token"


def unfused_part(described: arch.Architecture) -> str | None:
    head = described.head
    if described.embedding.positions is not None:
        return "its positions are learned"
    if described.norm.kind != "rms":
        return "it has layer norms"
    if head is not None and head.scale != 1.0:
        return "its logits are scaled"
    return next((part for part in map(_unfused_part, described.layers) if part is not None), None)


def _unfused_part(layer: arch.Layer) -> str | None:
    attention, qk_norm = layer.attention, layer.attention.qk_norm
    parts = {
        "its norms stand elsewhere than before attention and MLP": layer.norms
        != (layer.attention_norm, layer.mlp_norm),
        "it has layer norms": any(norm.kind != "rms" for norm in layer.norms),
        "its norm weights are stored as differences from one": any(norm.offset for norm in layer.norms),
        "it has layers without rope": attention.rope is None,
        "its queries and keys are normed over all heads together": qk_norm is not None and qk_norm.over != "head",
        "its MLPs have no gates": not layer.mlp.gated,
        "what its layers add is scaled": layer.residual_scale != 1.0,
        "its attention and MLP read the same stream": layer.parallel,
    }
    return next((part for part, is_there in parts.items() if is_there), None)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The modules of a fusible layer, with precise types."""

    attention: Attention
    mlp: GatedMLP
    attention_norm: RMSNorm
    mlp_norm: RMSNorm
    rope: int
    activation: arch.Activation


def fused_layers(model: Decoder) -> list[FusedLayer]:
    """The layers of a fusible model."""
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
