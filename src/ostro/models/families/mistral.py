"""Mistral: Llama with a sliding window."""

from ostro.models.architecture import Architecture
from ostro.models.config import ConfigReader
from ostro.models.families import llama


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    return llama.describe(config, max_seq_len, window=config.optional_integer("sliding_window"))
