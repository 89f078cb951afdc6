"""The frame that families with rotary positions share: shape, layers, backbone, head. Knows no family by name."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ostro.errors import BadRequest, Unsupported
from ostro.models.base import AttentionContext, Model, ModelShape, Module
from ostro.models.config import ConfigReader
from ostro.models.layers import Attention, Embedding, GatedMLP, Linear, RMSNorm
from ostro.models.rope import Rotary, Rotation
from ostro.models.rope_settings import rope_settings


class PreNormLayer(Module):
    """Attention and MLP each read the normed stream and add to it. The stream is updated in place."""

    def __init__(self, attention: Attention, mlp: GatedMLP, norm: Callable[[], RMSNorm]) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def forward(self, x: Tensor, rotation: Rotation, ctx: AttentionContext) -> Tensor:
        x += self.self_attn(self.input_layernorm(x), rotation, ctx)
        x += self.mlp(self.post_attention_layernorm(x))
        return x


class Backbone(Module):
    """Embedding, layers, final norm. Most models rotate all layers alike; `rope_of_layer` tells where they do not."""

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[nn.Module],
        norm: RMSNorm,
        ropes: Sequence[Rotary],
        rope_of_layer: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.ropes = nn.ModuleList(ropes)
        self.rope_of_layer = tuple(rope_of_layer or [0] * len(layers))

    def forward(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        x = self.embed_tokens(ids)
        rotations = [rope(positions, x.dtype) for rope in self.ropes]
        for layer, rope in zip(self.layers, self.rope_of_layer, strict=True):
            x = layer(x, rotations[rope], ctx)
        return self.norm(x)


class CausalLM(Model):
    """A backbone, and the head that turns its hidden states into logits: the embedding itself where they are tied."""

    def __init__(
        self,
        shape: ModelShape,
        backbone: nn.Module,
        embedding: Embedding,
        *,
        tied: bool,
        logit_softcap: float | None = None,
        backbone_name: str = "model",
    ) -> None:
        super().__init__()
        self.shape, self.logit_softcap, self.backbone_name = shape, logit_softcap, backbone_name
        self.add_module(backbone_name, backbone)
        self.lm_head: Embedding | Linear | None = embedding if tied else Linear(shape.hidden_size, shape.vocab_size)

    def forward(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        return self.get_submodule(self.backbone_name)(ids, positions, ctx)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is None:
            raise Unsupported("This model was saved without a language-model head: it can embed text, not write it.")
        logits = self.lm_head.product(hidden)
        if self.logit_softcap is None:
            return logits
        return (logits.float() / self.logit_softcap).tanh_().mul_(self.logit_softcap)

    @property
    def has_head(self) -> bool:
        return self.lm_head is not None

    def drop_head(self) -> None:
        if isinstance(self.lm_head, Linear):
            self.lm_head = None


def assemble(
    config: ConfigReader, shape: ModelShape, layers: Sequence[nn.Module], norm: Callable[[], RMSNorm]
) -> CausalLM:
    """The plain frame around a family's layers: one rope, and a head of its own unless config.json ties it."""
    embedding = Embedding(shape.vocab_size, shape.hidden_size)
    rope = Rotary(rope_settings(config), head_dim=shape.head_dim, max_seq_len=shape.max_seq_len)
    backbone = Backbone(embedding, layers, norm(), [rope])
    return CausalLM(shape, backbone, embedding, tied=config.flag("tie_word_embeddings", False))


def model_shape(config: ConfigReader, max_seq_len: int | None) -> ModelShape:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    settings = rope_settings(config)
    return ModelShape(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // heads),
        max_seq_len=served_context(max_seq_len or settings.default_context(), settings.longest_context()),
    )


def served_context(asked: int, limit: int) -> int:
    if asked > limit:
        raise BadRequest(
            f"max_seq_len is {asked}, but the model knows only {limit} positions; lower it to {limit} or less.",
            param="max_seq_len",
        )
    return asked


def sliding_layers(config: ConfigReader, num_layers: int, otherwise: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers have the sliding window: as `layer_types` lists them, in older files by the family's own rule."""
    types = config.texts("layer_types")
    if not types:
        return tuple(otherwise(layer) for layer in range(num_layers))
    return tuple(name == "sliding_attention" for name in types)
