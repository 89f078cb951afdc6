"""Ministral 3: Llama with yarn. Beyond its original context, queries are also scaled by their positions, so that only
that much is served.
"""

from ostro.errors import BadRequest
from ostro.models.architecture import Architecture
from ostro.models.config import ConfigReader
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
    if not rope.table.optional_number("llama_4_scaling_beta"):
        return mistral.describe(config, max_seq_len)
    most = min(rope.original_positions, rope.longest_context())
    if max_seq_len is not None and max_seq_len > most:
        raise BadRequest(
            f"max_seq_len is {max_seq_len}, but this model scales queries by their position from {most} on, which is "
            f"not supported; lower it to {most} or less.",
            param="max_seq_len",
        )
    return mistral.describe(config, max_seq_len or most)


FAMILY = Family(
    "Ministral 3",
    "ministral3",
    "Ministral3ForCausalLM",
    "Ministral3Model",
    describe,
    wrappers=("Mistral3ForConditionalGeneration",),
)
