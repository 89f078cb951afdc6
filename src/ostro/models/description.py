"""The kinds of description that a model's config can have, and which of them every backend runs."""

from ostro.models.architecture import Architecture, Attention, Experts, Heads, HrmText, Layer
from ostro.models.encoder import Encoder
from ostro.models.hrm_config import HrmConfig

Causal = Architecture | HrmText
"""Descriptions of models with a KV cache."""
Description = Causal | Encoder | HrmConfig


def plain_decoder(described: Description, *, hybrid: bool = False) -> Architecture | str:
    """The description of a decoder that any backend may run, or the reason why the model is not one. For `hybrid`, see
    `torch_only`.
    """
    match described:
        case Architecture():
            return torch_only(described, hybrid=hybrid) or described
        case HrmText():
            return "its layers run several times per token"
        case Encoder():
            return "it is an encoder"
        case HrmConfig():
            return "it is an HRM"


def torch_only(described: Architecture, *, hybrid: bool = False) -> str | None:
    """The first part of a model that only torch's own modules compute, as a reason; None if there is none. The native
    core, fused kernels, JAX and several devices refuse such models; who runs `hybrid` models, with layers that keep a
    state and attention with gates, refuses all others.
    """
    if described.states and not hybrid:
        return "its layers keep a recurrent state"
    if heads_differ(described):
        return "its layers differ in their heads"
    if described.layer_inputs is not None:
        return "its layers have inputs of their own"
    return next(filter(None, (_torch_only(layer, hybrid) for layer in described.layers)), None)


def heads_differ(described: Architecture) -> bool:
    """Whether layers that attend do so with other heads than the model's."""
    shape = described.shape
    own = Heads(shape.num_kv_heads, shape.head_dim)
    pairs = zip(described.layers, shape.layer_heads, strict=False)
    return any(heads != own for layer, heads in pairs if layer.attends is not None)


def _torch_only(layer: Layer, hybrid: bool) -> str | None:
    if (layer.mixer is None or layer.mlp is None) and not hybrid:
        return "its layers have a mixer or an MLP, not both"
    if any(projection.is_scaled for projection in layer.projections) and not hybrid:
        return "its matrices are scaled on loading"
    mlp = layer.mlp
    if isinstance(mlp, Experts) and mlp.scales_inputs:
        return "its router scales what experts read"
    if mlp is not None and mlp.activation == "relu2" and not hybrid:
        return "its MLPs square their ReLUs"
    if isinstance(mlp, Experts) and not mlp.gated and not hybrid:
        return "its experts have no gates"
    if isinstance(mlp, Experts) and mlp.sigmoid is not None and not hybrid:
        return "its router weighs experts by sigmoids"
    if layer.side is not None:
        return "it has experts beside its MLPs"
    if layer.stream_scale is not None:
        return "a stored number scales each layer's result"
    return None if layer.attends is None else _torch_only_attention(layer.attends, hybrid)


def _torch_only_attention(attention: Attention, hybrid: bool) -> str | None:
    if attention.spec.chunk is not None:
        return "its layers attend within chunks"
    if attention.query_scaling is not None:
        return "its queries are scaled by position"
    if attention.qk_norm is not None and not attention.qk_norm.query.weighted:
        return "its norms of queries and keys have no weights"
    if attention.gated and not hybrid:
        return "gates scale what its heads attend to"
    if attention.value_norm is not None:
        return "its values are normed"
    if attention.values_are_keys:
        return "its values are its keys"
    return None
