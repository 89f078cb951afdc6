"""Random models of which most layers keep a state, for `random_llama`: their metadata and their mixers' tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gguf import GGUFWriter

Dims = tuple[int, ...]
FINAL_NORMS: Mapping[str, str] = {
    "qwen35": "output_norm.weight",
    "qwen35moe": "output_norm.weight",
    "lfm2": "token_embd_norm.weight",
}
FILTERS = ("ssm_conv1d.weight", "shortconv.conv.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    attending: frozenset[int]
    """Layers with keys and values."""
    taps: int
    key_heads: int = 0
    """Heads of gated delta nets, `dim` wide; 0 for short convolutions."""
    value_heads: int = 0
    dim: int = 0
    shared: int = 0
    """Width of an MLP beside experts."""

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.dim

    def state_bytes(self, layers: int, hidden: int) -> int:
        inputs = (self.taps - 1) * (self.channels or hidden)
        return 4 * (layers - len(self.attending)) * (inputs + self.value_heads * self.dim**2)


class Sizes(Protocol):
    """Those of a `random_llama.Shape`."""

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def family(self) -> str: ...


def add_metadata(writer: GGUFWriter, hybrid: Hybrid, sizes: Sizes) -> None:
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    if sizes.experts:
        writer.add_expert_feed_forward_length(sizes.inner)
        writer.add_expert_shared_feed_forward_length(hybrid.shared)
    if not hybrid.dim:
        writer.add_shortconv_l_cache(hybrid.taps)
        heads = [sizes.kv_heads if layer in hybrid.attending else 0 for layer in range(sizes.layers)]
        del writer.kv_data[0][f"{sizes.family}.attention.head_count_kv"]
        writer.add_head_count_kv(heads)
        return
    writer.add_ssm_conv_kernel(hybrid.taps)
    writer.add_ssm_state_size(hybrid.dim)
    writer.add_ssm_group_count(hybrid.key_heads)
    writer.add_ssm_time_step_rank(hybrid.value_heads)
    writer.add_ssm_inner_size(hybrid.value_heads * hybrid.dim)
    writer.add_full_attention_interval(4)
    del writer.kv_data[0][f"{sizes.family}.rope.dimension_count"]
    writer.add_rope_dimension_count(sizes.head_dim // 4)
    writer.add_rope_dimension_sections([sizes.head_dim // 8, 0, 0, 0])


def layer_dims(hybrid: Hybrid, sizes: Sizes, *, attends: bool) -> dict[str, Dims]:
    """Tensors of a layer's mixer, and its norms."""
    hidden, is_delta = sizes.hidden, hybrid.dim > 0
    found: dict[str, Dims] = {
        "attn_norm.weight": (hidden,),
        ("post_attention_norm.weight" if is_delta else "ffn_norm.weight"): (hidden,),
    }
    if hybrid.shared:
        found["ffn_gate_inp_shexp.weight"] = (hidden,)
        found |= {f"ffn_{name}_shexp.weight": (hybrid.shared, hidden) for name in ("gate", "up")}
        found["ffn_down_shexp.weight"] = (hidden, hybrid.shared)
    if attends:
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        return found | {
            # Each query has a gate.
            "attn_q.weight": ((2 if is_delta else 1) * queries, hidden),
            "attn_k.weight": (keys, hidden),
            "attn_v.weight": (keys, hidden),
            "attn_output.weight": (hidden, queries),
            "attn_q_norm.weight": (sizes.head_dim,),
            "attn_k_norm.weight": (sizes.head_dim,),
        }
    if not is_delta:
        return found | {
            "shortconv.in_proj.weight": (3 * hidden, hidden),
            "shortconv.conv.weight": (hidden, hybrid.taps),
            "shortconv.out_proj.weight": (hidden, hidden),
        }
    heads, values = hybrid.value_heads, hybrid.value_heads * hybrid.dim
    return found | {
        "attn_qkv.weight": (hybrid.channels, hidden),
        "attn_gate.weight": (values, hidden),
        "ssm_beta.weight": (heads, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_conv1d.weight": (hybrid.channels, hybrid.taps),
        "ssm_a": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_norm.weight": (hybrid.dim,),
        "ssm_out.weight": (hidden, values),
    }
