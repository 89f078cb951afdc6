"""The tensors in a torch file, their names, shapes and places, without torch. Runs none of the file's code.

torch.save writes a zip archive: a pickle that lists the objects, and one file per tensor's data. Only the pickle is
read, by an unpickler that replaces every class except tensors with an empty stub, and only after `pickle_check`. Before
version 1.6 torch wrote several pickles and then the data.
"""

import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from ostro.errors import BadCheckpoint
from ostro.formats.pickle_check import check_pickle

# A name and a shape take about two hundred bytes.
_MAX_BYTES = 64 << 20
# Keys under which trainers store the weights next to other state.
_WRAPPERS = ("model_state_dict", "state_dict", "model")


T = TypeVar("T")

# Before torch 1.6: a magic number, the protocol's, the system's sizes, the objects, and the tensors' keys.
_OLD_PICKLES = 5


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The named tensors of a file written by torch.save, version 1.6 or later."""
    with damage_becomes_bad_checkpoint(path):
        pickles = _checked_pickles(path)
        listing = next((data for name, data in pickles.items() if name.endswith("data.pkl")), None)
        if listing is None:
            raise BadCheckpoint(f"{path} is an archive, but not one of tensors. Convert it to safetensors.")
        return _named_shapes(path, _Reader(BytesIO(listing)).load())


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor's place in a file of torch.save's."""

    format: str
    """Safetensors' name of its values' format."""
    width: int
    """Bytes of a value."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Values from one index of each dimension to the next."""
    begin: int
    """The byte of the file at which its first value begins."""

    @property
    def reach(self) -> int:
        """Bytes from its first value to the end of its last."""
        return _reach(self.shape, self.strides) * self.width

    @property
    def is_contiguous(self) -> bool:
        dense, is_dense = 1, True
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            is_dense = is_dense and (size == 1 or stride == dense)
            dense *= size
        return is_dense or 0 in self.shape


def placed_tensors(path: Path) -> dict[str, PlacedTensor] | None:
    """The named tensors of a file and their places; None for a file that only torch reads.

    Such a file was written by a torch older than 1.6, or on a big-endian machine, or holds more than tensors of plain
    formats. Every place lies within the file.
    """
    if not zipfile.is_zipfile(path):
        return None
    with damage_becomes_bad_checkpoint(path):
        pickles = _checked_pickles(path)
        if len(pickles) != 1:
            return None
        [(name, listing)] = pickles.items()
        folder = name.removesuffix("data.pkl")
        if not name.endswith("data.pkl") or (folder and not folder.endswith("/")):
            return None
        try:
            loaded = _PlaceReader(BytesIO(listing)).load()
        except _OnlyTorch:
            return None
        return _places(path, _named(path, loaded, _Tensor), folder)


def check_torch_file(path: Path) -> None:
    """Raises BadCheckpoint for a file whose pickles would take more memory or time than tensors do, or are damaged."""
    with damage_becomes_bad_checkpoint(path):
        if zipfile.is_zipfile(path):
            _checked_pickles(path)
        else:
            _check_old(path)


@contextmanager
def damage_becomes_bad_checkpoint(path: Path) -> Iterator[None]:
    """A pickle that does not hold what it should raises nearly any error in whoever reads it."""
    try:
        yield
    except zipfile.BadZipFile as error:
        raise BadCheckpoint(
            f"{path} is damaged, or was written by a torch older than 1.6. Convert it to safetensors."
        ) from error
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error.strerror or error}.") from error
    except (
        pickle.UnpicklingError,
        EOFError,
        struct.error,
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
        zlib.error,
    ) as error:
        raise BadCheckpoint(
            f"{path} cannot be read as a file of tensors ({str(error).partition(chr(10))[0]}). Save it again, or "
            "convert it to safetensors."
        ) from error


def _checked_pickles(path: Path) -> dict[str, bytes]:
    """All pickles of the archive by their names: torch finds its own by other rules than zipfile."""
    with zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename.endswith(".pkl")]
        if sum(entry.file_size for entry in entries) > _MAX_BYTES:
            raise BadCheckpoint(f"{path} is an archive, but not one of tensors. Convert it to safetensors.")
        found = {entry.filename: archive.read(entry) for entry in entries}
    for data in found.values():
        check_pickle(data)
    return found


def _check_old(path: Path) -> None:
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES)
    at = 0
    for _ in range(_OLD_PICKLES):
        at = check_pickle(data, at)


def _named_shapes(path: Path, loaded: object) -> dict[str, tuple[int, ...]]:
    return {name: value.sizes for name, value in _named(path, loaded, _Shape).items()}


def _named(path: Path, loaded: object, kind: type[T]) -> dict[str, T]:
    for key in _WRAPPERS:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    named = loaded.items() if isinstance(loaded, dict) else ()
    found = {name: value for name, value in named if isinstance(name, str) and isinstance(value, kind)}
    if not found:
        raise BadCheckpoint(f"{path} holds no named tensors.")
    return found


