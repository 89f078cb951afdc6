"""Gemma 3 (text): like Gemma 2, but query and key heads are normed, and sliding-window layers have a separate rope."""

from ostro.errors import UnsupportedModel
from ostro.models.architecture import Architecture
from ostro.models.config import MOST_LAYERS, ConfigReader
from ostro.models.families import gemma2
from ostro.models.families import gguf_names as gguf
from ostro.models.families import levanter_names as levanter
from ostro.models.families.common import decoder_shape, sliding_layers
from ostro.models.family import Family
from ostro.models.rope_settings import full_and_sliding_ropes


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    if config.flag("use_bidirectional_attention", False):
        raise UnsupportedModel("Gemma with bidirectional attention is not supported; only its causal models are.")
    shape = decoder_shape(config, max_seq_len)
    period = config.integer("sliding_window_pattern", 6, most=MOST_LAYERS)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: (layer + 1) % period != 0)
    layers = gemma2.layers(config, shape, slides, normed_heads=True, own_rope=True)
    ropes = full_and_sliding_ropes(
        config,
        theta=config.number("rope_theta", 1e6),
        sliding_theta=config.number("rope_local_base_freq", 1e4),
    )
    return gemma2.around(config, shape, layers, ropes)


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    window = facts.integer("attention.sliding_window", 0)
    layers = facts.integer("block_count")
    return gguf.decoder_config(facts) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": facts.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10000.0),
        "sliding_window": window or None,
        "layer_types": gguf.layer_types(facts, period=6) if window else ["full_attention"] * layers,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": facts.optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": gemma2.gguf_query_scale(facts, layers_of_27b=62),
    }


FAMILY = Family(
    "Gemma 3 (text)",
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma3TextModel",
    describe,
    wrappers=("Gemma3ForConditionalGeneration",),
    tied=True,
    gguf=gguf.GgufNames(
        "gemma3",
        gguf.ATTENTION | gguf.QK_NORMS | gguf.MLP | gguf.SANDWICH_NORMS,
        _gguf_config,
        subtract_one=gguf.NORMS,
    ),
    levanter=(
        levanter.LevanterNames(
            type="gemma3",
            defaults=gemma2.LEVANTER_DEFAULTS,
            own_settings=frozenset({"use_qk_norm"}),
            head_dim="stored",
            config=gemma2.levanter_config,
        ),
    ),
)
