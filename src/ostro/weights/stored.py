"""The contents of a checkpoint's files, from their headers: names, shapes and number formats. Reads no weights."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from ostro.errors import BadCheckpoint
from ostro.weights.forms import Form

_IN_LAYER = re.compile(r"(^|\.)(layers|h)\.\d+\.")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One weight of the model, from its header."""

    name: str
    shape: tuple[int, ...]
    format: str
    """GGUF's name of the format, or safetensors' name if GGUF has none."""
    repacked: str | None = None
    """If the file stores another format, what becomes of its numbers in this one, in words."""
    form: Form | None = None
    """The form in which a GPU could keep it; None if it has to be widened, or is not quantised."""

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
    """Total size of all files with tensors."""
    largest_file: int
    """The most that a reader maps at a time if it reads the files one after another."""
    quantization: str | None = None
    """The format of a quantised Hub checkpoint, in words."""


def safetensors_headers(path: Path) -> list[TensorHeader]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return [TensorHeader(name, tuple(each.get_shape()), each.get_dtype()) for name, each in found.items()]
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}.") from error
