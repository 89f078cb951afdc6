"""Decides from a model's description whether the native core can run it. Imports no torch."""

from collections.abc import Mapping

from ostro.kernels.cpu.library import HEAD_MULTIPLE, MOST_HEAD, MOST_TAPS, After
from ostro.models.architecture import MLP, Activation, Architecture, Experts, Layer, ModelShape, Recurrent
from ostro.models.description import Description, plain_decoder
from ostro.models.encoder import Encoder
from ostro.models.expert_layers import ExpertLayers

_EITHER: Mapping[Activation, After] = {"silu": After.SILU, "gelu_tanh": After.GELU, "gelu": After.EXACT_GELU}
GATED: Mapping[Activation, After] = {**_EITHER, "clamped_silu": After.CLAMPED_SILU}
ACTIVATIONS: Mapping[Activation, After] = {**_EITHER, "relu": After.RELU, "relu2": After.RELU2}

MOST_TEXT = 1 << 20
"""The longest context of an encoder: rotations are stored for all of it, and no KV cache limits a text's length."""


class NotNative(Exception):
    """The reason why a model cannot run natively."""


class WrongPanel(NotNative):
    """It cannot run with this panel width, but might with another."""


def native_architecture(described: Description, panel: int) -> Architecture | Encoder:
    """The description of a model that the native core can run. Raises NotNative for parts without kernels."""
    found = described if isinstance(described, Encoder) else plain_decoder(described, hybrid=True)
    if isinstance(found, str):
        raise NotNative(found)
    _check_layers(found, panel)
    if isinstance(found, Encoder):
        _check_encoder(found)
    return found


def check_native(described: Description | ExpertLayers, panel: int) -> None:
    """Raises NotNative for parts without kernels."""
    if not isinstance(described, ExpertLayers):
        native_architecture(described, panel)
        return
    _check_hidden_size(described.shape, panel)
    for mixture in described.mixtures:
        _check_activation(mixture)


def _check_layers(described: Architecture | Encoder, panel: int) -> None:
    shape = described.shape
    if shape.head_dim % HEAD_MULTIPLE or shape.head_dim > MOST_HEAD:
        raise NotNative(f"its heads are {shape.head_dim} wide, not a multiple of {HEAD_MULTIPLE} up to {MOST_HEAD}")
    _check_hidden_size(shape, panel)
    for layer in described.layers:
        if isinstance(layer, Layer) and layer.recurrent is not None:
            _check_mixer(layer.recurrent)
        for mlp in _mlps(layer.mlp):
            _check_activation(mlp)


def _check_mixer(mixer: Recurrent) -> None:
    if mixer.conv.taps > MOST_TAPS:
        raise NotNative(f"its convolutions have {mixer.conv.taps} taps, and kernels at most {MOST_TAPS}")


def _check_hidden_size(shape: ModelShape, panel: int) -> None:
    if shape.hidden_size % panel:
        raise WrongPanel(f"its hidden size, {shape.hidden_size}, is not a multiple of {panel}")


def _check_activation(mlp: MLP | Experts) -> None:
    if mlp.activation not in (GATED if mlp.gated else ACTIVATIONS):
        raise NotNative(f"its activation, {mlp.activation}, has no native kernel")


def _check_encoder(described: Encoder) -> None:
    longest = described.shape.max_seq_len
    if longest > MOST_TEXT:
        raise NotNative(
            f"its context of {longest:,} tokens is longer than {MOST_TEXT:,} (max_seq_len sets a shorter one)"
        )
    activation = None if described.head is None else described.head.activation
    if activation not in (None, "tanh") and activation not in ACTIVATIONS:
        raise NotNative(f"its head's activation, {activation}, has no native kernel")


def _mlps(mlp: MLP | Experts | None) -> tuple[MLP | Experts, ...]:
    """A layer's MLPs, including the one that a mixture's tokens share."""
    if mlp is None:
        return ()
    return (mlp,) if isinstance(mlp, MLP) or mlp.shared is None else (mlp, mlp.shared)
