"""A model family's test case: `tests/families` has one `CASE` per file, and `every_family` collects them.

A case has everything but sizes, which each test chooses for itself: `FamilyCase.sized` puts the two together.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Config = Mapping[str, object]
"""Fields of a config.json."""
Settings = Config | Callable[[int], Config]
"""Fields of a config.json, or a function from the head width to them."""

SIZES: Config = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
"""The smallest sizes, under the names that all size mappings use."""

EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERT_SIZES: Config = {**EXPERTS, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 20}
"""Sizes that any mixture reads, for configs that are given to every family."""
GRANITE_SCALES: Config = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
DELTA: Config = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
"""Delta nets in every other layer."""
BIASES: Config = {"attention_bias": True, "mlp_bias": True}
LLAMA3: Config = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

GGUF_DECODER: Config = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50000.0,
}
"""Metadata of most families, for the sizes of GGUF's tests."""
GGUF_LAYER_NORMS: Config = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_epsilon": 1e-5,
}
GGUF_EXPERTS: Config = {"expert_count": 4, "expert_used_count": 2}
GGUF_EXPERT_SIZES: Config = {
    **GGUF_EXPERTS,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 64,
}
GGUF_WIDE_HEADS: Config = {"attention.key_length": 32, "attention.value_length": 32}
"""Metadata for a head_dim of 32."""

