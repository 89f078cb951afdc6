"""Where a model's files are, if they are all on this machine. Asks nobody, and reads no file."""

import os
from dataclasses import dataclass
from pathlib import Path

from ostro.sources.base import is_reference, parse_reference
from ostro.sources.store import ModelStore
from ostro.weights import pypi


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


def _wheel_place(wheel: pypi.Wheel) -> Place | None:
    path = pypi.find(wheel)
    return None if path is None else Place(path, None)
