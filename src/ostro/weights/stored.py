"""What a checkpoint's files hold, by their headers: names, shapes and number formats. Reads no weights."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from ostro.errors import BadCheckpoint

_IN_LAYER = re.compile(r"(^|\.)(layers|h)\.\d+\.")


@dataclass(frozen=True, slots=True)
class TensorHeader:
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
    tensors: list[TensorHeader]
    file_bytes: int
    """Of all files that tensors are in."""
    largest_file: int
    """As much of them as is mapped at a time by a reader that takes one after the other."""


def safetensors_headers(path: Path) -> list[TensorHeader]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return [TensorHeader(name, tuple(each.get_shape()), each.get_dtype()) for name, each in found.items()]
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}.") from error
