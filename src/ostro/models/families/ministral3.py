"""Ministral 3: Llama with yarn. Beyond its original context, queries are also scaled by their positions, which only
torch computes, so without max_seq_len only the original context is served.
"""

from dataclasses import replace

from ostro.models.architecture import Architecture, QueryScaling
from ostro.models.config import STRENGTH, ConfigReader
from ostro.models.families import mistral
from ostro.models.family import Family
from ostro.models.rope_settings import rope_settings

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    if config.get("rope_parameters") is None:
        config = ConfigReader({**config.values, "rope_parameters": _ROPE}, config.source)
    rope = rope_settings(config)
    strength = rope.table.optional_number("llama_4_scaling_beta", STRENGTH)
    if strength is None:
        return mistral.describe(config, max_seq_len)
    original = min(rope.original_positions, rope.longest_context())
    described = mistral.describe(config, max_seq_len or original)
    if described.shape.max_seq_len <= original:
        return described
    scaling = QueryScaling(rope.original_positions, strength)
    layers = (replace(each, mixer=replace(each.attention, query_scaling=scaling)) for each in described.layers)
    return replace(described, layers=tuple(layers))


FAMILY = Family(
    "Ministral 3",
    "ministral3",
    "Ministral3ForCausalLM",
    "Ministral3Model",
    describe,
    wrappers=("Mistral3ForConditionalGeneration",),
)
