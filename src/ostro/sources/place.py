"""Where a model's files are, if they are all on this machine. Asks nobody, and reads no file."""

import os
from dataclasses import dataclass
from pathlib import Path

from ostro.sources.address import is_address, parse_address
from ostro.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ostro.sources.references import parse_model
from ostro.sources.store import ModelStore


@dataclass(frozen=True, slots=True)
class Place:
    path: Path
    """What `open_checkpoint` takes in place of the reference."""
    name: str | None
    """What the reference calls the model; None where the path tells."""


def find_place(reference: str | None, *, newest: bool = True) -> Place | None:
    """None if something must be fetched, or the Hub asked for what is new, unless the `newest` is not wanted. Raises
    ModelNotFound for odd references.
    """
    model = parse_model(reference)
    path = model.find(newest=newest)
    return None if path is None else Place(path, model.label)


def find_adapter(reference: str, base: str | None, path: Path) -> Path | None:
    """The directory of an adapter whose base lies at that path; None if it must be fetched.

    One in the directory of its base came with that. What is no address of a store is taken for a directory, whether
    there is one or not.
    """
    if not is_address(reference):
        return Path(os.path.expanduser(reference))
    directory = (path if path.is_dir() else path.parent) / "adapter"
    needed = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    if reference == f"{base}/adapter" and all((directory / name).is_file() for name in needed):
        return directory
    return ModelStore().find(parse_address(reference))
