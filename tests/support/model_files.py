"""A torch model's weights and config on disk, as a checkpoint that any runner loads."""

import json
from collections.abc import Mapping
from pathlib import Path

from native_models import ModelCheckpoint
from safetensors.torch import save_file

from ostro.torch_models.base import Model


def write_checkpoint(directory: Path, config: Mapping[str, object], model: Model) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in ModelCheckpoint(model, config).tensors()}
    save_file(tensors, directory / "model.safetensors")
    return directory
