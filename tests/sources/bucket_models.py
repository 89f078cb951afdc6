"""Small models to put into a bucket, and what arrived of them in the cache."""

import random
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from ostro.sources.store import MANIFEST

BLOCK = 1 << 16
CONFIG = b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true}'


def weights(seed: int, blocks: int = 8) -> bytes:
    """A safetensors file, a little more than so many blocks long."""
    return save({"model.norm.weight": np.frombuffer(random.Random(seed).randbytes(blocks * BLOCK), np.uint8)})


def model_files(seed: int = 0) -> dict[str, bytes]:
    return {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": weights(seed),
        "adapter/adapter_config.json": b"{}",
    }


def contents(directory: Path) -> dict[str, bytes]:
    files = {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
    files.pop(MANIFEST)
    return files


def models_in(cache: Path) -> list[Path]:
    return list((cache / "objects").glob("*@*"))
