"""Mistral: Llama with a sliding window."""

from ostro.models.architecture import Architecture
from ostro.models.config import ConfigReader
from ostro.models.families import levanter_names as levanter
from ostro.models.families import llama
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    return llama.describe(config, max_seq_len, window=config.optional_integer("sliding_window"))


def _levanter_config(settings: levanter.LevanterSettings, head_dim: int) -> levanter.Config:
    # Levanter's Mistral always has an untied head, whatever its settings say.
    return levanter.llama_config(settings, head_dim) | {"tie_word_embeddings": False}


_LEVANTER_DEFAULTS = {
    **levanter.LLAMA,
    "max_seq_len": 8192,
    "intermediate_dim": 14336,
    "num_kv_heads": 8,
    "layer_norm_epsilon": 1e-6,
}


FAMILY = Family(
    "Mistral",
    "mistral",
    "MistralForCausalLM",
    "MistralModel",
    describe,
    wrappers=("Mistral3ForConditionalGeneration",),
    levanter=(levanter.LevanterNames(type="mistral", defaults=_LEVANTER_DEFAULTS, config=_levanter_config),),
)
