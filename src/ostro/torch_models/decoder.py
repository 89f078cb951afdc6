"""A decoder as torch modules: layers, backbone and head, built from an `Architecture`. Knows no family."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ostro.errors import Unsupported
from ostro.models import architecture as arch
from ostro.models.cut import vocabulary_share
from ostro.torch_models.base import AttentionContext, Model, Module
from ostro.torch_models.experts import CpuExperts, Experts, SideExperts
from ostro.torch_models.layers import (
    ACTIVATIONS,
    Attention,
    CutEmbedding,
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    PlainMLP,
    Projection,
    RMSNorm,
    Vector,
    mlp_module,
    norm_module,
)
from ostro.torch_models.recurrent import mixer_module
from ostro.torch_models.rope import Rotary, Rotation
from ostro.torch_models.shard import Shard


class Table(Embedding):
    """Rows that are looked up and never multiplied."""

    def pack(self) -> None:
        """Nothing to do: the other layout is for products."""


class LayerInputs(Module):
    """The per-layer inputs, for all layers.

    ids ── table ──────────────────────┐
    embedded ids ── projection ── norm ┴── sum ── [tokens, layers, width]
    a layer's result ── gate ── times its input ── output ── norm ── added to the stream
    """

    def __init__(self, described: arch.LayerInputs) -> None:
        super().__init__()
        table = described.table
        self.table = Table(table.name, table.rows, described.projection.rows, scale=described.table_scale)
        self.projection = Projection(described.projection)
        self.norm = RMSNorm(described.norm)
        self.width, self.projection_scale, self.scale = described.width, described.projection_scale, described.scale

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """x holds the ids' embeddings."""
        projected = self.projection(x).mul_(self.projection_scale).unflatten(1, (-1, self.width))
        return (self.norm(projected) + self.table(ids).view_as(projected)).mul_(self.scale)


class LayerInput(Module):
    """One layer's contribution from its own input to the stream."""

    def __init__(self, described: arch.LayerInput) -> None:
        super().__init__()
        self.gate, self.output = Projection(described.gate), Projection(described.output)
        self.norm = RMSNorm(described.norm)
        self.act = ACTIVATIONS[described.activation]

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        return self.norm(self.output(self.act(self.gate(x)) * own))


