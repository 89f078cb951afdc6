"""Where a model's files are, if they are all on this machine. Asks nobody, and reads no file."""

import os
from dataclasses import dataclass
from pathlib import Path

from ostro.sources.base import is_reference, parse_reference
from ostro.sources.store import ModelStore
from ostro.weights import pypi
from ostro.weights.adapter import CONFIG, WEIGHTS


@dataclass(frozen=True, slots=True)
class Place:
    path: Path
    """What `open_checkpoint` takes in place of the reference."""
    name: str | None
    """What the reference calls the model; None where the path tells."""


def find_place(reference: str | None) -> Place | None:
    """None if something must be fetched, or the Hub asked for what is new. Raises ModelNotFound for odd references."""
    if reference is None:
        return _wheel_place(pypi.DEFAULT_WHEEL)
    path = Path(os.path.expanduser(reference))
    if reference and os.path.exists(path):
        return Place(path, None)
    if reference.startswith("pypi:"):
        return _wheel_place(pypi.parse_wheel(reference.removeprefix("pypi:")))
    if is_reference(reference):
        model = parse_reference(reference)
        cached = ModelStore().find(model)
        return None if cached is None else Place(cached, model.name)
    return None


def find_adapter(reference: str, base: str | None, path: Path) -> Path | None:
    """The directory of an adapter whose base lies at that path; None if it must be fetched.

    One in the directory of its base came with that. What is no address of a store is taken for a directory, whether
    there is one or not.
    """
    if not is_reference(reference):
        return Path(os.path.expanduser(reference))
    directory = (path if path.is_dir() else path.parent) / "adapter"
    if reference == f"{base}/adapter" and all((directory / name).is_file() for name in (CONFIG, WEIGHTS)):
        return directory
    return ModelStore().find(parse_reference(reference))


def _wheel_place(wheel: pypi.Wheel) -> Place | None:
    path = pypi.find(wheel)
    return None if path is None else Place(path, None)