class _Shape:
    """Keeps the sizes from its construction; ignores any state that the pickle sets later."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __setstate__(self, state: object = None) -> None:
        pass


class _Table(dict[object, object]):
    """Stands in for OrderedDict; ignores its state, such as a state dict's `_metadata`."""

    __slots__ = ()

    def __setstate__(self, state: object = None) -> None:
        pass


class _Shell:
    """Stands in for any other class: accepts everything that unpickling does, and keeps nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> "_Shell":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def take(self, *args: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = take


def _tensor(storage: object, offset: int, sizes: tuple[int, ...], *rest: object) -> _Shape:
    if not isinstance(sizes, tuple) or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise pickle.UnpicklingError("a tensor's shape is malformed")
    return _Shape(sizes)


def _parameter(tensor: object, *rest: object) -> object:
    return tensor


_KNOWN: dict[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): _Table,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN.get((module, name), _Shell)

    def persistent_load(self, pid: object) -> None:
        return None


# --- places ---------------------------------------------------------------------------------------------------------

# Classes of storages, the formats of their values by safetensors' names, and the bytes of a value.
_STORAGES = {
    "BFloat16Storage": "BF16",
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "ShortStorage": "I16",
}
_WIDTHS = {"BF16": 2, "BOOL": 1, "U8": 1, "I8": 1, "F64": 8, "F32": 4, "F16": 2, "I32": 4, "I64": 8, "I16": 2}
_MAX_DIMENSIONS = 8
# A zip entry's own header, which its name and its extra field follow.
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class _OnlyTorch(Exception):
    """The file is for torch to read, or to refuse."""


class _Tensor(NamedTuple):
    """What the pickle says of a tensor. A tuple, whose fields no pickle can set; checked once all is read."""

    storage: object
    offset: object
    sizes: object
    strides: object


def _placed_tensor(storage: object, offset: object, sizes: object, strides: object, *rest: object) -> _Tensor:
    return _Tensor(storage, offset, sizes, strides)


_PLACING: Mapping[tuple[str, str], object] = {
    ("collections", "OrderedDict"): _Table,
    ("torch._utils", "_rebuild_tensor_v2"): _placed_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    # A storage's class is never called: its name alone says how the values are stored.
    **{("torch", name): name for name in _STORAGES},
}


class _PlaceReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLACING:
            raise _OnlyTorch
        return _PLACING[module, name]

    def persistent_load(self, pid: object) -> object:
        return pid


def _places(path: Path, tensors: Mapping[str, _Tensor], folder: str) -> dict[str, PlacedTensor] | None:
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        entries = {entry.filename: entry for entry in archive.infolist()}
        order = entries.get(f"{folder}byteorder")
        if order is not None and (order.file_size > 16 or archive.read(order) != b"little"):
            return None
        num_bytes, begins, placed = path.stat().st_size, dict[str, int](), dict[str, PlacedTensor]()
        for name, tensor in tensors.items():
            storage_class, key, count = _storage(tensor.storage)
            format = _STORAGES[storage_class]
            width = _WIDTHS[format]
            offset, shape, strides = _layout(tensor)
            if len(shape) > _MAX_DIMENSIONS or math.prod(shape) > count:
                return None
            entry = entries.get(f"{folder}data/{key}")
            if entry is None or offset + _reach(shape, strides) > count or count * width > entry.file_size:
                raise pickle.UnpicklingError(f"the values of {name} are not all there")
            if entry.compress_type != zipfile.ZIP_STORED:
                return None
            if key not in begins:
                begins[key] = _begin(file, entry)
            if begins[key] + count * width > num_bytes:
                raise pickle.UnpicklingError("it is cut short")
            placed[name] = PlacedTensor(format, width, shape, strides, begins[key] + offset * width)
        return placed


def _storage(pid: object) -> tuple[str, str, int]:
    """Its class's name, the name of its entry, and how many values it holds."""
    match pid:
        case ("storage", str(name), str(key), _, int(count)) if name in _STORAGES and count >= 0:
            return name, key, count
    raise pickle.UnpicklingError("a tensor's storage is malformed")


def _layout(tensor: _Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    match tensor:
        case (_, int(offset), tuple(shape), tuple(strides)) if offset >= 0 and len(shape) == len(strides):
            if all(type(each) is int and 0 <= each < 1 << 63 for each in (*shape, *strides)):
                # A stride that nothing takes may be any number, and too large a one for numpy.
                return offset, shape, tuple(0 if size <= 1 else each for size, each in zip(shape, strides, strict=True))
    raise pickle.UnpicklingError("a tensor's shape is malformed")


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Values from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _begin(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """The byte of the file at which the entry's data begin."""
    file.seek(entry.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\3\4":
        raise pickle.UnpicklingError("an entry is not where the archive's list says")
    return int(entry.header_offset + _LOCAL_HEADER.size + name + extra)
