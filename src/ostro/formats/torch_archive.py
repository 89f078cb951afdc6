"""Names and shapes of the tensors in a torch file, without torch and without reading tensors. Runs none of its code.

torch.save writes a zip archive: a pickle that lists the objects, and one file per tensor's data. Only the pickle is
read, by an unpickler that replaces every class except tensors with an empty stub, and only after `pickle_check`. Before
version 1.6 torch wrote several pickles and then the data.
"""

import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from ostro.errors import BadCheckpoint
from ostro.formats.pickle_check import check_pickle

# A name and a shape take about two hundred bytes.
_MAX_BYTES = 64 << 20
# Keys under which trainers store the weights next to other state.
_WRAPPERS = ("model_state_dict", "state_dict", "model")


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
    for key in _WRAPPERS:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    named = loaded.items() if isinstance(loaded, dict) else ()
    shapes = {name: value.sizes for name, value in named if isinstance(name, str) and isinstance(value, _Shape)}
    if not shapes:
        raise BadCheckpoint(f"{path} holds no named tensors.")
    return shapes


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
