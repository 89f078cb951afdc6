"""GPT-2: learned positions, LayerNorm, biases everywhere, and weights that checkpoints store [in, out]."""

import torch.nn.functional as F
from torch import Tensor, nn

from ostro.errors import UnsupportedModel
from ostro.models.base import AttentionContext, AttentionSpec, ModelShape, Module
from ostro.models.config import ConfigReader
from ostro.models.decoder import CausalLM, served_context
from ostro.models.layers import Embedding, Linear, activation, parameter
from ostro.models.loading import Place, Weighted


def build_gpt2(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    if config.flag("add_cross_attention", False):
        raise UnsupportedModel("GPT-2 with cross-attention is not supported; only its decoder-only models are.")
    hidden, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    shape = ModelShape(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_seq_len=served_context(max_seq_len or positions, positions),
    )
    backbone = Gpt2Backbone(config, shape)
    tied = config.flag("tie_word_embeddings", True)
    return CausalLM(shape, backbone, backbone.wte, tied=tied, backbone_name="transformer")


class Conv1D(Linear):
    """A linear layer whose matrix checkpoints store transposed."""

    def places(self, path: str) -> dict[str, Place]:
        return {**super().places(path), f"{path}.weight": Place(self.weight.data.T)}


class LayerNorm(Weighted):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = parameter(size), parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Gpt2Attention(Module):
    def __init__(self, layer: int, shape: ModelShape, spec: AttentionSpec) -> None:
        super().__init__()
        self.layer, self.spec, self.head_dim = layer, spec, shape.head_dim
        self.c_attn = Conv1D(shape.hidden_size, 3 * shape.hidden_size, bias=True)
        self.c_proj = Conv1D(shape.hidden_size, shape.hidden_size, bias=True)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        q, k, v = self.c_attn(x).view(x.shape[0], -1, self.head_dim).chunk(3, 1)
        return self.c_proj(ctx.attend(self.layer, q, k, v, self.spec))


class Gpt2MLP(Module):
    def __init__(self, hidden_size: int, inner_size: int, act: str) -> None:
        super().__init__()
        self.c_fc = Conv1D(hidden_size, inner_size, bias=True)
        self.c_proj = Conv1D(inner_size, hidden_size, bias=True)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Gpt2Layer(Module):
    def __init__(self, config: ConfigReader, shape: ModelShape, layer: int) -> None:
        super().__init__()
        eps = config.number("layer_norm_epsilon", 1e-5)
        inner = config.integer("n_inner", 4 * shape.hidden_size)
        self.ln_1 = LayerNorm(shape.hidden_size, eps)
        self.attn = Gpt2Attention(layer, shape, AttentionSpec(scale=_attention_scale(config, shape, layer)))
        self.ln_2 = LayerNorm(shape.hidden_size, eps)
        self.mlp = Gpt2MLP(shape.hidden_size, inner, config.text("activation_function", "gelu_new"))

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        x += self.attn(self.ln_1(x), ctx)
        x += self.mlp(self.ln_2(x))
        return x


class Gpt2Backbone(Module):
    def __init__(self, config: ConfigReader, shape: ModelShape) -> None:
        super().__init__()
        self.wte = Embedding(shape.vocab_size, shape.hidden_size)
        self.wpe = Embedding(config.integer("n_positions"), shape.hidden_size)
        self.h = nn.ModuleList(Gpt2Layer(config, shape, layer) for layer in range(shape.num_layers))
        self.ln_f = LayerNorm(shape.hidden_size, config.number("layer_norm_epsilon", 1e-5))

    def forward(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        x = self.wte(ids) + self.wpe(positions)
        for layer in self.h:
            x = layer(x, ctx)
        return self.ln_f(x)


def _attention_scale(config: ConfigReader, shape: ModelShape, layer: int) -> float:
    scale = shape.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if config.flag("scale_attn_by_inverse_layer_idx", False) else scale
