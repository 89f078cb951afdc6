"""BERT: learned positions, token types, norms after each residual sum. RoBERTa shares most of its description."""

from dataclasses import replace

from ostro.errors import UnsupportedModel
from ostro.models.architecture import MLP, ModelShape, Norm, Part, Projection
from ostro.models.config import (
    EPS,
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_INNER,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_VOCAB,
    ConfigReader,
)
from ostro.models.encoder import Classifier, Encoder, EncoderEmbedding, EncoderLayer
from ostro.models.families.common import activation, served_context
from ostro.models.family import Family

MOST_LABELS = 1 << 16
_MOST_TYPES = 1 << 10


def describe(config: ConfigReader, max_seq_len: int | None) -> Encoder:
    encoder = absolute_encoder(config, max_seq_len, backbone="bert", first_position=0)
    hidden = encoder.shape.hidden_size
    head = Classifier(
        pooling="cls",
        dense=Projection(hidden, (Part("bert.pooler.dense", hidden),), bias=True),
        activation="tanh",
        norm=None,
        output=Projection(hidden, (Part("classifier", num_labels(config)),), bias=True),
    )
    return replace(encoder, head=head)


def absolute_encoder(config: ConfigReader, max_seq_len: int | None, *, backbone: str, first_position: int) -> Encoder:
    """An encoder with learned positions, under the tensor names that BERT and RoBERTa share; without a head."""
    if (kind := config.text("position_embedding_type", "absolute")) != "absolute":
        raise UnsupportedModel(f"{config.source}: 'position_embedding_type' {kind!r} is not supported; absolute is.")
    for name in ("is_decoder", "add_cross_attention"):
        if config.flag(name, False):
            raise UnsupportedModel(f"{config.source}: {name!r} is true; only encoders are supported.")
    positions = config.integer("max_position_embeddings", most=MOST_POSITIONS)
    if positions <= first_position:
        raise config.bad("max_position_embeddings", positions, f"above {first_position}, the first position's row")
    shape = encoder_shape(config, max_seq_len, positions - first_position)
    eps, name = config.within("layer_norm_eps", EPS, 1e-12), f"{backbone}.embeddings"
    return Encoder(
        shape=shape,
        embedding=EncoderEmbedding(
            words=f"{name}.word_embeddings",
            norm=_norm(f"{name}.LayerNorm", shape, eps),
            positions=Part(f"{name}.position_embeddings", positions),
            first_position=first_position,
            types=Part(f"{name}.token_type_embeddings", config.integer("type_vocab_size", 2, most=_MOST_TYPES)),
        ),
        layers=tuple(
            _layer(config, shape, f"{backbone}.encoder.layer.{index}", eps) for index in range(shape.num_layers)
        ),
        backbone=backbone,
    )


def encoder_shape(config: ConfigReader, max_seq_len: int | None, positions: int) -> ModelShape:
    """The context defaults to `max_seq_length`, which sentence-transformers sets; `positions` is the longest."""
    heads = config.integer("num_attention_heads", most=MOST_HEADS)
    hidden = config.integer("hidden_size", most=MOST_HIDDEN)
    if hidden % heads:
        raise config.bad("hidden_size", hidden, f"a multiple of 'num_attention_heads' ({heads})")
    usual = min(positions, config.integer("max_seq_length", positions))
    return ModelShape(
        vocab_size=config.integer("vocab_size", most=MOST_VOCAB),
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers", most=MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_seq_len=served_context(max_seq_len or usual, positions),
    )


def num_labels(config: ConfigReader) -> int:
    """Stored as a number, or as a table of their names; transformers' default is two."""
    labels = config.table("id2label")
    return config.integer("num_labels", 2 if labels is None else max(1, len(labels)), most=MOST_LABELS)


def _layer(config: ConfigReader, shape: ModelShape, name: str, eps: float) -> EncoderLayer:
    hidden, inner = shape.hidden_size, config.integer("intermediate_size", most=MOST_INNER)
    heads = tuple(Part(f"{name}.attention.self.{part}", hidden) for part in ("query", "key", "value"))
    return EncoderLayer(
        qkv=Projection(hidden, heads, bias=True),
        output=Projection(hidden, (Part(f"{name}.attention.output.dense", hidden),), bias=True),
        mlp=MLP(
            up=Projection(hidden, (Part(f"{name}.intermediate.dense", inner),), bias=True),
            down=Projection(inner, (Part(f"{name}.output.dense", hidden),), bias=True),
            activation=activation(config, "hidden_act", "gelu"),
            gated=False,
        ),
        attention_norm=_norm(f"{name}.attention.output.LayerNorm", shape, eps),
        mlp_norm=_norm(f"{name}.output.LayerNorm", shape, eps),
        norms_last=True,
    )


def _norm(name: str, shape: ModelShape, eps: float) -> Norm:
    return Norm(name, shape.hidden_size, eps, kind="layer")


FAMILY = Family(
    "BERT",
    "bert",
    "BertForSequenceClassification",
    "BertModel",
    describe,
    backbone="bert",
    head="classifier",
    others=("BertForMaskedLM", "BertForPreTraining"),
)
