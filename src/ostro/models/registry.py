"""The table of model families that Ostro serves. Imports no torch, and runs no remote code.

A family is one file in `models.families` and one line here. HRM-Text and encoders have their own kinds of description,
and so have HRM ACT-v1 models, whose configs are made from their files (`open_hrm`).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from ostro.errors import UnsupportedModel
from ostro.models.architecture import Architecture, HrmText
from ostro.models.config import ConfigReader
from ostro.models.description import Description
from ostro.models.encoder import Encoder
from ostro.models.family import Family
from ostro.models.hrm_config import MODEL_TYPE as HRM
from ostro.models.hrm_config import HrmConfig

_FILES = (
    "cohere2",
    "exaone4",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "hrm_text",
    "lfm2",
    "lfm2_moe",
    "llama",
    "llama4",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
    "starcoder2",
)
_ENCODER_FILES = ("bert", "modernbert", "roberta", "xlm_roberta")
_RECURRENT = re.compile(r"(bamba|jamba|kimilinear|olmohybrid|zamba2?)(for\w+|model)?", re.IGNORECASE)
"""Matches architectures and model types with a recurrent state that are not listed, without underscores."""


def _families(files: tuple[str, ...]) -> tuple[Family, ...]:
    return tuple(import_module(f"ostro.models.families.{name}").FAMILY for name in files)


FAMILIES = _families(_FILES)
"""The families that generate text."""
ENCODERS = _families(_ENCODER_FILES)
"""The families that embed or classify; their `architecture` is the classifier's."""


def describe(config: Mapping[str, object], *, max_seq_len: int | None = None) -> Description:
    """Describes the model of a config.json.

    `max_seq_len` is the context length to serve; the default is the model's own, or for longrope the unstretched one.
    Raises UnsupportedModel for an unknown family or a feature it does not support, BadCheckpoint for an invalid
    value, BadRequest for a context longer than the model's.
    """
    if config.get("model_type") == HRM:
        return HrmConfig.read(config, max_seq_len=max_seq_len)
    reader = ConfigReader(config)
    names, family = reader.texts("architectures"), family_of(config)
    if family is None:
        named = names or (reader.text("model_type", "(none named)"),)
        found = ", ".join(named)
        if any(_RECURRENT.fullmatch(name.replace("_", "")) for name in named):
            raise UnsupportedModel(
                f"Architecture {found} is not supported: its layers keep a recurrent state of a kind that Ostro does "
                "not know. docs/models.md lists the architectures whose states it knows."
            )
        known = ", ".join([*(each.architecture for each in FAMILIES), *(each.bare for each in ENCODERS)])
        raise UnsupportedModel(f"Architecture {found} is not supported; supported: {known}.")
    if reader.get("tie_word_embeddings") is None:
        reader = ConfigReader({**config, "tie_word_embeddings": family.tied})
    described = replace(family.describe(reader, max_seq_len), backbone=family.backbone)
    if isinstance(described, Encoder):
        return described if family.architecture in names else replace(described, head=None)
    return _without_head(described) if family.bare in names else described


def family_of(config: Mapping[str, object]) -> Family | None:
    """The family named by a config.json; None if it is not listed."""
    reader = ConfigReader(config)
    names = reader.texts("architectures")
    for family in (*FAMILIES, *ENCODERS):
        by_type = not names and family.model_type == reader.get("model_type")
        if by_type or not {family.architecture, family.bare, *family.others}.isdisjoint(names):
            return family
    return None


def is_encoder(config: Mapping[str, object]) -> bool:
    return family_of(config) in ENCODERS


def describe_encoder(config: Mapping[str, object]) -> Encoder | None:
    """The description of an encoder's config.json, with its own context length; None for any other model."""
    if not is_encoder(config):
        return None
    described = describe(config)
    assert isinstance(described, Encoder)
    return described


def _without_head(described: Architecture | HrmText) -> Architecture | HrmText:
    """Drops an untied head; a tied one is part of the embedding."""
    if described.head is None or described.head.is_tied:
        return described
    return replace(described, head=None)
