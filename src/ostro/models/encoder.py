"""An encoder's description as data: bidirectional layers, and the head of a classifier. Imports no torch.

A family (`models.families`) translates a config.json into an `Encoder`, as it does for decoders into an `Architecture`.

    x = embedding_norm(words[ids] + positions[offset + position] + types[type])
    for layer in layers:
        norms first:  x += attention(attention_norm(x));     x += mlp(mlp_norm(x))
        norms last:   x = attention_norm(x + attention(x));  x = mlp_norm(x + mlp(x))
    x = norm(x)

Every token attends to all others of its text, so there is no KV cache. Tensors have their full names in Hugging Face
checkpoints.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ostro.models.architecture import MLP, Activation, ModelShape, Norm, Part, Projection, StoredTensor
from ostro.models.rope_settings import RopeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderEmbedding:
    """A row per token; with learned positions, plus a row per position; with token types, plus a row per type."""

    words: str
    norm: Norm
    positions: Part | None = None
    first_position: int = 0
    """The row of a text's first token: RoBERTa's earlier rows are for padding."""
    types: Part | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayer:
    qkv: Projection
    """Queries, keys and values, in this order."""
    output: Projection
    mlp: MLP
    attention_norm: Norm | None
    mlp_norm: Norm
    norms_last: bool
    """Whether norms apply to the sum of a part's input and output instead of its input."""
    rope: int | None = None
    """Index of the model's rope that rotates queries and keys; None for no rotation."""
    reach: int | None = None
    """How far away, on either side, a token attends to others; None for the whole text."""

    @property
    def projections(self) -> tuple[Projection, Projection, Projection, Projection]:
        return self.qkv, self.output, self.mlp.up, self.mlp.down

    @property
    def num_weights(self) -> int:
        """Number of weights in its matrices."""
        return sum(projection.rows * projection.columns for projection in self.projections)

    def tensors(self) -> Iterator[StoredTensor]:
        for projection in self.projections:
            yield from projection.tensors()
        for norm in (self.attention_norm, self.mlp_norm):
            if norm is not None:
                yield from norm.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """logits = output(norm(act(dense(pooled))))."""

    pooling: Literal["cls", "mean"]
    """Whether it reads the first token's state or the mean of all."""
    dense: Projection
    activation: Activation | Literal["tanh"]
    norm: Norm | None
    output: Projection

    @property
    def num_labels(self) -> int:
        return self.output.rows

    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.dense.tensors()
        if self.norm is not None:
            yield from self.norm.tensors()
        yield from self.output.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A transformer whose tokens attend to all others: it embeds texts, or classifies them."""

    shape: ModelShape
    embedding: EncoderEmbedding
    layers: tuple[EncoderLayer, ...]
    norm: Norm | None = None
    ropes: tuple[RopeSettings, ...] = ()
    head: Classifier | None = None
    """None for a model that embeds."""
    backbone: str = "model"
    """The family's prefix of all tensor names but the head's."""

    @property
    def widest(self) -> int:
        """The longest row that a layer computes per token."""
        return max(max(layer.mlp.up.rows, layer.qkv.rows) for layer in self.layers)

    def tensors(self) -> Iterator[StoredTensor]:
        """All tensors that a checkpoint must contain."""
        hidden = self.shape.hidden_size
        yield StoredTensor(f"{self.embedding.words}.weight", (self.shape.vocab_size, hidden))
        for table in (self.embedding.positions, self.embedding.types):
            if table is not None:
                yield StoredTensor(f"{table.name}.weight", (table.rows, hidden))
        yield from self.embedding.norm.tensors()
        for layer in self.layers:
            yield from layer.tensors()
        if self.norm is not None:
            yield from self.norm.tensors()
        if self.head is not None:
            yield from self.head.tensors()