LEVANTER_SETTINGS: Mapping[str, Any] = {
    "max_seq_len": 64,
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
}
LEVANTER_SIZES: Config = {
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""The same in a config.json."""


def longrope(rotated: int, most: float = 2.0) -> Config:
    """LongRoPE settings with one factor per frequency, for `rotated` rotated dimensions of a head."""
    return {
        "type": "longrope",
        "short_factor": [float(each) for each in np.linspace(1, 1.25, rotated // 2)],
        "long_factor": [float(each) for each in np.linspace(most / 2, 2 * most, rotated // 2)],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufCase:
    """A config as its authors write it, and the metadata that a converter makes of it."""

    config: Config = field(default_factory=dict)
    """Fields beside GGUF's sizes and the family's own `config`."""
    metadata: Config = field(default_factory=lambda: GGUF_DECODER)
    """Metadata without the architecture prefix of each name."""
    extra: Mapping[str, Array] = field(default_factory=dict)
    """Tensors that the model itself does not have."""
    architecture: str | None = None
    """GGUF's architecture name, where it differs from the family's."""
    converted: "Converted | None" = None
    """What the converter does to a tensor, where it differs from `FamilyCase.gguf_converted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevanterCase:
    """A model as Levanter's settings have it, and as config.json has the same one."""

    settings: Mapping[str, Any]
    config: Config = field(default_factory=dict)
    """Fields beside Levanter's sizes and the family's own `config`."""
    layers: str = "layers"
    """Name of the module that holds the layers."""
    like_gpt2: bool = False
    """Whether its arrays have GPT-2's names and axes rather than Llama's."""
    norms_of_all_heads: bool = False
    """Whether norms of queries and keys have axes for all heads."""


Converted = Callable[[str, Array], Array | Mapping[str, Array]]
"""A converter's change to a tensor, given its name in transformers. A mapping gives it other names, or makes several
tensors of it: those whose names begin with `blk.` have their final names, the others have names in transformers.
"""


def _unchanged(name: str, array: Array) -> Array:
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCase:
    model_type: str
    """The same as the family's in `models.registry`, by which it is found."""
    config: Settings = field(default_factory=dict)
    """What is not a size, with values at which each number matters; for models of any number of layers, or the number
    is among them. Tests put bad numbers in the place of these.
    """
    variants: Mapping[str, Settings] = field(default_factory=dict)
    """Changes to `config` by name. Each is compared with transformers, and run by every backend that can."""
    reference: Config = field(default_factory=dict)
    """Fields that only transformers reads, for its models."""
    spelling: Mapping[str, str | None] = field(default_factory=dict)
    """Names of sizes where they are not those of `SIZES`; None if it has no such size."""
    mixture: bool = False
    """Whether its layers have experts, which neither several devices nor JAX support."""
    torch_only: bool = False
    """Whether only torch's own modules run it."""
    recurrent: bool = False
    """Whether some of its layers keep a state instead of keys and values."""
    ropes: int = 1
    """Rotations in `rope_parameters`: two if windowed layers have one of their own, none for learned positions."""
    numbers: tuple[str, ...] = ("rope_theta",)
    """Numbers it reads that are not in its `config`."""
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The matrices that adapters may change."""
    gguf: Mapping[str, GgufCase] = field(default_factory=dict)
    """GGUF cases by name, the family's own under the empty name; empty if GGUF has no such family."""
    gguf_converted: Converted = _unchanged
    """Models have four heads, two of keys."""
    gguf_folded: bool = False
    """Whether a GGUF file holds products of weights and multipliers, which no adapter fits."""
    gguf_rearranged: bool = False
    """Whether a GGUF file stores rows in another order than the Hub, or in other tensors, and is read as it is; or
    other numbers, which do not come back to the last bit.
    """
    levanter: Mapping[str, LevanterCase] = field(default_factory=dict)

    def sized(self, sizes: Config, variant: str = "") -> Config:
        """A config.json of these sizes, whose names are those of `SIZES`; without architectures."""
        return {**self.spelled(sizes), **self.settings(sizes, variant), "model_type": self.model_type}

    def spelled(self, sizes: Config) -> Config:
        named = {self.spelling.get(name, name): value for name, value in sizes.items()}
        return {name: value for name, value in named.items() if name is not None}

    def settings(self, sizes: Config, variant: str = "") -> Config:
        head_dim = _integer(sizes, "hidden_size") // _integer(sizes, "num_attention_heads")
        if "head_dim" in sizes and self.spelling.get("head_dim", "head_dim") is not None:
            head_dim = _integer(sizes, "head_dim")
        chosen = [self.config, *([self.variants[variant]] if variant else [])]
        found: dict[str, object] = {}
        for each in chosen:
            found |= each(head_dim) if callable(each) else each
        # Other configs have tables of their own, whatever becomes of this one's.
        return deepcopy(found)


def _integer(sizes: Config, name: str) -> int:
    value = sizes[name]
    assert isinstance(value, int)
    return value


def interleaved(rows: Array, heads: int) -> Array:
    """Llama's queries and keys as converters store them: rows of each head's two halves alternate."""
    per_head = rows.reshape(heads, -1, *rows.shape[1:])
    mixed = np.empty_like(per_head)
    half = per_head.shape[1] // 2
    mixed[:, 0::2], mixed[:, 1::2] = per_head[:, :half], per_head[:, half:]
    return mixed.reshape(rows.shape)


def with_neighbours_rotated(name: str, array: Array) -> Array:
    """The tensor as converters store it for architectures in which llama.cpp rotates neighbouring elements."""
    heads = 4 if ".q_proj." in name else 2 if ".k_proj." in name else None
    return array if heads is None else interleaved(array, heads)


def with_one_added_to_norms(name: str, array: Array) -> Array:
    return array + np.float32(1) if name.endswith("norm.weight") else array


GGUF_DELTA: Config = {
    **DELTA,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": False,
}
"""Delta nets of a width that is stored in blocks of 32, in files of three layers."""
GGUF_DELTA_METADATA: Config = {
    **GGUF_DECODER,
    **GGUF_WIDE_HEADS,
    "full_attention_interval": 2,
    "rope.dimension_count": 16,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 192,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 6,
}


def with_state_stored(name: str, array: Array) -> Array | Mapping[str, Array]:
    """A tensor of a recurrent mixer as converters store it; any other as it is."""
    if name.endswith(".A_log"):
        return -np.exp(array)
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): array}
    return array.squeeze(1) if array.ndim == 3 and "conv" in name else array


def with_mamba_stored(name: str, array: Array, *, groups: int) -> Array | Mapping[str, Array]:
    """The same for Mamba-2 mixers with these groups."""
    if array.ndim == 1 and ".norm." in name and name.split(".")[-3] in ("mixer", "mamba"):
        return array.reshape(groups, -1)
    stored = with_state_stored(name, array)
    return stored[:, None] if not isinstance(stored, Mapping) and name.endswith((".A_log", ".D")) else stored


def with_delta_nets_stored(name: str, array: Array) -> Array | Mapping[str, Array]:
    """The same for families whose norms, except those of delta nets, are differences from one."""
    return with_state_stored(name, array if ".linear_attn.norm" in name else with_one_added_to_norms(name, array))


def with_value_heads_tiled(name: str, array: Array) -> Array | Mapping[str, Array]:
    """The same where value heads that read the same key head no longer follow each other."""
    first, axis, width = 0, 0, 1
    if ".in_proj_qkv." in name or ".conv1d." in name:
        first, width = 2 * 2 * 16, 32
    elif ".in_proj_z." in name:
        width = 32
    elif ".linear_attn.out_proj." in name:
        axis, width = 1, 32
    elif not name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        return with_delta_nets_stored(name, array)
    order = np.arange(6 * width).reshape(2, 3, width).swapaxes(0, 1).reshape(-1)
    return with_delta_nets_stored(name, array.take([*range(first), *(first + order)], axis=axis))
