"""HRM-Text: two stacks of layers that run repeatedly over the same tokens.

It is not an `Architecture`; its modules are in `torch_models.hrm_text`.
"""

from ostro.errors import BadCheckpoint
from ostro.models.architecture import Head, HrmText, ModelShape
from ostro.models.config import (
    EPS,
    MOST_CYCLES,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_INNER,
    MOST_LAYERS,
    MOST_VOCAB,
    ConfigReader,
)
from ostro.models.families.common import activation, served_context
from ostro.models.family import Family
from ostro.models.rope_settings import checked_rope, rope_settings

_SCALE = (1e-6, 1e6)


def describe(config: ConfigReader, max_seq_len: int | None) -> HrmText:
    heads = config.integer("num_attention_heads", most=MOST_HEADS)
    head_dim = config.integer("head_dim", 128, most=MOST_HEAD_DIM)
    # transformers stores the number of runs as num_hidden_layers and the depth separately; other files only the depth.
    depth = config.integer(
        "num_layers_per_stack", config.integer("num_hidden_layers", most=MOST_LAYERS), most=MOST_LAYERS
    )
    high, low = config.integer("H_cycles", 2, most=MOST_CYCLES), config.integer("L_cycles", 3, most=MOST_CYCLES)
    runs = depth * high * (low + 1)
    if runs > 16 * MOST_LAYERS:
        raise BadCheckpoint(
            f"{config.source}: 'num_layers_per_stack', 'H_cycles' and 'L_cycles' make {runs} runs of layers per "
            f"token, but the limit is {16 * MOST_LAYERS}."
        )
    rope = checked_rope(rope_settings(config), head_dim)
    scale = config.optional_number("embedding_scale", _SCALE)
    return HrmText(
        shape=ModelShape(
            vocab_size=config.integer("vocab_size", most=MOST_VOCAB),
            hidden_size=config.integer("hidden_size", most=MOST_HIDDEN),
            num_layers=runs,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            max_seq_len=served_context(max_seq_len or rope.default_context(), rope.longest_context()),
        ),
        depth=depth,
        high_cycles=high,
        low_cycles=low,
        inner_size=config.integer("intermediate_size", most=MOST_INNER),
        activation=activation(config, "hidden_act", "silu"),
        eps=config.within("rms_norm_eps", EPS),
        embedding_scale=scale or 1.0 / config.within("initializer_range", _SCALE, 0.02),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        rope=rope,
        head=Head(name=None if config.flag("tie_word_embeddings") else "lm_head"),
    )


FAMILY = Family("HRM-Text", "hrm_text", "HrmTextForCausalLM", "HrmTextModel", describe)
