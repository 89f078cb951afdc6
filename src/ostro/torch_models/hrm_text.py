"""HRM-Text: two stacks of layers that run repeatedly over the same tokens, the low stack several times per high one.

    cycle         low  low  low  HIGH │ low  low  low  HIGH        H_cycles 2, L_cycles 3, two layers per stack
    KV slots      0-1  2-3  4-5  6-7  │ 8-9  …              14-15

A layer's input differs between runs, so each run has its own keys and values: there are as many KV slots as layer runs,
and pages are sized accordingly.

Attention is causal, as in transformers for a prompt without token types. Models with `prefix_lm` were trained with
bidirectional attention within prompts, which transformers supports on request; it is not served here.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ostro.models.architecture import MLP, AttentionSpec, HrmText, Part
from ostro.models.architecture import Projection as DescribedProjection
from ostro.torch_models.base import AttentionContext, Module
from ostro.torch_models.decoder import CausalLM
from ostro.torch_models.layers import Embedding, GatedMLP, Linear, Projection, parameter
from ostro.torch_models.loading import Place, Weighted
from ostro.torch_models.rope import Rotary, Rotation


class HrmTextModel(CausalLM):
    def __init__(self, described: HrmText) -> None:
        shape = described.shape
        embedding = Embedding(f"{described.backbone}.embed_tokens", shape.vocab_size, shape.hidden_size)
        backbone = HrmTextBackbone(described, embedding)
        super().__init__(shape, backbone, embedding, described.head, backbone_name=described.backbone)


class PlainNorm(Module):
    """RMSNorm without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


class StoredWhole(Projection):
    """Checkpoints store its weight whole but its biases in parts."""

    def places(self, path: str) -> dict[str, Place]:
        biases = {name: place for name, place in super().places(path).items() if name.endswith(".bias")}
        return {f"{_stored(path)}.weight": Place(self.weight.data), **biases}


class OutLinear(Linear):
    def places(self, path: str) -> dict[str, Place]:
        return super().places(_stored(path))


class GatedAttention(Module):
    """Attention whose output is scaled by a sigmoid gate of its input before the output projection."""

    def __init__(self, described: HrmText, path: str) -> None:
        super().__init__()
        shape, bias = described.shape, described.attention_bias
        self.spec = AttentionSpec(scale=shape.head_dim**-0.5)
        self.head_dim, self.width = shape.head_dim, shape.num_heads * shape.head_dim
        self.gate_qk_v = (shape.num_heads, 2 * shape.num_heads, shape.num_heads)
        parts = tuple(Part(f"{path}.{name}", self.width) for name in ("gate_proj", "q_proj", "k_proj", "v_proj"))
        self.gqkv_proj = StoredWhole(DescribedProjection(shape.hidden_size, parts, bias=bias))
        self.o_proj = OutLinear(self.width, shape.hidden_size, bias=bias)

    def forward(self, x: Tensor, rotation: Rotation, slot: int, ctx: AttentionContext) -> Tensor:
        projected = self.gqkv_proj(x)
        _, qk, v = projected.view(x.shape[0], -1, self.head_dim).split_with_sizes(self.gate_qk_v, 1)
        q, k = rotation(qk).chunk(2, 1)
        seen = ctx.attend(slot, q, k, v, self.spec)
        return self.o_proj(projected[:, : self.width].sigmoid().mul_(seen))


class HrmTextLayer(Module):
    """Attention and MLP each read the normed stream and add to it, in place."""

    def __init__(self, described: HrmText, path: str) -> None:
        super().__init__()
        self.self_attn = GatedAttention(described, f"{path}.self_attn")
        self.mlp = _mlp(described, f"{path}.mlp")
        self.norm = PlainNorm(described.eps)

    def forward(self, x: Tensor, rotation: Rotation, slot: int, ctx: AttentionContext) -> Tensor:
        x += self.self_attn(self.norm(x), rotation, slot, ctx)
        x += self.mlp(self.norm(x))
        return x


class Stack(Module):
    def __init__(self, described: HrmText, path: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            HrmTextLayer(described, f"{path}.layers.{index}") for index in range(described.depth)
        )
        self.norm = PlainNorm(described.eps)

    def forward(self, x: Tensor, rotation: Rotation, first_slot: int, ctx: AttentionContext) -> Tensor:
        """Modifies x. The layers' keys and values go to consecutive slots from `first_slot` on."""
        for slot, layer in enumerate(self.layers, first_slot):
            x = layer(x, rotation, slot, ctx)
        return self.norm(x)


class HrmTextBackbone(Weighted):
    def __init__(self, described: HrmText, embedding: Embedding) -> None:
        super().__init__()
        shape = described.shape
        self.embed_tokens = embedding
        self.z_L_init = parameter(shape.hidden_size)
        self.L_module = Stack(described, f"{described.backbone}.L_module")
        self.H_module = Stack(described, f"{described.backbone}.H_module")
        self.rope = Rotary(described.rope, head_dim=shape.head_dim, max_seq_len=shape.max_seq_len)
        self.embedding_scale = described.embedding_scale
        # The order in which stacks run: the low one several times, then the high one.
        self.is_high = ([False] * described.low_cycles + [True]) * described.high_cycles

    def forward(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        high, low = self.embed_tokens(ids) * self.embedding_scale, self.z_L_init
        rotation = self.rope(positions, high.dtype)
        depth = len(self.H_module.layers)
        for run, is_high in enumerate(self.is_high):
            if is_high:
                high = self.H_module(high + low, rotation, run * depth, ctx)
            else:
                low = self.L_module(high + low, rotation, run * depth, ctx)
        return high


def _mlp(described: HrmText, path: str) -> GatedMLP:
    hidden, inner, bias = described.shape.hidden_size, described.inner_size, described.mlp_bias
    halves = (Part(f"{path}.gate_proj", inner), Part(f"{path}.up_proj", inner))
    up = DescribedProjection(hidden, halves, bias=bias)
    down = DescribedProjection(inner, (Part(f"{path}.down_proj", hidden),), bias=bias)
    mlp = GatedMLP(MLP(up=up, down=down, activation=described.activation, gated=True))
    mlp.gate_up_proj = StoredWhole(up)
    return mlp


def _stored(path: str) -> str:
    """A module's name in checkpoints, where attention has a different name than in transformers and adapters."""
    return path.replace(".self_attn.", ".attn.")
