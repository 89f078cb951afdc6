"""Encoders in torch: every token attends to all others of its text. Knows layouts of rows; knows no requests.

Texts of different lengths are rows of one matrix (`torch_models.ragged`), so nothing is padded.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostro.models import encoder as described_as
from ostro.models.architecture import ModelShape
from ostro.torch_models.base import Module
from ostro.torch_models.layers import ACTIVATIONS, Embedding, GatedMLP, LayerNorm, PlainMLP, Projection
from ostro.torch_models.ragged import Ragged, SequenceRun
from ostro.torch_models.rope import Rotary, Rotation


class EncoderModel(Module):
    def __init__(self, described: described_as.Encoder) -> None:
        super().__init__()
        self.described, self.shape = described, described.shape
        self.backbone_name = described.backbone
        self.embedding = _Embedding(described.embedding, described.shape)
        self.layers = nn.ModuleList(_Layer(layer, described.shape) for layer in described.layers)
        self.norm = None if described.norm is None else LayerNorm(described.norm)
        shape = described.shape
        self.ropes = nn.ModuleList(
            Rotary(rope, head_dim=shape.head_dim, max_seq_len=shape.max_seq_len) for rope in described.ropes
        )
        self.head = None if described.head is None else _Classifier(described.head)

    def forward(
        self, ids: Tensor, types: Tensor | None, layout: Ragged, after_layer: Callable[[], None] = lambda: None
    ) -> Tensor:
        """[rows] ids and token types, None for zeros -> [rows, hidden_size]."""
        x = self.embedding(ids, types, layout.positions)
        rotations = [rope(layout.positions, x.dtype) for rope in self.ropes]
        for layer in self.layers:
            x = layer(x, rotations, layout)
            after_layer()
        return x if self.norm is None else self.norm(x)

    def classify(self, pooled: Tensor) -> Tensor:
        """[texts, hidden_size] -> [texts, labels]. Only for a model that has a head."""
        assert self.head is not None, "the model embeds"
        return self.head(pooled)


class _Embedding(Module):
    def __init__(self, described: described_as.EncoderEmbedding, shape: ModelShape) -> None:
        super().__init__()
        positions, types = described.positions, described.types
        self.words = Embedding(described.words, shape.vocab_size, shape.hidden_size)
        self.positions = None if positions is None else Embedding(positions.name, positions.rows, shape.hidden_size)
        self.types = None if types is None else Embedding(types.name, types.rows, shape.hidden_size)
        self.first_position = described.first_position
        self.norm = LayerNorm(described.norm)

    def forward(self, ids: Tensor, types: Tensor | None, positions: Tensor) -> Tensor:
        x = self.words(ids)
        if self.types is not None:
            x += self.types.weight[0] if types is None else self.types(types)
        if self.positions is not None:
            x += self.positions(positions + self.first_position)
        return self.norm(x)


class _Layer(Module):
    def __init__(self, described: described_as.EncoderLayer, shape: ModelShape) -> None:
        super().__init__()
        self.attention = _Attention(described, shape)
        self.mlp = GatedMLP(described.mlp) if described.mlp.gated else PlainMLP(described.mlp)
        norm = described.attention_norm
        self.attention_norm = None if norm is None else LayerNorm(norm)
        self.mlp_norm = LayerNorm(described.mlp_norm)
        self.norms_last = described.norms_last

    def forward(self, x: Tensor, rotations: list[Rotation], layout: Ragged) -> Tensor:
        if self.norms_last:
            x = self._normed(self.attention(x, rotations, layout).add_(x))
            return self.mlp_norm(self.mlp(x).add_(x))
        x = self.attention(self._normed(x), rotations, layout).add_(x)
        return self.mlp(self.mlp_norm(x)).add_(x)

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.attention_norm is None else self.attention_norm(x)


class _Attention(Module):
    """Within each text. Neighbours of equal length are batched."""

    def __init__(self, described: described_as.EncoderLayer, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads, self.head_dim = shape.num_heads, shape.head_dim
        self.rope, self.reach = described.rope, described.reach
        self.qkv_proj = Projection(described.qkv)
        self.o_proj = Projection(described.output)

    def forward(self, x: Tensor, rotations: list[Rotation], layout: Ragged) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        qk, v = heads.split_with_sizes((2 * self.num_heads, self.num_heads), 1)
        if self.rope is not None:
            qk = rotations[self.rope](qk)
        q, k = qk.split_with_sizes((self.num_heads, self.num_heads), 1)
        mixed = [self._attend(q, k, v, run) for run in layout.runs]
        return self.o_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, run: SequenceRun) -> Tensor:
        q, k, v = (
            part[run.start : run.end].unflatten(0, (run.count, run.length)).transpose(1, 2) for part in (q, k, v)
        )
        mask = None if self.reach is None or self.reach >= run.length - 1 else _band(run.length, self.reach, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(run.end - run.start, -1)


def _band(length: int, reach: int, device: torch.device) -> Tensor:
    """[length, length]: which tokens are at most `reach` apart."""
    positions = torch.arange(length, device=device)
    return (positions[:, None] - positions).abs_() <= reach


class _Classifier(Module):
    def __init__(self, described: described_as.Classifier) -> None:
        super().__init__()
        self.dense, self.output = Projection(described.dense), Projection(described.output)
        self.norm = None if described.norm is None else LayerNorm(described.norm)
        self.act = torch.tanh if described.activation == "tanh" else ACTIVATIONS[described.activation]

    def forward(self, pooled: Tensor) -> Tensor:
        x = self.act(self.dense(pooled))
        return self.output(x if self.norm is None else self.norm(x))
