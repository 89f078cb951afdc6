"""A checkpoint's tensors as numpy arrays, in their stored number formats. Imports no torch.

numpy has no bfloat16: uint16 arrays hold its bits.
"""

import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.formats.gguf_header import GGML_TYPES

if TYPE_CHECKING:
    import torch

    from ostro.formats.torch_archive import PlacedTensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_BLOCK_TYPES = {each.name: number for number, each in GGML_TYPES.items() if each.block_size > 1}
# Values dequantized at a time: large enough to amortise Python's overhead, small enough to bound temporary memory.
_CHUNK_VALUES = 1 << 20

_FORMATS = {np.float64: "F64", np.float32: "F32", np.float16: "F16", np.uint16: "BF16"}
_TORCH_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INTEGERS = {"I8": "int8", "U8": "uint8", "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool"}


class Weight(Protocol):
    """One weight of a checkpoint."""

    @property
    def format(self) -> str:
        """GGUF's name of the format of `stored`, or safetensors' name if GGUF has none."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_float(self) -> bool: ...

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored in blocks."""

    @property
    def format_name(self) -> str:
        """The format's common name."""

    def floats(self) -> Floats:
        """The weight in float32. Only for floating-point and quantized formats."""

    def stored(self) -> "WeightArray":
        """The weight in its format, which is made now if the files have another."""


@dataclass(frozen=True, slots=True)
class WeightArray:
    """One weight as stored: rows of numbers, or of GGUF blocks."""

    format: str
    """GGUF's name of the format, or safetensors' name if GGUF has none."""
    shape: tuple[int, ...]
    raw: Bytes
    """[*shape[:-1], bytes per row], memory-mapped where the file format allows. Treat it as read-only."""
    order: npt.NDArray[np.intp] | None = None
    """The row of `raw` that holds each row of the weight; None if they are in order."""
    transposed: bool = False
    """Whether the rows of `raw` are the weight's columns."""

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Self:
        """Wraps an array in memory. uint16 means bfloat16 bits."""
        whole = np.ascontiguousarray(values)
        name = _FORMATS.get(whole.dtype.type, f"{whole.dtype.kind.upper()}{8 * whole.itemsize}")
        return cls(name, values.shape, _rows_of(whole.reshape(-1).view(np.uint8), values.shape))

    @property
    def is_float(self) -> bool:
        return self.format in _DECODERS

    @property
    def is_quantized(self) -> bool:
        return self.format in _BLOCK_TYPES

    @property
    def is_plain(self) -> bool:
        """Whether every value has bytes of its own, in order."""
        return self.is_float and self.order is None and not self.transposed

    @property
    def format_name(self) -> str:
        """The format's common name: int8 for I8."""
        return _INTEGERS.get(self.format, self.format)

    def floats(self) -> Floats:
        """The weight in float32. Raises UnsupportedModel for a format that holds no weights, such as integers."""
        # NaN and overflow are left to the caller to detect.
        with np.errstate(invalid="ignore", over="ignore"):
            values = _DECODERS[self.format](self.raw) if self.is_float else dequantized(self.raw, self.format)
        if self.transposed:
            *stack, rows, columns = self.shape
            values = values.reshape(*stack, columns, rows).swapaxes(-1, -2)
        values = values.reshape(self.shape)
        return values if self.order is None else values[self.order]

    def stored(self) -> Self:
        return self

    def cut(self, index: tuple[slice, ...]) -> Self:
        """A part of it. Only for plain arrays."""
        values = np.ascontiguousarray(self.raw.reshape(*self.shape, -1)[index])
        shape = values.shape[:-1]
        return replace(self, shape=shape, raw=_rows_of(values.reshape(-1), shape))

    def row_addresses(self) -> npt.NDArray[np.uint64]:
        """The address of each row of a matrix, or of each column of a transposed one; valid as long as `raw` lives."""
        order = np.arange(len(self.raw)) if self.order is None else self.order
        return np.uint64(self.raw.ctypes.data) + order.astype(np.uint64) * np.uint64(self.raw.shape[1])


