"""Shared by the families: sizes under config.json's usual keys, and parts under the tensor names of most checkpoints.

Every value is checked as it is read, so any description that exists can be built: numbers are finite and, with a wide
margin, within the range of real models, and dependent values agree. Errors name the field. Keys that a family does not
read are ignored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as shown
from typing import NamedTuple

from ostro.errors import BadRequest, UnsupportedModel
from ostro.models.architecture import (
    MLP,
    Activation,
    Architecture,
    Attention,
    AttentionSpec,
    Embedding,
    ExpertMatrices,
    Experts,
    Head,
    Heads,
    Layer,
    Mixer,
    ModelShape,
    Norm,
    Part,
    Projection,
    QKNorm,
)
from ostro.models.config import (
    EPS,
    MOST_EXPERTS,
    MOST_EXPERTS_OF_ALL_LAYERS,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_INNER,
    MOST_LAYERS,
    MOST_VOCAB,
    ConfigReader,
)
from ostro.models.rope_settings import RopeSettings, checked_rope, rope_settings
from ostro.models.row_order import ByHead, RowOrder

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


def decoder_shape(config: ConfigReader, max_seq_len: int | None, rope: RopeSettings | None = None) -> ModelShape:
    """The shape of a model with rotary positions. `max_seq_len` is the context length to serve; it defaults to the
    model's own, taken from `rope` if a model has several.
    """
    heads = config.integer("num_attention_heads", most=MOST_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, most=MOST_HEADS)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", kv_heads, f"a divisor of 'num_attention_heads' ({heads})")
    head_dim = _head_dim(config, heads)
    rope = checked_rope(rope or rope_settings(config), head_dim)
    return ModelShape(
        vocab_size=config.integer("vocab_size", most=MOST_VOCAB),
        hidden_size=config.integer("hidden_size", most=MOST_HIDDEN),
        num_layers=config.integer("num_hidden_layers", most=MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_seq_len=served_context(max_seq_len or rope.default_context(), rope.longest_context()),
    )


def _head_dim(config: ConfigReader, heads: int) -> int:
    hidden = config.integer("hidden_size", most=MOST_HIDDEN)
    if config.get("head_dim") is not None:
        return config.integer("head_dim", most=MOST_HEAD_DIM)
    if hidden % heads:
        raise config.bad("hidden_size", hidden, f"a multiple of 'num_attention_heads' ({heads}) without 'head_dim'")
    return hidden // heads


def served_context(asked: int, limit: int) -> int:
    if asked > limit:
        raise BadRequest(
            f"max_seq_len is {asked}, but the model knows only {limit} positions; lower it to {limit} or less.",
            param="max_seq_len",
        )
    return asked


def activation(config: ConfigReader, key: str, default: str) -> Activation:
    name = config.text(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"Activation {name!r} is not known; known are {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[name]


def sliding_layers(config: ConfigReader, num_layers: int, otherwise: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers have a sliding window; see `limited_layers`."""
    return limited_layers(config, num_layers, otherwise, limited="sliding_attention")


def limited_layers(
    config: ConfigReader, num_layers: int, otherwise: Callable[[int], bool], *, limited: str
) -> tuple[bool, ...]:
    """Which layers are of the `limited` kind, and not of full attention: from `layer_types`, or in older files by the
    family's own rule.
    """
    types, known = config.texts("layer_types"), ("full_attention", limited)
    if not types:
        return tuple(otherwise(layer) for layer in range(num_layers))
    if len(types) != num_layers or not set(known).issuperset(types):
        raise UnsupportedModel(
            f"{config.source}: 'layer_types' must say {' or '.join(sorted(known))} for each of {num_layers} "
            f"layers, got {len(types)}: {shown(list(types))}."
        )
    return tuple(name == limited for name in types)


def recurrent_layers(config: ConfigReader, shape: ModelShape) -> tuple[bool, ...]:
    """Which layers keep a state, for a config with `full_attention_interval`: those between one that attends and
    the next.
    """
    interval = config.integer("full_attention_interval", 4, most=MOST_LAYERS)
    return limited_layers(
        config, shape.num_layers, otherwise=lambda layer: (layer + 1) % interval != 0, limited="linear_attention"
    )


def with_states(config: ConfigReader, shape: ModelShape, recurrent: Sequence[bool]) -> ModelShape:
    """The shape of a model in which some layers keep a state, and no keys and values."""
    if all(recurrent):
        raise UnsupportedModel(f"{config.source}: no layer attends, and Ostro counts on keys and values in some.")
    heads = (Heads(0 if each else shape.num_kv_heads, shape.head_dim) for each in recurrent)
    return replace(shape, layer_heads=tuple(heads)) if any(recurrent) else shape


