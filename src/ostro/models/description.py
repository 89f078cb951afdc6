"""The kinds of description that a model's config can have, and which of them every backend runs."""

from ostro.models.architecture import Architecture, Experts, HrmText, Layer, MixerPair
from ostro.models.encoder import Encoder
from ostro.models.hrm_config import HrmConfig

Causal = Architecture | HrmText
"""Descriptions of models with a KV cache."""
Description = Causal | Encoder | HrmConfig


def plain_decoder(described: Description) -> Architecture | str:
    """The description of a decoder that any backend may run, or the reason why the model is not one."""
    match described:
        case Architecture():
            return torch_only(described) or described
        case HrmText():
            return "its layers run several times per token"
        case Encoder():
            return "it is an encoder"
        case HrmConfig():
            return "it is an HRM"


def torch_only(described: Architecture) -> str | None:
    """The first part of a model that only torch's own modules compute, as a reason; None if there is none. The native
    core, fused kernels, JAX and several devices refuse such models.
    """
    if described.states:
        return "its layers keep a recurrent state"
    if described.shape.layer_heads:
        return "its layers differ in their heads"
    if described.layer_inputs is not None:
        return "its layers have inputs of their own"
    return next(filter(None, map(_torch_only, described.layers)), None)


def _torch_only(layer: Layer) -> str | None:
    if layer.mixer is None or layer.mlp is None:
        return "its layers have a mixer or an MLP, not both"
    if isinstance(layer.mixer, MixerPair):
        return "its layers have two mixers each"
    if any(projection.is_scaled for projection in layer.projections):
        return "its matrices are scaled on loading"
    attention, mlp = layer.attention, layer.mlp
    if isinstance(mlp, Experts) and mlp.scales_inputs:
        return "its router scales what experts read"
    if mlp.activation == "relu2":
        return "its MLPs square their ReLUs"
    if isinstance(mlp, Experts) and not mlp.gated:
        return "its experts have no gates"
    if isinstance(mlp, Experts) and mlp.sigmoid is not None:
        return "its router weighs experts by sigmoids"
    if layer.side is not None:
        return "it has experts beside its MLPs"
    if attention.spec.chunk is not None:
        return "its layers attend within chunks"
    if attention.query_scaling is not None:
        return "its queries are scaled by position"
    if attention.qk_norm is not None and not attention.qk_norm.query.weighted:
        return "its norms of queries and keys have no weights"
    if attention.gated:
        return "gates scale what its heads attend to"
    if attention.value_norm is not None:
        return "its values are normed"
    if attention.values_are_keys:
        return "its values are its keys"
    if layer.stream_scale is not None:
        return "a stored number scales each layer's result"
    return None