def dequantized(raw: Bytes, format: str) -> Floats:
    """The numbers in rows of GGUF blocks. Raises UnsupportedModel for a type that cannot be unpacked."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    refused = UnsupportedModel(f"Weights of type {format} cannot be unpacked. Use a model quantised to another type.")
    if (number := _BLOCK_TYPES.get(format)) is None:
        raise refused
    ggml = GGML_TYPES[number]
    blocks = raw.reshape(-1, ggml.block_bytes)
    values = np.empty((len(blocks), ggml.block_size), np.float32)
    step = _CHUNK_VALUES // ggml.block_size
    try:
        for start in range(0, len(blocks), step):
            # As a single long row: the package loops over rows in Python.
            row = blocks[start : start + step].reshape(1, -1)
            values[start : start + step] = dequantize(row, GGMLQuantizationType(number)).reshape(-1, ggml.block_size)
    except (NotImplementedError, ValueError) as error:
        raise refused from error
    return values.reshape(*raw.shape[:-1], -1)


def read_safetensors(path: Path, names: frozenset[str] | None = None) -> Iterator[tuple[str, WeightArray]]:
    """The named tensors, or all of them, in file order and memory-mapped."""
    from safetensors import SafetensorError, safe_open

    try:
        # The library limits the header's size and checks it against the file's.
        with safe_open(path, framework="np") as file:
            in_order = [name for name in file.offset_keys() if names is None or name in names]
        mapped = _mapped_file(path)
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} is damaged or not a safetensors file ({error}). Download it again.") from error
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}.") from error
    size = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:size].tobytes())
    for name in in_order:
        yield name, _mapped_array(header[name], mapped[size:])


def read_torch_archive(path: Path, tensors: Mapping[str, "PlacedTensor"]) -> Iterator[tuple[str, WeightArray]]:
    """Those of a file that torch.save wrote, memory-mapped."""
    mapped = _mapped_file(path)
    for name, tensor in tensors.items():
        raw = _aligned(mapped[tensor.begin : tensor.begin + tensor.reach])
        if not tensor.is_contiguous:
            values = raw.view(f"V{tensor.width}")
            steps = [stride * tensor.width for stride in tensor.strides]
            whole = np.ascontiguousarray(np.lib.stride_tricks.as_strided(values, tensor.shape, steps))
            raw = whole.reshape(-1).view(np.uint8)
        yield name, WeightArray(tensor.format, tensor.shape, _rows_of(raw, tensor.shape))


def _mapped_file(path: Path) -> Bytes:
    # Copy-on-write although nobody writes: torch requires writable memory.
    with path.open("rb") as opened:
        return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)


def tensor_of(weight: Weight) -> "torch.Tensor":
    """The weight as a torch tensor; floats keep their format, and share memory where they can."""
    import torch

    if isinstance(weight, WeightArray) and weight.is_plain and (dtype := _TORCH_TYPES.get(weight.format)) is not None:
        return torch.from_numpy(weight.raw.reshape(-1)).view(getattr(torch, dtype)).reshape(weight.shape)
    # Not made contiguous: a transposed stack of matrices is copied to its place, in the order it has in memory.
    return torch.from_numpy(weight.floats())


def array_of(tensor: "torch.Tensor") -> WeightArray:
    """Converts a torch tensor."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return WeightArray.of(tensor.contiguous().view(torch.uint16).numpy())
    is_narrow = tensor.is_floating_point() and tensor.itemsize == 1
    return WeightArray.of((tensor.float() if is_narrow else tensor).numpy())


def _mapped_array(entry: Mapping[str, Any], data: Bytes) -> WeightArray:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return WeightArray(entry["dtype"], shape, _rows_of(_aligned(data[begin:end]), shape))


def _rows_of(raw: Bytes, shape: tuple[int, ...]) -> Bytes:
    # Not -1 for the last dimension: it cannot be inferred for an empty tensor.
    count = int(np.prod(shape[:-1], dtype=np.int64))
    return raw.reshape(*shape[:-1], len(raw) // max(1, count))


def _aligned(raw: Bytes) -> Bytes:
    """Copies if misaligned: a header of odd length shifts everything after it."""
    return raw if raw.ctypes.data % 8 == 0 else raw.copy()


def _e4m3_table() -> Floats:
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    table = np.where(exponents, (8 + mantissas) * 2.0 ** (exponents - 10), mantissas * 2.0**-9)
    table[codes & 127 == 127] = np.nan
    return np.where(codes < 128, table, -table).astype(np.float32)


_E4M3 = _e4m3_table()


def _bfloat16(raw: Bytes) -> Floats:
    return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


_DECODERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "F32": lambda raw: raw.view(np.float32),
    "F16": lambda raw: raw.view(np.float16).astype(np.float32),
    "BF16": _bfloat16,
    "F64": lambda raw: raw.view(np.float64).astype(np.float32),
    "F8_E4M3": lambda raw: np.take(_E4M3, raw),
    "F8_E8M0": lambda raw: np.ldexp(np.float32(1), raw.astype(np.int32) - 127),
    "F8_E5M2": lambda raw: (raw.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32),
}
