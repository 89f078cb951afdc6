"""The table of model families that Ostro serves. Imports no torch, and runs no remote code.

A family is one file in `models.families` and one line here. HRM-Text has its own kind of description; the HRM ACT-v1
models, which are not decoders, are not listed (see `torch_models.hrm`).
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from ostro.errors import UnsupportedModel
from ostro.models.architecture import Description
from ostro.models.config import ConfigReader
from ostro.models.family import Family

_FILES = (
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "granite",
    "granitemoe",
    "hrm_text",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
FAMILIES: tuple[Family, ...] = tuple(import_module(f"ostro.models.families.{name}").FAMILY for name in _FILES)


def describe(config: Mapping[str, object], *, max_seq_len: int | None = None) -> Description:
    """Describes the model of a config.json.

    `max_seq_len` is the context length to serve; the default is the model's own, or for longrope the unstretched one.
    Raises UnsupportedModel for an unknown family or a feature it does not support, BadCheckpoint for an invalid
    value, BadRequest for a context longer than the model's.
    """
    reader = ConfigReader(config)
    names, family = reader.texts("architectures"), family_of(config)
    if family is None:
        found = ", ".join(names) or reader.text("model_type", "(none named)")
        known = ", ".join(family.architecture for family in FAMILIES)
        raise UnsupportedModel(f"Architecture {found} is not supported; supported: {known}.")
    if reader.get("tie_word_embeddings") is None:
        reader = ConfigReader({**config, "tie_word_embeddings": family.tied})
    described = replace(family.describe(reader, max_seq_len), backbone=family.backbone)
    return _without_head(described) if family.bare in names else described


def family_of(config: Mapping[str, object]) -> Family | None:
    """The family named by a config.json; None if it is not listed."""
    reader = ConfigReader(config)
    names = reader.texts("architectures")
    for family in FAMILIES:
        by_type = not names and family.model_type == reader.get("model_type")
        if family.architecture in names or family.bare in names or by_type:
            return family
    return None


def _without_head(described: Description) -> Description:
    """Drops an untied head; a tied one is part of the embedding."""
    if described.head is None or described.head.is_tied:
        return described
    return replace(described, head=None)
