"""Torch's tensors in safetensors files and pickles. A pickle may contain only tensors: anything else is refused, and no
code in it runs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ostro.errors import BadCheckpoint, Unsupported
from ostro.system.requirements import needs

if TYPE_CHECKING:
    import torch

    from ostro.weights.arrays import WeightArray


def safetensors_names(path: Path) -> frozenset[str]:
    """The names in the file's header; the safetensors library limits its size and checks it against the file's."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return frozenset(file.keys())
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} is damaged or not a safetensors file ({error}). Download it again.") from error
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}.") from error


def read_safetensors(path: Path, names: frozenset[str]) -> Iterator[tuple[str, "torch.Tensor"]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.offset_keys():
            if name in names:
                yield name, file.get_tensor(name)


def pickled_arrays(path: Path, names: frozenset[str]) -> Iterator[tuple[str, "WeightArray"]]:
    """All the tensors of a pickle. Torch is needed only for a file whose tensors `placed_tensors` cannot place."""
    from ostro.formats.torch_archive import placed_tensors
    from ostro.weights import arrays

    if (placed := placed_tensors(path)) is not None:
        yield from arrays.read_torch_archive(path, placed)
        return
    for name, tensor in read_pickle(path, names):
        yield name, arrays.array_of(tensor)


def read_pickle(path: Path, names: frozenset[str]) -> Iterator[tuple[str, "torch.Tensor"]]:
    """All the tensors of a pickle; without a header, it cannot be filtered by `names`."""
    import pickle
    import zipfile

    from ostro.formats.torch_archive import check_torch_file, damage_becomes_bad_checkpoint

    try:
        import torch
    except ImportError as error:
        raise Unsupported(needs(f"{path.name}, a pickle that only torch reads,", "torch"), param="model") from error
    del names
    check_torch_file(path)
    with damage_becomes_bad_checkpoint(path):
        try:
            # Before torch 1.6 the format was not a zip archive, and only archives can be memory-mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            raise BadCheckpoint(
                f"{path} holds more than tensors, or is damaged, and is not loaded for safety. Convert it to "
                "safetensors."
            ) from error
    yield from _state_dict(path, loaded).items()


def _state_dict(path: Path, loaded: object) -> dict[str, "torch.Tensor"]:
    """Trainers store the weights next to other state, under one of a few names."""
    import torch

    for key in ("model_state_dict", "state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict):
        raise BadCheckpoint(f"{path} holds a {type(loaded).__name__}, not named tensors.")
    weights = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if not weights:
        raise BadCheckpoint(f"{path} holds no named tensors.")
    return weights
