"""Which models the native core has kernels for, by their descriptions. Imports no torch."""

from collections.abc import Mapping

from ostro.kernels.cpu.library import HEAD_MULTIPLE, MOST_HEAD, After
from ostro.models.architecture import Activation, Architecture, Description, Layer

ACTIVATIONS: Mapping[Activation, After] = {"silu": After.SILU, "gelu_tanh": After.GELU}


class NotNative(Exception):
    """Why a model cannot run natively."""


class WrongPanel(NotNative):
    """Why it cannot with panels so wide; with others it may."""


def native_architecture(described: Description, panel: int) -> Architecture:
    """The description of a model that the native core can run. Raises NotNative for parts without kernels."""
    if not isinstance(described, Architecture) or described.embedding.positions is not None:
        raise NotNative("its family has no native kernels")
    shape = described.shape
    if shape.head_dim % HEAD_MULTIPLE or shape.head_dim > MOST_HEAD:
        raise NotNative(f"its heads are {shape.head_dim} wide, not a multiple of {HEAD_MULTIPLE} up to {MOST_HEAD}")
    if shape.hidden_size % panel:
        raise WrongPanel(f"its hidden size, {shape.hidden_size}, is no multiple of {panel}")
    for layer in described.layers:
        _check_layer(layer)
    return described


def _check_layer(layer: Layer) -> None:
    attention, mlp = layer.attention, layer.mlp
    both_or_none = (layer.attention_post_norm is None) == (layer.mlp_post_norm is None)
    if layer.attention_norm is None or layer.mlp_norm is None or not both_or_none:
        raise NotNative("its layers have no native kernels")
    if any(norm.kind != "rms" for norm in layer.norms) or any(
        projection.transposed for projection in (attention.qkv, attention.output, mlp.up, mlp.down)
    ):
        raise NotNative("its layers have no native kernels")
    if attention.qk_norm is not None and attention.qk_norm.over != "head":
        raise NotNative("its attention has no native kernel")
    if not mlp.gated or mlp.activation not in ACTIVATIONS:
        raise NotNative("its activation has no native kernel")
