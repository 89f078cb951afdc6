"""How GGUF stores a family's models: tensor names, transformed tensors, metadata. Reads no files and no weights.

Converters rename tensors and transform some: they permute the rows of Llama's queries and keys for interleaved
rotation, add one to Gemma's norm weights, transpose GPT-2's matrices, split GPT-NeoX's q, k and v, and store decays as
rates instead of logarithms. A family's `GgufNames` describes this as data; `weights.gguf_model` reverses it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Protocol

from ostro.errors import BadCheckpoint, UnsupportedModel

Config = dict[str, object]


class GgufFacts(Protocol):
    """Typed access to a file's metadata. Keys omit the architecture's prefix."""

    @property
    def path(self) -> Path: ...
    def integer(self, key: str, default: int | None = None) -> int: ...
    def number(self, key: str, default: float | None = None) -> float: ...
    def optional_number(self, key: str) -> float | None: ...
    def get(self, key: str, default: str) -> object: ...
    def flag(self, key: str, default: bool) -> bool: ...
    def flags(self, key: str) -> list[bool] | None: ...
    def integers(self, key: str) -> list[int] | None:
        """A list of whole numbers; None if the file has no such key, or one number for all layers."""

    def has_tensor(self, name: str) -> bool: ...
    def factors(self, name: str) -> list[float] | None:
        """A small tensor that belongs in the config rather than among the weights."""

    def damaged(self, reason: str) -> BadCheckpoint: ...


ROOTS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH_NORMS = POST_NORMS | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
NORMS = frozenset({"output_norm", *PRE_NORMS, *SANDWICH_NORMS, *QK_NORMS})
"""All norms but those within recurrent mixers."""

Shape = tuple[int, ...]


def flat(stored: Shape) -> Shape:
    return (prod(stored),)


def single_row(stored: Shape) -> Shape:
    return (1, prod(stored))


def filters(stored: Shape) -> Shape:
    """The shape of a convolution's weight, whose filters each read one channel."""
    return (stored[0], 1, prod(stored[1:])) if stored else stored


@dataclass(frozen=True, slots=True)
class GgufNames:
    architecture: str
    """The value of `general.architecture`."""
    blocks: Mapping[str, str]
    """Names within a block: GGUF's to ours. GGUF stacks all experts' matrices; in our names, `{}` stands for the
    number of each.
    """
    config: Callable[[GgufFacts], Config]
    """Builds a model's config.json, except for the fields common to all families."""
    aliases: tuple[str, ...] = ()
    """Further values of `general.architecture`."""
    block_prefix: str = "model.layers"
    roots: Mapping[str, str] = field(default_factory=lambda: ROOTS)
    rotate_halves: frozenset[str] = frozenset()
    """Each head's rows are stored as 0, h/2, 1, h/2+1, …: llama.cpp rotates neighbours (`LLAMA_ROPE_TYPE_NORM`)."""
    subtract_one: frozenset[str] = frozenset()
    """GGUF adds one to these."""
    negated_exp: frozenset[str] = frozenset()
    """Stored as -exp(x)."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Names within a block that have no `.weight` or `.bias` in the file or in ours: GGUF's to ours, with endings."""
    reshape: Mapping[str, Callable[[Shape], Shape]] = field(default_factory=dict)
    """Tensors with the original's numbers in another shape, and the function from the stored shape to the original."""
    transpose: frozenset[str] = frozenset()
    """Stored as [out, in]; the original is [in, out]."""
    by_head: frozenset[str] = frozenset()
    """Stored as all queries, then all keys, then all values; the original interleaves them by head."""
    recurrent: bool = False
    """Whether some layers have no KV heads and keep a state instead."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return (self.architecture, *self.aliases)

    @property
    def has_experts(self) -> bool:
        return any("{}" in ours for ours in self.blocks.values())


def decoder_config(facts: GgufFacts) -> Config:
    """Fields common to all families with rotary positions and RMS norms."""
    return {
        **rotary_config(facts),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": in_some_block(facts, "attn_q.bias"),
        "mlp_bias": in_some_block(facts, "ffn_up.bias"),
    }


def rotary_config(facts: GgufFacts) -> Config:
    """Fields common to all families with rotary positions, whatever their norms."""
    return attention_config(facts) | {
        # Files of models with experts in every layer may have only the experts' width.
        "intermediate_size": facts.integer(
            "feed_forward_length", facts.integer("expert_feed_forward_length", 0) or None
        ),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(facts),
    }


def attention_config(facts: GgufFacts) -> Config:
    """Fields common to all families with attention, whatever their positions."""
    return {
        "hidden_size": facts.integer("embedding_length"),
        "num_hidden_layers": num_layers(facts),
        "num_attention_heads": facts.integer("attention.head_count"),
        "num_key_value_heads": kv_heads(facts),
        "head_dim": head_dim(facts),
        "max_position_embeddings": facts.integer("context_length"),
    }


def num_layers(facts: GgufFacts) -> int:
    """The model's layers, without those behind them that guess several tokens ahead."""
    blocks, guessing = facts.integer("block_count"), facts.integer("nextn_predict_layers", 0)
    if guessing and guessing >= blocks:
        raise facts.damaged(f"of its {blocks} blocks, {guessing} would guess tokens ahead")
    return blocks - guessing


