"""RoBERTa: BERT's layers, one token type, and positions that begin after the padding token's."""

from dataclasses import replace

from ostro.models.architecture import Part, Projection
from ostro.models.config import ConfigReader
from ostro.models.encoder import Classifier, Encoder
from ostro.models.families.bert import absolute_encoder, num_labels
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Encoder:
    encoder = absolute_encoder(config, max_seq_len, backbone="roberta", first_position=_padding_id(config) + 1)
    hidden = encoder.shape.hidden_size
    head = Classifier(
        pooling="cls",
        dense=Projection(hidden, (Part("classifier.dense", hidden),), bias=True),
        activation="tanh",
        norm=None,
        output=Projection(hidden, (Part("classifier.out_proj", num_labels(config)),), bias=True),
    )
    return replace(encoder, head=head)


def _padding_id(config: ConfigReader) -> int:
    # Zero is a token id, but no size or count.
    return 0 if config.get("pad_token_id") == 0 else config.integer("pad_token_id", 1)


FAMILY = Family(
    "RoBERTa",
    "roberta",
    "RobertaForSequenceClassification",
    "RobertaModel",
    describe,
    backbone="roberta",
    head="classifier",
    others=("RobertaForMaskedLM",),
)
