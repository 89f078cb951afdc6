"""EXAONE 4: norms after attention and MLP, and normed query and key heads. Larger models have sliding windows on three
of four layers, and the fourth does not rotate queries and keys.
"""

from collections.abc import Callable

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import MOST_LAYERS, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers, sliding_layers
from ostro.models.family import Family

_PERIOD = 4


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    window = config.optional_integer("sliding_window")
    slides = sliding_layers(config, shape.num_layers, otherwise=_by_period(config, window))
    act = activation(config, "hidden_act", "silu")
    layers = [
        layer.post_norm(
            layer.attention(
                AttentionSpec(scale=shape.head_dim**-0.5, window=window if sliding else None),
                rope=0 if sliding or window is None else None,
                qk_norm=layer.head_norms(),
            ),
            layer.gated_mlp(act),
        )
        for layer, sliding in zip(hub_layers(config, shape), slides, strict=True)
    ]
    return decoder(config, shape, layers)


def _by_period(config: ConfigReader, window: int | None) -> Callable[[int], bool]:
    """Files without layer types give a period, or a string such as LLLG that spells one out."""
    if window is None:
        return lambda layer: False
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        return lambda layer: pattern[layer % len(pattern)] == "L"
    period = config.integer("sliding_window_pattern", _PERIOD, most=MOST_LAYERS)
    return lambda layer: (layer + 1) % period != 0


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    window, layers = facts.integer("attention.sliding_window", 0), facts.integer("block_count")
    return gguf.decoder_config(facts) | {
        "sliding_window": window or None,
        "layer_types": gguf.layer_types(facts, period=_PERIOD) if window else ["full_attention"] * layers,
    }


FAMILY = Family(
    "EXAONE 4",
    "exaone4",
    "Exaone4ForCausalLM",
    "Exaone4Model",
    describe,
    gguf=gguf.GgufNames("exaone4", gguf.ATTENTION | gguf.QK_NORMS | gguf.MLP | gguf.POST_NORMS, _gguf_config),
)