def in_some_block(facts: GgufFacts, name: str) -> bool:
    return any(facts.has_tensor(f"blk.{layer}.{name}") for layer in range(num_layers(facts)))


def kv_heads(facts: GgufFacts) -> int:
    """KV heads of each layer that has any."""
    return _of_each_layer(facts, "attention.head_count_kv", facts.integer("attention.head_count"))


def inner_size(facts: GgufFacts) -> int:
    """The width of each layer's MLP that has one."""
    return _of_each_layer(facts, "feed_forward_length", None)


def _of_each_layer(facts: GgufFacts, key: str, default: int | None) -> int:
    """A number that may be listed layer by layer, with a 0 for layers to which it does not apply."""
    found = set(facts.integers(key) or ()) - {0}
    return found.pop() if len(found) == 1 else facts.integer(key, default)


def attending_layers(facts: GgufFacts) -> list[bool]:
    """Which layers have KV heads."""
    layers, counts = num_layers(facts), facts.integers("attention.head_count_kv")
    if counts is None:
        return [True] * layers
    if len(counts) < layers:
        raise facts.damaged(f"it lists the KV heads of {len(counts)} layers, but has {layers}")
    return [count > 0 for count in counts[:layers]]


def named_layers(facts: GgufFacts, recurrent: str) -> list[str]:
    """`layer_types` for a file in which layers without KV heads are those of the `recurrent` type."""
    return ["full_attention" if attends else recurrent for attends in attending_layers(facts)]


def expert_config(facts: GgufFacts) -> Config:
    """The fields of a mixture of experts."""
    return {"num_experts": facts.integer("expert_count"), "num_experts_per_tok": facts.integer("expert_used_count")}


def rope_scaling(facts: GgufFacts) -> Config | None:
    context = facts.integer("context_length")
    original = facts.integer("rope.scaling.original_context_length", context)
    if (divisors := facts.factors("rope_freqs.weight")) is not None:
        # Llama 3's scaling, precomputed per frequency by the converter. Its parameters are lost, but the divisors
        # suffice: they equal longrope with a single set of factors and unscaled attention.
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    long, short = facts.factors("rope_factors_long.weight"), facts.factors("rope_factors_short.weight")
    if long is not None and short is not None:
        scaling: Config = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "factor": context / max(original, 1),
            "original_max_position_embeddings": original,
        }
        if (attention := facts.optional_number("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = attention
        return scaling
    return _named_rope_scaling(facts, original)


def _named_rope_scaling(facts: GgufFacts, original: int) -> Config | None:
    kind = facts.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}
    if kind != "yarn":
        raise UnsupportedModel(f"{facts.path} scales its rotary positions by {kind!r}, which Ostro does not support.")
    scaling: Config = {
        "rope_type": "yarn",
        "factor": facts.number("rope.scaling.factor"),
        "original_max_position_embeddings": original,
    }
    for ours, theirs in (
        ("attention_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        if (value := facts.optional_number(f"rope.scaling.{theirs}")) is not None:
            scaling[ours] = value
    return scaling


def layer_types(facts: GgufFacts, period: int) -> list[str]:
    """Which layers have a sliding window: as listed in the file, otherwise all but every `period`-th."""
    layers = facts.integer("block_count")
    sliding = facts.flags("attention.sliding_window_pattern")
    if sliding is None:
        period = facts.integer("attention.sliding_window_pattern", period)
        sliding = [period == 0 or (layer + 1) % period != 0 for layer in range(layers)]
    if len(sliding) != layers:
        raise facts.damaged(f"it lists {len(sliding)} windows for {layers} layers")
    return ["sliding_attention" if each else "full_attention" for each in sliding]


def head_dim(facts: GgufFacts) -> int:
    heads = facts.integer("attention.head_count")
    return facts.integer("attention.key_length", facts.integer("embedding_length") // max(heads, 1))
