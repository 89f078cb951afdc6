"""Qwen 3.5 and 3.6: Qwen3-Next with dense MLPs, and other names for the delta nets' tensors."""

from collections.abc import Mapping
from dataclasses import replace

from ostro.models.architecture import Architecture, GatedDelta, HubForm, HubPart, Part, Projection
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import qwen3_next
from ostro.models.families.common import HubLayer, activation
from ostro.models.families.qwen3_next import DEFAULTS, Delta, DeltaSizes, hybrid
from ostro.models.family import Family
from ostro.models.row_order import RowOrder, Tiled

TILED = "linear_value_heads_tiled"
"""A flag in a config that describes a GGUF file, whose converter changes the order of value heads."""


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = config.with_defaults(DEFAULTS)
    act = activation(config, "hidden_act", "silu")
    return hybrid(config, max_seq_len, delta_of(config), lambda shape: lambda layer: layer.gated_mlp(act))


def delta_of(config: ConfigReader) -> Delta:
    tiled = config.flag(TILED, False)

    def delta(sizes: DeltaSizes, layer: HubLayer) -> GatedDelta:
        gates = tuple(Part(layer.named(f"linear_attn.in_proj_{name}"), sizes.value_heads) for name in "ba")
        found = sizes.delta(layer, sizes.inputs(layer), gates)
        return _tiled(sizes, found) if tiled else found

    return delta


def _tiled(sizes: DeltaSizes, delta: GatedDelta) -> GatedDelta:
    """The same with its value heads in another order than on the Hub."""
    values = Tiled(sizes.key_heads, sizes.value_heads // sizes.key_heads, sizes.value_dim)
    qkv, z = replace(values, first=2 * sizes.keys), values
    return replace(
        delta,
        head_map="tiled",
        inputs=_reordered(delta.inputs, (qkv, z)),
        gates=_reordered(delta.gates, (replace(values, width=1),) * 2),
        output=_reordered(delta.output, (None,), columns=values),
    )


def _reordered(
    projection: Projection, orders: tuple[RowOrder | None, ...], columns: RowOrder | None = None
) -> Projection:
    parts = (HubPart(part.name, part.rows, order) for part, order in zip(projection.parts, orders, strict=True))
    return replace(projection, hub=HubForm(tuple(parts), columns))


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return qwen3_next.gguf_config(facts) | {TILED: True}


GGUF_BLOCKS: Mapping[str, str] = {
    **qwen3_next.GGUF_BLOCKS,
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
FAMILY = Family(
    "Qwen 3.5, 3.6",
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    "Qwen3_5TextModel",
    describe,
    wrappers=("Qwen3_5ForConditionalGeneration",),
    gguf=replace(
        qwen3_next.GGUF,
        architecture="qwen35",
        blocks={**GGUF_BLOCKS, **gguf.MLP},
        config=_gguf_config,
    ),
)
