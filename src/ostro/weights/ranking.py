"""How a classifier's output becomes a relevance score, as with sentence-transformers' CrossEncoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ostro.errors import UnsupportedModel
from ostro.formats.json_file import read_json_object
from ostro.models.config import ConfigReader
from ostro.models.registry import describe_encoder

_ACTIVATIONS = {"Sigmoid": True, "Identity": False}


@dataclass(frozen=True, slots=True)
class Ranking:
    num_labels: int
    sigmoid: bool
    """Whether the output is mapped to a number from 0 to 1."""


def read_ranking(config: Mapping[str, object]) -> Ranking | None:
    """From a config.json; None if the model is no classifier."""
    described = describe_encoder(config)
    if described is None or described.head is None:
        return None
    return Ranking(described.head.num_labels, uses_sigmoid(config))


def uses_sigmoid(config: Mapping[str, object], directory: Path | None = None) -> bool:
    """Whether the activation named in a config.json, or in the directory's newer file, is the sigmoid. It is without
    a name.
    """
    reader = ConfigReader(config)
    own = ConfigReader(reader.table("sentence_transformers") or {}, "config.json's 'sentence_transformers'")
    # Older files have it at the top.
    named = own.text("activation_fn", reader.text("sbert_ce_default_activation_function", "Sigmoid"))
    newer = None if directory is None else directory / "config_sentence_transformers.json"
    if newer is not None and newer.is_file():
        named = ConfigReader(read_json_object(newer), str(newer)).text("activation_fn", named)
    name = named.rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"The activation {named!r} of a cross-encoder is not known; known: Sigmoid, Identity.")
    return _ACTIVATIONS[name]
