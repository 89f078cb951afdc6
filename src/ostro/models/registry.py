"""The families that Ostro serves: the one table of them. Imports no torch, and runs no remote code.

A family is a file in `models.families` and a line here. HRM-Text has a description of its own kind; the HRM ACT-v1
models, which are no decoders, are not listed (`models.hrm`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ostro.errors import UnsupportedModel
from ostro.models.architecture import Architecture
from ostro.models.config import ConfigReader
from ostro.models.families import gemma2, gemma3, gpt2, hrm_text, llama, mistral, olmo2, phi3, qwen2, qwen3
from ostro.models.families.hrm_text import HrmText

Description = Architecture | HrmText


@dataclass(frozen=True, slots=True)
class Family:
    """The names that config.json may give to a family, and how its models are described."""

    model_type: str
    architecture: str
    bare: str
    """The architecture's name where a checkpoint was saved without the head, as embedding models are."""
    describe: Callable[[ConfigReader, int | None], Description]
    """From a config and the context to serve."""


FAMILIES = (
    Family("gemma2", "Gemma2ForCausalLM", "Gemma2Model", gemma2.describe),
    Family("gemma3_text", "Gemma3ForCausalLM", "Gemma3TextModel", gemma3.describe),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Model", gpt2.describe),
    Family("hrm_text", "HrmTextForCausalLM", "HrmTextModel", hrm_text.describe),
    Family("llama", "LlamaForCausalLM", "LlamaModel", llama.describe),
    Family("mistral", "MistralForCausalLM", "MistralModel", mistral.describe),
    Family("olmo2", "Olmo2ForCausalLM", "Olmo2Model", olmo2.describe),
    Family("phi3", "Phi3ForCausalLM", "Phi3Model", phi3.describe),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2Model", qwen2.describe),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3Model", qwen3.describe),
)


def describe(config: Mapping[str, object], *, max_seq_len: int | None = None) -> Description:
    """The model that a config.json describes.

    `max_seq_len` is the context to serve; without it the model's own, for longrope models the one before stretching.
    Raises UnsupportedModel for a family that is not listed and for what a family does not support, BadCheckpoint for a
    value that cannot be, BadRequest for a context beyond the model's.
    """
    reader = ConfigReader(config)
    names = reader.texts("architectures")
    for family in FAMILIES:
        if family.architecture in names or (not names and family.model_type == reader.get("model_type")):
            return family.describe(reader, max_seq_len)
        if family.bare in names:
            return _without_head(family.describe(reader, max_seq_len))
    found = ", ".join(names) or reader.text("model_type", "(none named)")
    known = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModel(f"Architecture {found} is not supported; supported: {known}.")


def _without_head(described: Description) -> Description:
    """A head that is the embedding's matrix is still there."""
    if described.head is None or described.head.is_tied:
        return described
    return replace(described, head=None)
