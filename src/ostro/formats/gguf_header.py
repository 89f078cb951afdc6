"""Reads the header of a GGUF file: its metadata and its tensors' locations. Knows no models and no torch.

    magic "GGUF" │ version │ tensor count │ metadata count │ metadata … │ tensor infos … │ padding │ tensor data …

No count, length or offset is trusted before it is checked against the file's size, so a damaged or hostile file causes
an error but never a huge allocation.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel

MetadataValue = bool | int | float | str | list["MetadataValue"]

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
MAX_ARRAY_LENGTH = 1 << 24
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor's block format: `block_size` values in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
}

_STRING, _ARRAY = 8, 9
# Metadata value type -> struct code. Strings and arrays have no fixed size.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# The minimum size of an entry: bounds a count before the entries are read.
_LEAST_METADATA_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8
_LEAST_BYTES = {_STRING: 8, _ARRAY: 4 + 8}


@dataclass(frozen=True, slots=True)
class GgufTensorInfo:
    """One tensor's location. `shape` is row-major, outermost first: the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    """From the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    version: int
    metadata: dict[str, MetadataValue]
    tensors: tuple[GgufTensorInfo, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads versions 2 and 3, little endian. Raises BadCheckpoint for anything damaged, truncated or malformed."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                raise damaged(path, "it is too short to be a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except FileNotFoundError:
        raise ModelNotFound(f"There is no file {path}.") from None
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error.strerror or error}.") from error


def damaged(path: Path, what: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} is damaged: {what}. Download it again.")


class _Reader:
    """A cursor over the mapped file. Every read goes through `_advance`, which checks the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._pos = 0

    def header(self) -> GgufHeader:
        if self._data[self._advance(4) : 4] != MAGIC:
            raise self._damaged("it does not begin as a GGUF file does")
        version = self._u32()
        if version not in (2, 3):
            # A big-endian file has its version number in the upper half.
            kind = f"of version {version}" if version < 1 << 16 else "in big-endian order"
            raise BadCheckpoint(
                f"{self._path} is a GGUF file {kind}, and Ostro reads versions 2 and 3 in little-endian order. "
                "Convert the model again with current tools."
            )
        tensor_count = self._count(_LEAST_TENSOR_BYTES, "tensors")
        metadata_count = self._count(_LEAST_METADATA_BYTES, "metadata entries")
        metadata = self._metadata(metadata_count)
        return GgufHeader(self._path, version, metadata, self._tensors(tensor_count, _alignment(self._path, metadata)))

    def _damaged(self, what: str) -> BadCheckpoint:
        return damaged(self._path, what)

    def _advance(self, count: int) -> int:
        """Skips `count` bytes and returns where they start."""
        start = self._pos
        if count > self._size - start:
            raise self._overrun()
        self._pos = start + count
        return start

    def _overrun(self) -> BadCheckpoint:
        return self._damaged(f"its header runs past the end of the file ({self._size} bytes)")

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self._data, self._advance(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self._data, self._advance(8))[0]
        return value

    def _count(self, least_bytes_each: int, what: str) -> int:
        count = self._u64()
        if count > (self._size - self._pos) // least_bytes_each:
            raise self._damaged(f"it claims {count} {what}, more than its {self._size} bytes can hold")
        return count

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has 10^5 of these, so the loop uses only locals.
        data, size, pos, unpack = self._data, self._size, self._pos, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                if pos > size:
                    raise self._overrun()
                strings.append(data[start:pos].decode())
        except struct.error:
            raise self._overrun() from None
        except UnicodeDecodeError:
            raise self._damaged("a text in its header is not UTF-8") from None
        self._pos = pos
        return strings

    def _metadata(self, count: int) -> dict[str, MetadataValue]:
        metadata: dict[str, MetadataValue] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"the metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._u32(), depth=0)
        return metadata

    def _value(self, kind: int, depth: int) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._scalars(kind, 1)[0]

    def _array(self, depth: int) -> list[MetadataValue]:
        if depth > MAX_ARRAY_DEPTH:
            raise self._damaged(f"its metadata nests arrays more than {MAX_ARRAY_DEPTH} deep")
        kind = self._u32()
        count = self._count(_LEAST_BYTES.get(kind, 1), "array elements")
        if count > MAX_ARRAY_LENGTH:
            raise self._damaged(f"its metadata holds an array of {count} elements, but the limit is {MAX_ARRAY_LENGTH}")
        if kind == _STRING:
            return list(self._strings(count))
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[MetadataValue]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._damaged(f"it uses an unknown metadata type {kind}")
        start = self._advance(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack_from(f"<{count}{code}", self._data, start))

    def _tensors(self, count: int, alignment: int) -> tuple[GgufTensorInfo, ...]:
        entries = [(self._string(), self._shape(), self._u32(), self._u64()) for _ in range(count)]
        if len({name for name, *_ in entries}) < count:
            raise self._damaged("two of its tensors have the same name")
        data_start = self._pos + -self._pos % alignment
        return tuple(self._tensor(*entry, data_start, alignment) for entry in entries)

    def _shape(self) -> tuple[int, ...]:
        dimensions = self._u32()
        if dimensions > MAX_DIMENSIONS:
            raise self._damaged(f"a tensor claims {dimensions} dimensions, but the limit is {MAX_DIMENSIONS}")
        return tuple(self._u64() for _ in range(dimensions))[::-1]

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, data_start: int, alignment: int
    ) -> GgufTensorInfo:
        ggml = GGML_TYPES.get(kind)
        if ggml is None:
            raise UnsupportedModel(
                f"Tensor {name!r} of {self._path} has the unknown type {kind}. Use a model quantised to another type."
            )
        values = math.prod(shape)
        if values == 0 or (shape[-1] if shape else 1) % ggml.block_size:
            raise self._damaged(f"tensor {name!r} has the impossible shape {shape} for type {ggml.name}")
        if offset % alignment:
            raise self._damaged(f"tensor {name!r} is not aligned to {alignment} bytes")
        nbytes = values // ggml.block_size * ggml.block_bytes
        if data_start + offset + nbytes > self._size:
            raise self._damaged(
                f"it is cut short, as tensor {name!r} ends at byte {data_start + offset + nbytes} "
                f"and the file has {self._size}"
            )
        return GgufTensorInfo(name, shape, kind, data_start + offset, nbytes)


def _alignment(path: Path, metadata: dict[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    # The widest element needs eight bytes to be read in place.
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise damaged(path, f"general.alignment is {alignment!r}, not a power of two from 8 to 2^20")
    return alignment