class ReadingAttention(Module):
    """Attention of a layer that has no keys and values: it reads those of an earlier layer."""

    def __init__(self, described: arch.Attention, layer: int, shape: arch.ModelShape) -> None:
        """`shape` is that of the whole model; `layer` is the one whose keys and values are read."""
        super().__init__()
        self.layer, self.spec, self.head_dim = layer, described.spec, shape.of_layer(layer).head_dim
        self.q_proj = Projection(described.qkv)
        self.q_norm = None if described.query_norm is None else RMSNorm(described.query_norm)
        self.o_proj = Projection(described.output)

    def forward(
        self, x: Tensor, rotation: Rotation | None, ctx: AttentionContext, query_scales: Tensor | None = None
    ) -> Tensor:
        q: Tensor = self.q_proj(x).view(x.shape[0], -1, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if rotation is not None:
            q = rotation(q)
        if query_scales is not None:
            q = q * query_scales
        return self.o_proj(ctx.attend_stored(self.layer, q, self.spec))


class MixerPair(Module):
    """Attention and a recurrent mixer that read the same rows."""

    def __init__(self, attention: Module, recurrent: Module) -> None:
        super().__init__()
        self.attention, self.recurrent = attention, recurrent

    def forward(
        self, x: Tensor, rotation: Rotation | None, ctx: AttentionContext, query_scales: Tensor | None = None
    ) -> Tensor:
        added: Tensor = self.attention(x, rotation, ctx, query_scales)
        return added.add_(self.recurrent(x, None, ctx))


class DecoderLayer(Module):
    """Mixer and MLP each add to the residual stream, in place. Which of them and of their norms exist depends on the
    description.
    """

    def __init__(self, described: arch.Layer, index: int, shape: arch.ModelShape, shard: Shard | None = None) -> None:
        """`shape` is that of the whole model."""
        super().__init__()
        self.attention_norm = _norm(described.attention_norm)
        self.mixer = None if described.mixer is None else _mixer(described.mixer, index, shape, shard)
        self.attention_post_norm = _norm(described.attention_post_norm)
        is_shared = described.mlp_norm is not None and described.mlp_norm == described.attention_norm
        self.mlp_norm = self.attention_norm if is_shared else _norm(described.mlp_norm)
        self.mlp = None if described.mlp is None else _mlp(described.mlp, shard)
        self.mlp_post_norm = _norm(described.mlp_post_norm)
        self.residual_scale, self.parallel = described.residual_scale, described.parallel
        self.side = None if described.side is None else SideExperts(described.side)
        self.input = None if described.input is None else LayerInput(described.input)
        self.stream_scale = None if described.stream_scale is None else Vector(described.stream_scale, 1)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        ctx: AttentionContext,
        query_scales: Tensor | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        """`own` is the layer's part of the `LayerInputs`."""
        before = x.clone() if self.parallel else x
        if self.mixer is not None:
            normed = x if self.attention_norm is None else self.attention_norm(x)
            added = self.mixer(normed, rotation, ctx, query_scales)
            x += self._scaled(added if self.attention_post_norm is None else self.attention_post_norm(added))
        if self.mlp is not None:
            added = self.mlp(before if self.mlp_norm is None else self.mlp_norm(before))
            if self.side is not None:
                added = self.side(before, added)
            x += self._scaled(added if self.mlp_post_norm is None else self.mlp_post_norm(added))
        if self.input is not None:
            x += self.input(x, own)
        return x if self.stream_scale is None else x.mul_(self.stream_scale.weight)

    def _scaled(self, added: Tensor) -> Tensor:
        return added if self.residual_scale == 1.0 else added.mul_(self.residual_scale)


def _mixer(described: arch.Mixer, index: int, shape: arch.ModelShape, shard: Shard | None) -> Module:
    if isinstance(described, arch.MixerPair):
        of_both = (_mixer(each, index, shape, shard) for each in (described.attention, described.recurrent))
        return MixerPair(*of_both)
    if not isinstance(described, arch.Attention):
        return mixer_module(described, index, shard)
    if described.kv_layer is None:
        return Attention(described, index, shape, shard)
    return ReadingAttention(described, described.kv_layer, shape)


def _mlp(described: arch.MLP | arch.Experts, shard: Shard | None) -> GatedMLP | PlainMLP | Experts | CpuExperts:
    if isinstance(described, arch.Experts):
        assert shard is None, "experts are not divided over ranks"
        return CpuExperts(described) if described.on_cpu else Experts(described)
    return mlp_module(described, shard)


def _norm(described: arch.Norm | None) -> RMSNorm | LayerNorm | None:
    return None if described is None else norm_module(described)


class Backbone(Module):
    """Embedding, layers, final norm."""

    def __init__(self, described: arch.Architecture, embedding: Embedding, shard: Shard | None = None) -> None:
        super().__init__()
        shape, positions = described.shape, described.embedding.positions
        self.embed_tokens = embedding
        self.embed_positions = (
            None if positions is None else Embedding(positions.name, positions.rows, shape.hidden_size)
        )
        self.layers = nn.ModuleList(
            DecoderLayer(layer, index, shape, shard) for index, layer in enumerate(described.layers)
        )
        self.norm = norm_module(described.norm)
        self.ropes = nn.ModuleList(
            Rotary(rope, head_dim=described.rope_head_dim(index), max_seq_len=shape.max_seq_len)
            for index, rope in enumerate(described.ropes)
        )
        mixers = [layer.attends for layer in described.layers]
        self.rope_of_layer = [None if mixer is None else mixer.rope for mixer in mixers]
        self.layer_inputs = None if described.layer_inputs is None else LayerInputs(described.layer_inputs)
        self.scaling_of_layer = [None if mixer is None else mixer.query_scaling for mixer in mixers]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(ids)
        return x if self.embed_positions is None else x + self.embed_positions(positions)

    def forward(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        x = self.embed(ids, positions)
        rotations = [rope(positions, x.dtype) for rope in self.ropes]
        scales = {scaling: _query_scales(scaling, positions, x.dtype) for scaling in {*self.scaling_of_layer}}
        inputs = None if self.layer_inputs is None else self.layer_inputs(ids, x)
        kinds = zip(self.layers, self.rope_of_layer, self.scaling_of_layer, strict=True)
        for index, (layer, rope, scaling) in enumerate(kinds):
            own = None if inputs is None else inputs[:, index]
            x = layer(x, None if rope is None else rotations[rope], ctx, scales[scaling], own)
        return self.norm(x)


def _query_scales(scaling: arch.QueryScaling | None, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    if scaling is None:
        return None
    spans = torch.floor((positions.float() + scaling.shift) / scaling.span)
    return (torch.log1p(spans) * scaling.strength + 1.0).to(dtype)[:, None, None]


class CausalLM(Model):
    """A backbone, and the head that turns its hidden states into logits; a tied head is the embedding itself."""

    def __init__(
        self,
        shape: arch.ModelShape,
        backbone: nn.Module,
        embedding: Embedding,
        head: arch.Head | None,
        *,
        backbone_name: str,
        shard: Shard | None = None,
    ) -> None:
        """`shape` is that of this rank's part."""
        super().__init__()
        self.shape, self.backbone_name = shape, backbone_name
        self._shard = shard
        self.logit_scale = 1.0 if head is None else head.scale
        self.logit_softcap = None if head is None else head.softcap
        self.add_module(backbone_name, backbone)
        self.lm_head: Embedding | Linear | None = _head(head, shape, embedding, shard)

    def forward(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        return self.get_submodule(self.backbone_name)(ids, positions, ctx)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is None:
            raise Unsupported("This model was saved without a language-model head: it can embed text, not write it.")
        logits = self.whole_logits(self.lm_head.matmul(hidden))
        if self.logit_scale != 1.0:
            logits = logits.mul_(self.logit_scale)
        if self.logit_softcap is None:
            return logits
        return (logits.float() / self.logit_softcap).tanh_().mul_(self.logit_softcap)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """The logits of all tokens, from those of the tokens that this rank has."""
        if self._shard is None:
            return logits
        return self._shard.group.gather(logits)[:, : self.shape.vocab_size].contiguous()

    @property
    def has_head(self) -> bool:
        return self.lm_head is not None


def _head(
    described: arch.Head | None, shape: arch.ModelShape, embedding: Embedding, shard: Shard | None
) -> Embedding | Projection | None:
    if described is None:
        return None
    if described.name is None:
        return embedding
    share = None if shard is None else vocabulary_share(shape, shard.cut, shard.rank)
    return Projection(arch.Projection(shape.hidden_size, (arch.Part(described.name, shape.vocab_size),)), share)


class Decoder(CausalLM):
    """The model that an `Architecture` describes, or one rank's part of it."""

    def __init__(self, described: arch.Architecture, shard: Shard | None = None) -> None:
        """The description is of the whole model in either case."""
        shape = described.shape if shard is None else shard.cut.shape(described.shape)
        name, scale = described.embedding.name, described.embedding.scale
        embedding = (
            Embedding(name, shape.vocab_size, shape.hidden_size, scale=scale)
            if shard is None
            else CutEmbedding(name, shape, shard, scale=scale)
        )
        backbone = Backbone(described, embedding, shard)
        super().__init__(shape, backbone, embedding, described.head, backbone_name=described.backbone, shard=shard)
        self.described = described
        self._states = described.states if shard is None else shard.cut.states(described)

    @property
    def body(self) -> Backbone:
        """The backbone, by a name that no family gives it."""
        backbone = self.get_submodule(self.backbone_name)
        assert isinstance(backbone, Backbone)
        return backbone

    @property
    def states(self) -> Sequence[arch.State | None]:
        return self._states

    @property
    def captures(self) -> bool:
        # The host may have to know how many rows each expert has.
        return not self.described.has_experts

    @property
    def layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.body.layers if isinstance(layer, DecoderLayer)]
