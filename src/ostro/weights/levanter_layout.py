"""Maps the arrays in a Levanter checkpoint to the Hub's tensors. Knows shapes; reads no files.

model/embeddings/token_embeddings/weight                    [V, E]
model/transformer/norm/weight                               [E]
model/lm_head/weight                                        [V, E]
model/transformer/layers/stacked/self_attn/q_proj/weight    [L, KV, G, D, E]     one array for all layers
model/transformer/layers/blocks/7/self_attn/q_proj/weight   [KV, G, D, E]        or one per layer (scan_layers: false)
model/transformer/layers/stacked/…/experts/w1/weight        [L, X, E, M]         all experts, transposed

model/transformer/blocks/stacked/attn/c_attn/weight         [L, E, 3, H, D]      GPT-2
model/embeddings/position_embeddings/weight                 [P, E]

A projection's axes are the Hub's, with separate axes for heads; within a layer, names are the Hub's too, and so is the
last norm's.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from ostro.models.architecture import Architecture, Attention, ExpertMatrices, Experts, Layer, ModelShape

Shape = tuple[int, ...]

EMBEDDING = "model/embeddings/token_embeddings/weight"
_POSITIONS = "model/embeddings/position_embeddings/weight"
# Only OLMo 3 has the underscore, and GPT-2 has blocks.
_LAYERS = re.compile(r"(?P<root>model/transformer/(?:_?layers|blocks))/(?:(?P<stacked>stacked)|blocks/\d+)/")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One array, and the tensors in it."""

    path: str
    shape: Shape
    """Shape of the whole array."""
    names: tuple[str, ...]
    """One per layer if stacked, otherwise a single name; for experts, one per layer and expert."""
    hub_shape: Shape
    """Shape of each tensor. Has fewer rows than stored if the vocabulary is padded."""
    stacked: bool
    experts: bool = False
    """Whether each layer has a matrix per expert, stored as [in, out]."""


@dataclass(frozen=True, slots=True)
class LayerArrays:
    """Where a checkpoint keeps its layers, and whether they are stacked."""

    root: str
    stacked: bool

    def first(self, name: str) -> str:
        """The array that contains the first layer's tensor of this name."""
        return f"{self.root}/{'stacked' if self.stacked else 'blocks/0'}/{name.replace('.', '/')}"


def find_layers(paths: Iterable[str]) -> LayerArrays | None:
    match = next((match for path in sorted(paths) if (match := _LAYERS.match(path))), None)
    return LayerArrays(match["root"], match["stacked"] is not None) if match else None


def stored_weights(described: Architecture, layers: LayerArrays, stored_vocab: int) -> Iterator[StoredWeight]:
    """All arrays that a checkpoint of this model must have."""
    hidden, vocab = described.shape.hidden_size, described.shape.vocab_size
    ends: dict[str, tuple[str, Shape, Shape]] = {
        EMBEDDING: (f"{described.embedding.name}.weight", (stored_vocab, hidden), (vocab, hidden)),
    }
    if (positions := described.embedding.positions) is not None:
        ends[_POSITIONS] = (f"{positions.name}.weight", (positions.rows, hidden), (positions.rows, hidden))
    for tensor in described.norm.tensors():
        part = tensor.name.removeprefix(f"{described.backbone}.").replace(".", "/")
        ends[f"model/transformer/{part}"] = (tensor.name, tensor.shape, tensor.shape)
    if described.head is not None and described.head.name is not None:
        ends["model/lm_head/weight"] = (f"{described.head.name}.weight", (stored_vocab, hidden), (vocab, hidden))
    for path, (name, shape, hub_shape) in ends.items():
        yield StoredWeight(path, shape, (name,), hub_shape, stacked=False)
    # Levanter's layers all have the same tensors, whatever the settings.
    num_layers = described.shape.num_layers
    prefix = described.layers[0].attention.output.parts[0].name.partition(".0.")[0]
    spread = _spread_heads(described.layers[0], described.shape)
    mlp = described.layers[0].mlp
    matrices = (mlp.up, mlp.down) if isinstance(mlp, Experts) else ()
    for own in matrices:
        yield from _expert_weights(own, layers, num_layers, prefix)
    of_experts = {tensor.name for own in matrices for tensor in own.tensors()}
    for tensor in described.layers[0].tensors():
        if tensor.name in of_experts:
            continue
        part, shape = tensor.name.removeprefix(f"{prefix}.0."), spread.get(tensor.name, tensor.shape)
        names = tuple(f"{prefix}.{layer}.{part}" for layer in range(num_layers))
        if layers.stacked:
            yield StoredWeight(layers.first(part), (num_layers, *shape), names, tensor.shape, stacked=True)
            continue
        for layer, name in enumerate(names):
            path = f"{layers.root}/blocks/{layer}/{part.replace('.', '/')}"
            yield StoredWeight(path, shape, (name,), tensor.shape, stacked=False)


def _expert_weights(
    matrices: ExpertMatrices, layers: LayerArrays, num_layers: int, prefix: str
) -> Iterator[StoredWeight]:
    for part in matrices.parts:
        stored = f"{part.name.removeprefix(f'{prefix}.0.')}.weight"
        path = stored.replace(".{}", "").replace(".", "/")
        names = [
            tuple(f"{prefix}.{layer}.{stored.format(expert)}" for expert in range(matrices.experts))
            for layer in range(num_layers)
        ]
        shape, hub_shape = (matrices.experts, matrices.columns, part.rows), (part.rows, matrices.columns)
        if layers.stacked:
            together = tuple(chain.from_iterable(names))
            place = f"{layers.root}/stacked/{path}"
            yield StoredWeight(place, (num_layers, *shape), together, hub_shape, stacked=True, experts=True)
            continue
        for layer, own in enumerate(names):
            place = f"{layers.root}/blocks/{layer}/{path}"
            yield StoredWeight(place, shape, own, hub_shape, stacked=False, experts=True)


def _spread_heads(layer: Layer, shape: ModelShape) -> dict[str, Shape]:
    """Stored shapes of those tensors of a layer that have separate axes for heads, by name."""
    attention, kv_heads = layer.attention, shape.num_kv_heads
    if attention.qkv.transposed:
        return _spread_transposed(attention, shape)
    queries, keys = (kv_heads, shape.num_heads // kv_heads, shape.head_dim), (kv_heads, shape.head_dim)
    spread: dict[str, Shape] = {}
    for part, heads in zip(attention.qkv.parts, (queries, keys, keys), strict=True):
        spread[f"{part.name}.weight"] = (*heads, shape.hidden_size)
        spread[f"{part.name}.bias"] = heads
    spread[f"{attention.output.parts[0].name}.weight"] = (shape.hidden_size, shape.num_heads, shape.head_dim)
    if attention.qk_norm is not None and attention.qk_norm.over == "width":
        spread[f"{attention.qk_norm.query.name}.weight"] = queries
        spread[f"{attention.qk_norm.key.name}.weight"] = keys
    return spread


def _spread_transposed(attention: Attention, shape: ModelShape) -> dict[str, Shape]:
    """Shapes where queries, keys and values are one matrix, [in, out]."""
    [qkv], [output], heads = attention.qkv.parts, attention.output.parts, (shape.num_heads, shape.head_dim)
    return {
        f"{qkv.name}.weight": (shape.hidden_size, 3, *heads),
        f"{qkv.name}.bias": (3, *heads),
        f"{output.name}.weight": (*heads, shape.hidden_size),
    }
