"""Qwen 3.5 and 3.6: Qwen3-Next with dense MLPs, and other names for the delta nets' tensors."""

from ostro.models.architecture import Architecture, GatedDelta, Part
from ostro.models.config import ConfigReader
from ostro.models.families.common import HubLayer, activation
from ostro.models.families.qwen3_next import DEFAULTS, DeltaSizes, hybrid
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = config.with_defaults(DEFAULTS)
    act = activation(config, "hidden_act", "silu")
    return hybrid(config, max_seq_len, delta, lambda shape: lambda layer: layer.gated_mlp(act))


def delta(sizes: DeltaSizes, layer: HubLayer) -> GatedDelta:
    rows = {"in_proj_qkv": sizes.mixed, "in_proj_z": sizes.values}
    rows |= {"in_proj_b": sizes.value_heads, "in_proj_a": sizes.value_heads}
    parts = tuple(Part(layer.named(f"linear_attn.{name}"), size) for name, size in rows.items())
    return sizes.delta(layer, parts[:2], parts[2:])


FAMILY = Family(
    "Qwen 3.5, 3.6",
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    "Qwen3_5TextModel",
    describe,
    wrappers=("Qwen3_5ForConditionalGeneration",),
)
