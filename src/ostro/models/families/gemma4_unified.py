"""Gemma 4 12B (text): a dense Gemma 4 without inputs per layer, with longer windows and a longer context by default."""

from collections.abc import Mapping

from ostro.models.architecture import Architecture
from ostro.models.config import ConfigReader
from ostro.models.families import gemma4
from ostro.models.family import Family

_DEFAULTS: Mapping[str, object] = {
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    return gemma4.describe(ConfigReader({**_DEFAULTS, **config.values}, config.source), max_seq_len)


FAMILY = Family(
    "Gemma 4 12B (text)",
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedTextModel",
    describe,
    wrappers=("Gemma4UnifiedForConditionalGeneration",),
    tied=True,
    unread=gemma4.FAMILY.unread,
)
