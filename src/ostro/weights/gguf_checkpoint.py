"""A model in one or several GGUF files, as a Checkpoint. Reads and dequantizes its tensors.

Code that can compute on quantized blocks uses `arrays`; everything else uses `tensors`.
"""

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from ostro.formats.gguf_header import GGML_TYPES, GgufHeader, read_gguf_header
from ostro.models.families.gguf_names import Config
from ostro.weights.forms import GGUF_FORMS, Form
from ostro.weights.gguf_model import GgufWeight, Undo, describe
from ostro.weights.pooling import Pooling
from ostro.weights.read_ahead import run_ahead
from ostro.weights.stored import Stored, TensorHeader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ostro.weights.arrays import Weight
    from ostro.weights.slices import SlicedWeight

    _Named = tuple[str, torch.Tensor]

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    path: Path
    name: str
    config: Config
    generation_config: Config
    pooling: Pooling | None
    weights: tuple[GgufWeight, ...]

    @property
    def tokenizer_path(self) -> Path:
        return self.path

    @property
    def files(self) -> list[Path]:
        return sorted({weight.path for weight in self.weights})

    def stored(self) -> Stored:
        mapped = sum(weight.info.nbytes for weight in self.weights)
        tensors = [TensorHeader(w.name, w.info.shape, _stored_as(w), form=_form(w)) for w in self.weights]
        return Stored(tensors=tensors, file_bytes=mapped, largest_file=mapped)

    def arrays(self) -> Iterator[tuple[str, "Weight"]]:
        """Matrices keep their stored format, unless restoring the original changes their values, or the format has no
        kernels but fits another that has.
        """
        maps = self._maps()
        for weight in self.weights:
            yield weight.name, _array(weight, maps[weight.path])

    def slices(self) -> Iterator[tuple[str, "SlicedWeight"]]:
        from ostro.weights.slices import sliced

        return sliced(self.arrays())

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Floats stay as stored and memory-mapped; quantized types become float32."""
        maps = self._maps()
        return run_ahead(partial(_named_tensor, weight, maps[weight.path]) for weight in self.weights)

    def _maps(self) -> dict[Path, mmap.mmap]:
        return {path: _map_file(path) for path in self.files}


def open_gguf(path: Path, name: str | None = None) -> GgufCheckpoint:
    """Opens a file, or all shards of a split model, given any one of them."""
    files = _shards(path)
    headers = tuple(read_gguf_header(file) for file in files)
    _check_split(headers)
    model = describe(headers)
    stem = match["stem"] if (match := _SHARD.fullmatch(path.name)) else path.stem
    return GgufCheckpoint(files[0], name or stem, model.config, model.generation_config, model.pooling, model.weights)


def _shards(path: Path) -> list[Path]:
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    files = [
        path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf")
        for number in range(1, int(match["count"]) + 1)
    ]
    for file in files:
        if not file.is_file():
            raise ModelNotFound(f"{path} is one of {len(files)} files, and {file} is missing. Download it too.")
    return files


def _check_split(headers: tuple[GgufHeader, ...]) -> None:
    first = headers[0]
    count = first.metadata.get("split.count", 1)
    if count != len(headers) and (count, len(headers)) != (0, 1):
        raise BadCheckpoint(
            f"{first.path} is one of {count} files of a model. Keep the names its files were made with "
            "(NAME-00001-of-0000N.gguf), all in one directory."
        )
    names = [info.name for header in headers for info in header.tensors]
    if len(set(names)) < len(names):
        raise BadCheckpoint(f"{first.path} and the files beside it hold the same tensor twice. Download them again.")


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # Copy-on-write although nobody writes: torch requires writable memory.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _raw(weight: GgufWeight, data: mmap.mmap) -> "npt.NDArray[np.uint8]":
    import numpy as np

    info = weight.info
    stored = np.frombuffer(data, np.uint8, count=info.nbytes, offset=info.offset)
    return stored.reshape(*info.shape[:-1], -1)


def _named_tensor(weight: GgufWeight, data: mmap.mmap) -> "_Named":
    return weight.name, _tensor(weight, data)


def _tensor(weight: GgufWeight, data: mmap.mmap) -> "torch.Tensor":
    import torch

    values = torch.from_numpy(_values(weight, data))
    return values.view(torch.bfloat16) if values.dtype == torch.uint16 else values


def _stored_as(weight: GgufWeight) -> str:
    """The name of its type in the file."""
    return GGML_TYPES[weight.info.ggml_type].name


def _form(weight: GgufWeight) -> Form | None:
    """The form that a matrix could keep; None for other tensors."""
    return GGUF_FORMS.get(_stored_as(weight)) if len(weight.info.shape) == 2 else None


def _is_mxfp4_matrix(weight: GgufWeight) -> bool:
    return weight.undo is Undo.NOTHING and len(weight.info.shape) == 2 and _stored_as(weight) == "MXFP4"


def _array(weight: GgufWeight, data: mmap.mmap) -> "Weight":
    import numpy as np

    from ostro.weights.arrays import WeightArray
    from ostro.weights.quantized import mxfp4

    info = weight.info
    if _is_mxfp4_matrix(weight):
        return mxfp4.gguf_weight(info.name, info.shape, _raw(weight, data))
    if len(info.shape) != 2 or weight.undo in (Undo.SUBTRACT_ONE, Undo.NEGATED_EXP):
        return WeightArray.of(_values(weight, data))
    name, raw = GGML_TYPES[info.ggml_type].name, _raw(weight, data)
    if weight.undo is Undo.TRANSPOSE:
        return WeightArray(name, info.shape[::-1], raw, transposed=True)
    orders = {Undo.ROTATE_HALVES: _halves, Undo.BY_HEAD: _by_head}
    order = orders[weight.undo](np.arange(info.shape[0]), weight.heads) if weight.undo in orders else None
    return WeightArray(name, info.shape, raw, order)


def _values(weight: GgufWeight, data: mmap.mmap) -> "npt.NDArray[Any]":
    """The original numbers: floats as stored, bfloat16 as its bits, quantized types in float32."""
    import numpy as np

    dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}.get(GGML_TYPES[weight.info.ggml_type].name)
    values: npt.NDArray[Any]
    values = _dequantize(weight, data) if dtype is None else _raw(weight, data).view(dtype)
    match weight.undo:
        case Undo.NOTHING:
            return values
        case Undo.ROTATE_HALVES:
            return _halves(values, weight.heads)
        case Undo.SUBTRACT_ONE:
            floats = _floats(values)
            less: npt.NDArray[Any] = floats - floats.dtype.type(1)
            return less
        case Undo.NEGATED_EXP:
            # A number that no exponential gives becomes NaN or infinite, which loaders refuse by the tensor's name.
            with np.errstate(invalid="ignore", divide="ignore"):
                logs: npt.NDArray[np.float64] = np.log(-_floats(values).astype(np.float64))
            return logs.astype(np.float32)
        case Undo.TRANSPOSE:
            return np.ascontiguousarray(values.T)
        case Undo.BY_HEAD:
            return _by_head(values, weight.heads)


def _floats(values: "npt.NDArray[Any]") -> "npt.NDArray[Any]":
    """The numbers whose bfloat16 bits these are, if they are any."""
    import numpy as np

    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def _halves(rows: "npt.NDArray[Any]", heads: int) -> "npt.NDArray[Any]":
    """Restores the row order of heads stored as 0, h/2, 1, h/2+1, …"""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _by_head(rows: "npt.NDArray[Any]", heads: int) -> "npt.NDArray[Any]":
    """Turns all q, all k, all v into q, k, v per head."""
    return rows.reshape(3, heads, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def _dequantize(weight: GgufWeight, data: mmap.mmap) -> "npt.NDArray[np.float32]":
    from ostro.weights.arrays import dequantized

    info, ggml = weight.info, GGML_TYPES[weight.info.ggml_type]
    try:
        return dequantized(_raw(weight, data), ggml.name).reshape(info.shape)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"Tensor {info.name!r} of {weight.path} has type {ggml.name}, which cannot be unpacked. "
            "Use a model quantised to another type."
        ) from error
