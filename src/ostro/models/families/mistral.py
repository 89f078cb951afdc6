"""Mistral: Llama with a sliding window."""

from ostro.models.architecture import Architecture
from ostro.models.config import ConfigReader
from ostro.models.families import llama
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    return llama.describe(config, max_seq_len, window=config.optional_integer("sliding_window"))


FAMILY = Family("mistral", "MistralForCausalLM", "MistralModel", describe)
