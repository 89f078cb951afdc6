"""Every family's GGUF cases: a random model of transformers, and the file that a converter would make of it."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import every_family
import gguf
import torch
from every_family import family_of_case
from family_case import Array, Config, Converted, FamilyCase, GgufCase
from gguf_factory import gguf_tensors, write_gguf

if TYPE_CHECKING:
    import transformers

SIZES: Config = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """A config as its authors write it, and the metadata that a converter makes of it."""

    arch: str
    config: Config
    metadata: Config
    extra: Mapping[str, Array]
    converted: Converted
    family: FamilyCase


def case_of(name: str, family: FamilyCase, stored: GgufCase) -> Case:
    names, arch = family_of_case(name).gguf, stored.architecture
    if arch is None:
        assert names is not None
        arch = names.architecture
    config = {**family.spelled(SIZES), **stored.config, "model_type": family.model_type}
    return Case(arch, config, stored.metadata, stored.extra, stored.converted or family.gguf_converted, family)


CASES = {
    f"{name}-{variant}" if variant else name: case_of(name, family, stored)
    for name, family in every_family.CASES.items()
    for variant, stored in family.gguf.items()
}


def build(config: Config) -> "transformers.PreTrainedModel":
    """The transformers model of this config, with random weights everywhere: norms and biases too."""
    import transformers

    torch.manual_seed(0)
    # A copy: transformers fills in the tables within.
    settings = deepcopy(dict(config))
    made = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
        made, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def save(
    path: Path, case: Case, model: "transformers.PreTrainedModel", quantize: gguf.GGMLQuantizationType | None = None
) -> Path:
    metadata = {f"{case.arch}.{key}": value for key, value in case.metadata.items()} | {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }
    layers = case.metadata["block_count"]
    assert isinstance(layers, int)
    tensors = gguf_tensors(case.arch, model, case.converted, layers=layers)
    return write_gguf(path, case.arch, metadata, {**tensors, **case.extra}, quantize)
