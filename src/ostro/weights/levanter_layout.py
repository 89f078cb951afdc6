"""Which arrays Levanter stores of a model, and which tensors of the Hub's they are. Knows shapes, and no files.

model/embeddings/token_embeddings/weight                    [V, E]
model/transformer/norm/weight                               [E]
model/lm_head/weight                                        [V, E]
model/transformer/layers/stacked/self_attn/q_proj/weight    [L, KV, G, D, E]     one array of all layers
model/transformer/layers/blocks/7/self_attn/q_proj/weight   [KV, G, D, E]        or one of each (scan_layers: false)

A projection's axes are the Hub's, with the heads spread out; within a layer its names are the Hub's too.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import cast

Shape = tuple[int, ...]

EMBEDDING = "model/embeddings/token_embeddings/weight"
# OLMo 3 alone has the underscore.
_LAYERS = re.compile(r"(?P<root>model/transformer/_?layers)/(?:(?P<stacked>stacked)|blocks/\d+)/")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One array, and the tensors that it holds."""

    path: str
    shape: Shape
    """Of the whole array."""
    names: tuple[str, ...]
    """One for each layer where they are stacked, else one."""
    hub_shape: Shape
    """Of each tensor. Fewer rows than are stored where the vocabulary is padded."""
    stacked: bool


@dataclass(frozen=True, slots=True)
class LayerArrays:
    """Where a checkpoint has its layers, and whether in one array or in one each."""

    root: str
    stacked: bool

    def first(self, name: str) -> str:
        """The array that has the first layer's tensor of that name."""
        return f"{self.root}/{'stacked' if self.stacked else 'blocks/0'}/{name.replace('.', '/')}"


def find_layers(paths: Iterable[str]) -> LayerArrays | None:
    match = next((match for path in sorted(paths) if (match := _LAYERS.match(path))), None)
    return LayerArrays(match["root"], match["stacked"] is not None) if match else None


def stored_weights(config: Mapping[str, object], layers: LayerArrays, stored_vocab: int) -> Iterator[StoredWeight]:
    """All arrays that a checkpoint of this config.json must have."""
    size = {name: cast(int, value) for name, value in config.items()}
    hidden, vocab, num_layers = size["hidden_size"], size["vocab_size"], size["num_hidden_layers"]
    ends: dict[str, tuple[str, Shape, Shape]] = {
        EMBEDDING: ("model.embed_tokens.weight", (stored_vocab, hidden), (vocab, hidden)),
        "model/transformer/norm/weight": ("model.norm.weight", (hidden,), (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        ends["model/lm_head/weight"] = ("lm_head.weight", (stored_vocab, hidden), (vocab, hidden))
    for path, (name, shape, hub_shape) in ends.items():
        yield StoredWeight(path, shape, (name,), hub_shape, stacked=False)
    for part, (shape, hub_shape) in _layer_parts(config).items():
        names = tuple(f"model.layers.{layer}.{part}" for layer in range(num_layers))
        if layers.stacked:
            yield StoredWeight(layers.first(part), (num_layers, *shape), names, hub_shape, stacked=True)
            continue
        for layer, name in enumerate(names):
            path = f"{layers.root}/blocks/{layer}/{part.replace('.', '/')}"
            yield StoredWeight(path, shape, (name,), hub_shape, stacked=False)


def _layer_parts(config: Mapping[str, object]) -> dict[str, tuple[Shape, Shape]]:
    """The tensors of a layer: their shapes as stored, and on the Hub."""
    size = {name: cast(int, value) for name, value in config.items()}
    hidden, inner, head = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    heads, kv_heads = size["num_attention_heads"], size["num_key_value_heads"]
    family = cast(str, config["model_type"])
    outputs: dict[str, Shape] = {
        "self_attn.q_proj": (kv_heads, heads // kv_heads, head),
        "self_attn.k_proj": (kv_heads, head),
        "self_attn.v_proj": (kv_heads, head),
        "self_attn.o_proj": (hidden,),
        "mlp.gate_proj": (inner,),
        "mlp.up_proj": (inner,),
        "mlp.down_proj": (hidden,),
    }
    inputs: dict[str, Shape] = {"self_attn.o_proj": (heads, head), "mlp.down_proj": (inner,)}
    parts: dict[str, tuple[Shape, Shape]] = {}
    for name, out in outputs.items():
        into = inputs.get(name, (hidden,))
        parts[f"{name}.weight"] = (*out, *into), (prod(out), prod(into))
    for name in _biased(family, attention=bool(config.get("attention_bias"))):
        parts[f"{name}.bias"] = outputs[name], (prod(outputs[name]),)
    for name, shape in _norms(family, hidden, head).items():
        parts[f"{name}.weight"] = shape, (prod(shape),)
    if family == "olmo2":
        for half in ("q", "k"):
            shape = outputs[f"self_attn.{half}_proj"]
            parts[f"self_attn.{half}_norm.weight"] = shape, (prod(shape),)
    return parts


def _biased(family: str, *, attention: bool) -> tuple[str, ...]:
    inputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (*inputs, "self_attn.o_proj") if attention else inputs if family == "qwen2" else ()


def _norms(family: str, hidden: int, head: int) -> dict[str, Shape]:
    names = {
        "gemma2": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
        "gemma3_text": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
        "olmo2": ("post_attention", "post_feedforward"),
    }.get(family, ("input", "post_attention"))
    norms: dict[str, Shape] = {f"{name}_layernorm": (hidden,) for name in names}
    if family in ("qwen3", "gemma3_text"):
        norms |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    return norms
