"""Which builder serves which architecture. No remote code: what is not listed here is refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ostro.errors import ModelError, UnsupportedModel
from ostro.models.base import Model
from ostro.models.config import ConfigReader
from ostro.models.config_check import check_config
from ostro.models.gemma import build_gemma2, build_gemma3
from ostro.models.gpt2 import build_gpt2
from ostro.models.hrm_text import build_hrm_text
from ostro.models.llama import build_llama, build_mistral
from ostro.models.loading import load_weights
from ostro.models.olmo2 import build_olmo2
from ostro.models.phi3 import build_phi3
from ostro.models.qwen import build_qwen2, build_qwen3

__all__ = ["FAMILIES", "Family", "build_model", "load_weights"]


@dataclass(frozen=True, slots=True)
class Family:
    """The names that config.json may give to a family, and what builds it from a config and the context to serve."""

    model_type: str
    architecture: str
    bare: str
    """The architecture's name where a checkpoint was saved without the head, as embedding models are."""
    build: Callable[[ConfigReader, int | None], Model]


FAMILIES = (
    Family("gemma2", "Gemma2ForCausalLM", "Gemma2Model", build_gemma2),
    Family("gemma3_text", "Gemma3ForCausalLM", "Gemma3TextModel", build_gemma3),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Model", build_gpt2),
    Family("hrm_text", "HrmTextForCausalLM", "HrmTextModel", build_hrm_text),
    Family("llama", "LlamaForCausalLM", "LlamaModel", build_llama),
    Family("mistral", "MistralForCausalLM", "MistralModel", build_mistral),
    Family("olmo2", "Olmo2ForCausalLM", "Olmo2Model", build_olmo2),
    Family("phi3", "Phi3ForCausalLM", "Phi3Model", build_phi3),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2Model", build_qwen2),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3Model", build_qwen3),
)


def build_model(
    config: Mapping[str, object],
    *,
    max_seq_len: int | None = None,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Model:
    """The model that `config` describes, its parameters allocated on the device and not yet filled.

    `max_seq_len` is the context to serve; without it the model's own, for longrope models the one before stretching.
    """
    reader = ConfigReader(config)
    family, is_bare = _family(reader)
    check_config(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device or torch.device("cpu"):
            model = family.build(reader, max_seq_len)
    except (RuntimeError, MemoryError) as error:
        # Sizes that are possible one by one may ask for more than there is together.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"There is no memory for a model as large as config.json says ({reason}). Check the sizes in it."
        ) from error
    finally:
        torch.set_default_dtype(before)
    if is_bare:
        model.drop_head()
    # On meta there are no weights, but what positions turn by is real.
    return model.eval() if device is not None and device.type == "meta" else model.eval().to(device)


def _family(config: ConfigReader) -> tuple[Family, bool]:
    """The family, and whether it is to be built without a head."""
    names = config.texts("architectures")
    for family in FAMILIES:
        if family.architecture in names or (not names and family.model_type == config.get("model_type")):
            return family, False
        if family.bare in names:
            return family, True
    found = ", ".join(names) or config.text("model_type", "(none named)")
    known = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModel(f"Architecture {found} is not supported; supported: {known}.")
