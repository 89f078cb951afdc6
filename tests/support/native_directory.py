"""A model of the native core as a directory of files, and what its runner says. The cache is OSTRO_CACHE."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from native_models import ModelCheckpoint, savable_model
from safetensors.torch import save_file
from tiny_models import LLAMA

from ostro.backends.loading import load_runner
from ostro.backends.native.packed_cache import WEIGHTS
from ostro.backends.native.runner import NativeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.sampling_params import SamplingParams
from ostro.sources.store import ModelStore
from ostro.weights import open_checkpoint

WIDE: Mapping[str, object] = {
    **LLAMA,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def write(directory: Path, config: Mapping[str, object] = WIDE, dtype: torch.dtype = torch.float32) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = ModelCheckpoint(savable_model(config), config, dtype).tensors()
    save_file({name: tensor.contiguous() for name, tensor in tensors}, directory / "model.safetensors")
    return directory


def load(directory: Path, **settings: object) -> NativeRunner | TorchRunner:
    given = {"model": str(directory), "device": "cpu", "kv_memory": 4 << 20} | settings
    config = EngineConfig(**given)  # type: ignore[arg-type]
    runner = load_runner(open_checkpoint(directory), config)
    assert isinstance(runner, NativeRunner | TorchRunner)
    return runner


def generate(runner: NativeRunner | TorchRunner) -> list[int]:
    core = EngineCore(runner)
    core.add(Request(id=0, prompt_ids=tuple(range(9)), params=SamplingParams(max_tokens=6, temperature=0), seed=0))
    found: list[int] = []
    while core.has_work:
        for gain in core.step():
            found += gain.token_ids
    return found


def packed_files() -> list[Path]:
    return sorted(entry.path / WEIGHTS for entry in ModelStore().packed())
