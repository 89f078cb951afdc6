"""ModernBERT: rotary positions, gated MLPs, norms first, and layers that only attend to nearby tokens."""

from collections.abc import Mapping

from ostro.models.architecture import MLP, ModelShape, Norm, Part, Projection
from ostro.models.config import EPS, MOST_INNER, MOST_LAYERS, MOST_POSITIONS, ConfigReader
from ostro.models.encoder import Classifier, Encoder, EncoderEmbedding, EncoderLayer
from ostro.models.families.bert import encoder_shape, num_labels
from ostro.models.families.common import activation, sliding_layers
from ostro.models.family import Family
from ostro.models.rope_settings import RopeSettings, checked_rope, rope_settings

_FULL, _SLIDING = 0, 1


def describe(config: ConfigReader, max_seq_len: int | None) -> Encoder:
    shape = encoder_shape(config, max_seq_len, config.integer("max_position_embeddings", most=MOST_POSITIONS))
    period = config.integer("global_attn_every_n_layers", 3, most=MOST_LAYERS)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: layer % period != 0)
    return Encoder(
        shape=shape,
        embedding=EncoderEmbedding(
            words="model.embeddings.tok_embeddings", norm=_norm(config, shape, "model.embeddings.norm")
        ),
        layers=tuple(_layer(config, shape, index, sliding=sliding) for index, sliding in enumerate(slides)),
        norm=_norm(config, shape, "model.final_norm"),
        ropes=tuple(checked_rope(rope, shape.head_dim) for rope in _ropes(config)),
        head=_head(config, shape),
    )


def _ropes(config: ConfigReader) -> tuple[RopeSettings, RopeSettings]:
    by_type = ConfigReader(config.table("rope_parameters") or {})
    scaling = config.table("rope_scaling") or {}

    def rope(kind: str, theta: str, usual: float) -> RopeSettings:
        table: Mapping[str, object] = by_type.table(kind) or {}
        return rope_settings(config, {"rope_theta": config.number(theta, usual), **table, **scaling})

    return rope("full_attention", "global_rope_theta", 160_000.0), rope("sliding_attention", "local_rope_theta", 1e4)


def _layer(config: ConfigReader, shape: ModelShape, index: int, *, sliding: bool) -> EncoderLayer:
    name, hidden = f"model.layers.{index}", shape.hidden_size
    inner = config.integer("intermediate_size", most=MOST_INNER)
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return EncoderLayer(
        qkv=Projection(hidden, (Part(f"{name}.attn.Wqkv", 3 * hidden),), bias=attention_bias),
        output=Projection(hidden, (Part(f"{name}.attn.Wo", hidden),), bias=attention_bias),
        mlp=MLP(
            up=Projection(hidden, (Part(f"{name}.mlp.Wi", 2 * inner),), bias=mlp_bias),
            down=Projection(inner, (Part(f"{name}.mlp.Wo", hidden),), bias=mlp_bias),
            activation=activation(config, "hidden_activation", "gelu"),
            gated=True,
        ),
        # The embedding's output, which the first layer reads, is already normed.
        attention_norm=_norm(config, shape, f"{name}.attn_norm") if index else None,
        mlp_norm=_norm(config, shape, f"{name}.mlp_norm"),
        norms_last=False,
        rope=_SLIDING if sliding else _FULL,
        reach=config.integer("local_attention", 128, most=MOST_POSITIONS) // 2 if sliding else None,
    )


def _head(config: ConfigReader, shape: ModelShape) -> Classifier:
    pooling = config.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise config.bad("classifier_pooling", pooling, "cls or mean")
    hidden = shape.hidden_size
    return Classifier(
        pooling="mean" if pooling == "mean" else "cls",
        dense=Projection(hidden, (Part("head.dense", hidden),), bias=config.flag("classifier_bias", False)),
        activation=activation(config, "classifier_activation", "gelu"),
        norm=_norm(config, shape, "head.norm"),
        output=Projection(hidden, (Part("classifier", num_labels(config)),), bias=True),
    )


def _norm(config: ConfigReader, shape: ModelShape, name: str) -> Norm:
    eps, bias = config.within("norm_eps", EPS, 1e-5), config.flag("norm_bias", False)
    return Norm(name, shape.hidden_size, eps, kind="layer", biased=bias)


FAMILY = Family(
    "ModernBERT",
    "modernbert",
    "ModernBertForSequenceClassification",
    "ModernBertModel",
    describe,
    head="classifier",
    others=("ModernBertForMaskedLM",),
)