def rotating_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers rotate queries and keys, for a config with `no_rope_layers`."""
    # Despite the name, 1 means that the layer rotates.
    rotates = config.flags("no_rope_layers")
    if not rotates:
        interval = config.integer("no_rope_layer_interval", 4, most=MOST_LAYERS)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(rotates) != num_layers:
        raise config.bad("no_rope_layers", list(rotates), f"a list of {num_layers}, one for each layer")
    return rotates


class ExpertNames(NamedTuple):
    """What a layer's mixture of experts is called in checkpoints, as in `ExpertMatrices`."""

    router: str = "mlp.gate"
    up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    """Gate and up, or one tensor for both."""
    down: str = "mlp.experts.{}.down_proj"

    @property
    def by_gguf_name(self) -> dict[str, str]:
        """Names for checkpoints that store gates and ups separately, as GGUF does."""
        gate, up = self.up
        return {"ffn_gate_inp": self.router, "ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": self.down}


EXPERT_NAMES = ExpertNames()
STACKED_NAMES = ExpertNames(up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")
"""The same where one tensor holds all experts' gates and ups, and one their downs."""
STACKED = "experts_stored_stacked"
"""A flag in a config whose checkpoint is known to hold tensors of `STACKED_NAMES`. Several families have both forms."""
STORED_APART = "experts_stored_apart"
"""A flag in a config that describes a GGUF file, which stores experts' gates and ups separately, unlike the Hub."""


class Mixture(NamedTuple):
    """The sizes of a layer's mixture of experts."""

    experts: int
    chosen: int
    inner_size: int


def mixture(
    config: ConfigReader,
    shape: ModelShape,
    *,
    inner_size: str = "intermediate_size",
    count_key: str = "num_experts",
    chosen_key: str = "num_experts_per_tok",
) -> Mixture:
    """The keys are the family's for an expert's width, the number of experts, and those of a token."""
    # Newer versions of transformers may write this key whatever the family's own is.
    experts = count_key if config.get("num_local_experts") is None else "num_local_experts"
    count = config.integer(experts, most=min(MOST_EXPERTS, MOST_EXPERTS_OF_ALL_LAYERS // shape.num_layers))
    chosen = config.integer(chosen_key, most=MOST_EXPERTS)
    if chosen > count:
        raise config.bad(chosen_key, chosen, f"at most {experts!r} ({count})")
    return Mixture(count, chosen, config.integer(inner_size, most=MOST_INNER))


@dataclass(frozen=True, slots=True)
class HubLayer:
    """Builds one layer's parts, with RMS norms, under the names used in most Hub checkpoints."""

    index: int
    shape: ModelShape
    eps: float
    inner_size: int
    norm_offset: float = 0.0
    backbone: str = "model"

    def norm(self, name: str, size: int | None = None) -> Norm:
        return Norm(self.named(name), size or self.shape.hidden_size, self.eps, offset=self.norm_offset)

    def attention(
        self,
        spec: AttentionSpec,
        *,
        parent: str = "self_attn",
        rope: int | None = 0,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: QKNorm | None = None,
        stored_fused: bool = False,
        order: RowOrder | None = None,
        gated: bool = False,
    ) -> Attention:
        """`order` is that of the stored rows of queries and keys. If gated, a head's query rows and then its gate's are
        stored together.
        """
        shape = self.shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        parts = {"q_proj": 2 * queries if gated else queries, "k_proj": keys, "v_proj": keys}
        if stored_fused:
            parts = {"qkv_proj": queries + 2 * keys}
        qkv = self.projection(parent, shape.hidden_size, parts, bias=qkv_bias)
        if order is not None:
            *rotated, values = qkv.parts
            qkv = replace(qkv, parts=(*(part._replace(order=order) for part in rotated), values))
        if gated:
            gates_first = ByHead(shape.num_heads, (shape.head_dim,) * 2, last_first=True)
            qkv = replace(qkv, parts=(qkv.parts[0]._replace(order=gates_first), *qkv.parts[1:]))
        return Attention(
            spec=spec,
            qkv=qkv,
            output=self.projection(parent, queries, {"o_proj": shape.hidden_size}, bias=output_bias),
            rope=rope,
            qk_norm=qk_norm,
            gated=gated,
        )

    def head_norms(self) -> QKNorm:
        size = self.shape.head_dim
        return QKNorm(self.norm("self_attn.q_norm", size), self.norm("self_attn.k_norm", size), over="head")

    def width_norms(self) -> QKNorm:
        queries, keys = (heads * self.shape.head_dim for heads in (self.shape.num_heads, self.shape.num_kv_heads))
        return QKNorm(self.norm("self_attn.q_norm", queries), self.norm("self_attn.k_norm", keys), over="width")

    def gated_mlp(self, act: Activation, *, bias: bool = False, stored_fused: bool = False, parent: str = "mlp") -> MLP:
        hidden, inner = self.shape.hidden_size, self.inner_size
        parts = {"gate_up_proj": 2 * inner} if stored_fused else {"gate_proj": inner, "up_proj": inner}
        return MLP(
            up=self.projection(parent, hidden, parts, bias=bias),
            down=self.projection(parent, inner, {"down_proj": hidden}, bias=bias),
            activation=act,
            gated=True,
        )

    def experts(
        self, sizes: Mixture, act: Activation, *, normalized: bool, names: ExpertNames = EXPERT_NAMES
    ) -> Experts:
        hidden, inner = self.shape.hidden_size, sizes.inner_size
        parts = tuple(Part(self.named(name), 2 * inner // len(names.up)) for name in names.up)
        return Experts(
            router=Projection(hidden, (Part(self.named(names.router), sizes.experts),)),
            up=ExpertMatrices(sizes.experts, hidden, parts),
            down=ExpertMatrices(sizes.experts, inner, (Part(self.named(names.down), hidden),)),
            activation=act,
            chosen=sizes.chosen,
            normalized=normalized,
        )

    def pre_norm(self, mixer: Mixer, mlp: MLP | Experts) -> Layer:
        """Mixer and MLP each read the normed stream."""
        return Layer(
            mixer=mixer,
            mlp=mlp,
            attention_norm=self.norm("input_layernorm"),
            mlp_norm=self.norm("post_attention_layernorm"),
        )

    def post_norm(self, attention: Attention, mlp: MLP | Experts) -> Layer:
        """Attention's and MLP's outputs are normed before they are added to the stream."""
        return Layer(
            mixer=attention,
            mlp=mlp,
            attention_post_norm=self.norm("post_attention_layernorm"),
            mlp_post_norm=self.norm("post_feedforward_layernorm"),
        )

    def sandwich_norm(self, attention: Attention, mlp: MLP | Experts) -> Layer:
        """Norms both before and after."""
        return Layer(
            mixer=attention,
            mlp=mlp,
            attention_norm=self.norm("input_layernorm"),
            attention_post_norm=self.norm("post_attention_layernorm"),
            mlp_norm=self.norm("pre_feedforward_layernorm"),
            mlp_post_norm=self.norm("post_feedforward_layernorm"),
        )

    def projection(self, parent: str, columns: int, parts: Mapping[str, int], *, bias: bool = False) -> Projection:
        """`parts` are names within the parent, with their rows."""
        named = tuple(Part(self.named(f"{parent}.{name}"), rows) for name, rows in parts.items())
        return Projection(columns, named, bias=bias)

    def named(self, name: str) -> str:
        return f"{self.backbone}.layers.{self.index}.{name}"


def hub_layers(config: ConfigReader, shape: ModelShape, *, norm_offset: float = 0.0) -> Iterator[HubLayer]:
    """One builder per layer, for a config with `rms_norm_eps`."""
    eps, inner = config.within("rms_norm_eps", EPS), config.integer("intermediate_size", most=MOST_INNER)
    return (HubLayer(index, shape.of_layer(index), eps, inner, norm_offset) for index in range(shape.num_layers))


def decoder(
    config: ConfigReader,
    shape: ModelShape,
    layers: Sequence[Layer],
    *,
    ropes: Sequence[RopeSettings] | None = None,
    norm_offset: float = 0.0,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Architecture:
    """The usual embedding, final norm and head around a family's layers, for a config with `rms_norm_eps`."""
    tied = config.flag("tie_word_embeddings")
    described = Architecture(
        shape=shape,
        embedding=Embedding(name="model.embed_tokens", scale=embedding_scale),
        layers=tuple(layers),
        norm=Norm("model.norm", shape.hidden_size, config.within("rms_norm_eps", EPS), offset=norm_offset),
        head=Head(name=None if tied else "lm_head", scale=logit_scale, softcap=logit_softcap),
        ropes=tuple([rope_settings(config)] if ropes is None else ropes),
    )
    for index, rope in enumerate(described.ropes):
        checked_rope(rope, described.rope_head_dim(index))
    return described
