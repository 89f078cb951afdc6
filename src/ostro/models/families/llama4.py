"""Llama 4 (text): mixtures of experts whose router scales what they read, beside an MLP for all tokens. Layers that
rotate attend within chunks, and norm heads without weights; the others see everything, and scale queries by position.

Without max_seq_len, one chunk is served: the GPU attention kernels support no longer context.
"""

from collections.abc import Mapping
from dataclasses import replace

from ostro.errors import UnsupportedModel
from ostro.models.architecture import MLP, Architecture, AttentionSpec, Experts, Norm, QKNorm, QueryScaling
from ostro.models.config import EPS, MOST_INNER, MOST_LAYERS, STRENGTH, ConfigReader
from ostro.models.families.common import (
    ExpertNames,
    HubLayer,
    activation,
    decoder,
    decoder_shape,
    hub_layers,
    limited_layers,
    mixture,
    rotating_layers,
)
from ostro.models.family import Family
from ostro.models.rope_settings import RopeSettings, rope_settings
from ostro.models.row_order import Pairs

_DEFAULTS: Mapping[str, object] = {
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
_NAMES = ExpertNames(
    router="feed_forward.router", up=("feed_forward.experts.gate_up_proj",), down="feed_forward.experts.down_proj"
)


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = ConfigReader({**_DEFAULTS, **config.values}, config.source)
    chunk = config.integer("attention_chunk_size")
    rope = rope_settings(config)
    shape = decoder_shape(config, max_seq_len or min(chunk, rope.default_context()))
    rotates = rotating_layers(config, shape.num_layers)
    chunked = limited_layers(config, shape.num_layers, otherwise=rotates.__getitem__, limited="chunked_attention")
    norm = _norm(config, shape.head_dim, rope) if config.flag("use_qk_norm", True) else None
    scaling, bias = _query_scaling(config), config.flag("attention_bias", False)
    order, scale = Pairs(shape.head_dim, rope.rotary_dim(shape.head_dim)), shape.head_dim**-0.5
    mixed, act = _mixed_layers(config, shape.num_layers), activation(config, "hidden_act", "silu")
    sizes = mixture(config, shape) if mixed else None
    width = config.integer("intermediate_size_mlp", most=MOST_INNER)

    def mlp(layer: HubLayer) -> MLP | Experts:
        if sizes is None or layer.index not in mixed:
            return replace(layer, inner_size=width).gated_mlp(act, parent="feed_forward")
        found = layer.experts(sizes, act, normalized=False, names=_NAMES)
        up, down = (replace(each, weight="", transposed=True) for each in (found.up, found.down))
        shared = layer.gated_mlp(act, parent="feed_forward.shared_expert")
        return replace(found, up=up, down=down, scales_inputs=True, shared=shared)

    layers = []
    for layer in hub_layers(config, shape):
        turns = rotates[layer.index]
        attention = layer.attention(
            AttentionSpec(scale=scale, chunk=chunk if chunked[layer.index] else None),
            rope=0 if turns else None,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm if turns else None,
            order=order if turns else None,
        )
        layers.append(layer.pre_norm(replace(attention, query_scaling=None if turns else scaling), mlp(layer)))
    return decoder(config, shape, layers)


def _norm(config: ConfigReader, head_dim: int, rope: RopeSettings) -> QKNorm:
    """Heads are normed after rotation, which equals norming before it as long as rotation keeps their length."""
    if rope.kind in ("yarn", "longrope"):
        raise UnsupportedModel(
            f"{config.source}: Llama 4 with normed heads and rope scaling {rope.kind!r} is not supported; known are "
            "default, dynamic, linear and llama3."
        )
    norm = Norm("qk_norm", head_dim, config.within("rms_norm_eps", EPS), weighted=False)
    return QKNorm(norm, norm, over="head")


def _query_scaling(config: ConfigReader) -> QueryScaling | None:
    # The first configs have a 4 here.
    if config.get("attn_temperature_tuning") != 4 and not config.flag("attn_temperature_tuning", True):
        return None
    return QueryScaling(config.integer("floor_scale", 8192), config.within("attn_scale", STRENGTH, 0.1), shift=1)


def _mixed_layers(config: ConfigReader, num_layers: int) -> frozenset[int]:
    """The layers with experts."""
    if config.get("moe_layers") is not None:
        return frozenset(config.indices("moe_layers"))
    step = config.integer("interleave_moe_layer_step", 1, most=MOST_LAYERS)
    return frozenset(range(step - 1, num_layers, step))


FAMILY = Family(
    "Llama 4 (text)",
    "llama4_text",
    "Llama4ForCausalLM",
    "Llama4TextModel",
    describe,
    wrappers=("Llama4ForConditionalGeneration",),
)
