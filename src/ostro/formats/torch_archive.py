"""Names and shapes of the tensors in a torch file, without torch and without reading tensors. Runs none of its code.

torch.save writes a zip archive: a pickle that lists the objects, and one file per tensor's data. Only the pickle is
read, by an unpickler that replaces every class except tensors with an empty stub.
"""

import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ostro.errors import BadCheckpoint

# A name and a shape take about two hundred bytes.
_MAX_BYTES = 64 << 20
# Keys under which trainers store the weights next to other state.
_WRAPPERS = ("model_state_dict", "state_dict", "model")


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The named tensors of a file written by torch.save, version 1.6 or later."""
    try:
        with zipfile.ZipFile(path) as archive:
            entry = next((entry for entry in archive.infolist() if entry.filename.endswith("data.pkl")), None)
            if entry is None or entry.file_size > _MAX_BYTES:
                raise BadCheckpoint(f"{path} is an archive, but not one of tensors. Convert it to safetensors.")
            with archive.open(entry) as file:
                loaded = _Reader(file).load()
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
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
        zlib.error,
    ) as error:
        raise BadCheckpoint(
            f"{path} cannot be read as a file of tensors ({error}). Save it again, or convert it to safetensors."
        ) from error
    return _named_shapes(path, loaded)


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
