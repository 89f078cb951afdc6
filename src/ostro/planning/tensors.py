"""What a checkpoint's files hold, by their headers: names, shapes and number formats. Reads no weights."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ostro.errors import BadCheckpoint, Unsupported
from ostro.weights import Checkpoint, GgufCheckpoint
from ostro.weights.gguf_header import GGML_TYPES
from ostro.weights.hf_checkpoint import PICKLE_SUFFIXES, HfCheckpoint, renamer
from ostro.weights.levanter_checkpoint import LevanterCheckpoint

_IN_LAYER = re.compile(r"(^|\.)(layers|h)\.\d+\.")
_FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Formats as GGUF names them, by safetensors' names and by torch's."""
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight of the model, as its header tells."""

    name: str
    shape: tuple[int, ...]
    format: str
    """As GGUF names it; what GGUF has no name for, as safetensors does."""

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def in_layer(self) -> bool:
        return _IN_LAYER.search(self.name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    tensors: list[Tensor]
    file_bytes: int
    """Of all files that tensors are in."""
    largest_file: int
    """As much of them as is mapped at a time by who reads one after the other."""


def read_stored(checkpoint: Checkpoint, hidden_size: int) -> Stored:
    if isinstance(checkpoint, GgufCheckpoint):
        mapped = sum(weight.info.nbytes for weight in checkpoint.weights)
        tensors = [Tensor(w.name, w.info.shape, GGML_TYPES[w.info.ggml_type].name) for w in checkpoint.weights]
        return Stored(tensors=tensors, file_bytes=mapped, largest_file=mapped)
    if isinstance(checkpoint, HfCheckpoint):
        sizes = [path.stat().st_size for path in checkpoint.files]
        tensors = list(_hf_tensors(checkpoint, hidden_size))
        return Stored(tensors=tensors, file_bytes=sum(sizes), largest_file=max(sizes))
    if isinstance(checkpoint, LevanterCheckpoint):
        # Formats are in each array's own header: all that Levanter writes are floats, mostly these.
        tensors = [Tensor(name, weight.hub_shape, "F32") for weight in checkpoint.weights for name in weight.names]
        # Of a stacked array as much as shares a chunk is read at a time: all layers at worst.
        stacks = [math.prod(each.hub_shape) * len(each.names) * 4 for each in checkpoint.weights]
        return Stored(tensors=tensors, file_bytes=sum(stacks), largest_file=max(stacks))
    raise Unsupported(f"{checkpoint.name} is of a kind whose memory cannot be planned. Load it to see.")


def file_tensors(path: Path) -> list[Tensor]:
    """Of a file of safetensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return [Tensor(name, tuple(each.get_shape()), each.get_dtype()) for name, each in found.items()]
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}.") from error


def _hf_tensors(checkpoint: HfCheckpoint, hidden_size: int) -> Iterator[Tensor]:
    rename = renamer(checkpoint.config)
    for path, names in checkpoint.files.items():
        if path.suffix in PICKLE_SUFFIXES:
            # It has no header. Its size is that of its numbers, whose width config.json tells.
            stored = _pickled_format(checkpoint.config)
            yield Tensor("layers.0.all", (path.stat().st_size // _BYTES[stored] // hidden_size, hidden_size), stored)
            continue
        for tensor in file_tensors(path):
            if tensor.name in names and (name := rename(tensor.name)) is not None:
                yield Tensor(name, tensor.shape, tensor.format)


def _pickled_format(config: Mapping[str, object]) -> str:
    return _FLOATS.get(str(config.get("torch_dtype") or config.get("dtype")), "F32")
