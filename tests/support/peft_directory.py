"""Random LoRA adapters on disk, as PEFT saves them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.loading import places_of

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
OF_GPT = ("c_attn", "c_fc", "c_proj", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
OF_MIXERS = ("in_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_ba", "out_proj")
OF_LFM2 = ("w1", "w2", "w3")
OF_ANY = tuple({*ALL, *FUSED, *OF_GPT, *OF_MIXERS, *OF_LFM2})
"""All projections of any family."""
DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "w2")


def peft_config(rank: int = 4, base: str | None = None) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(ALL),
        "bias": "none",
    }


def write_adapter(
    directory: Path, tensors: Mapping[str, torch.Tensor], *, rank: int = 4, base: str | None = None
) -> Path:
    """Tensors by their names below PEFT's prefix."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(peft_config(rank, base)))
    prefixed = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(prefixed, directory / "adapter_model.safetensors")
    return directory


def random_adapter(
    directory: Path,
    model: Model,
    *,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] = ALL,
    spread: float = 0.2,
    base: str | None = None,
) -> Path:
    """For a model's projections of these names, but for experts'; strong enough that greedy choices change."""
    generator = torch.Generator().manual_seed(seed)
    experts = model.described.expert_names if isinstance(model, Decoder) else frozenset()
    tensors = {}
    for name, place in places_of(model).items():
        target, _, kind = name.rpartition(".")
        if kind != "weight" or target.rpartition(".")[2] not in targets or target in experts:
            continue
        out_features, in_features = place.shape
        if place.memory.stride(-1) != 1:
            # GPT-2 stores its matrices the other way round: what takes them is a transposed view.
            out_features, in_features = in_features, out_features
        tensors[f"{target}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * spread
        tensors[f"{target}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * spread
    return write_adapter(directory, tensors, rank=rank, base=base)
