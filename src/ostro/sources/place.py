"""Finds a model's files on this machine. Uses no network and reads no file contents."""

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
    """The local path, which `open_checkpoint` accepts in place of the reference."""
    name: str | None
    """The name that the reference gives the model; None if it follows from the path."""


def find_place(reference: str | None, *, newest: bool = True) -> Place | None:
    """None if something must be downloaded, or if `newest` requires asking the Hub. Raises ModelNotFound for malformed
    references.
    """
    model = parse_model(reference)
    path = model.find(newest=newest)
    return None if path is None else Place(path, model.label)


def find_adapter(reference: str, base: str | None, path: Path) -> Path | None:
    """The local directory of an adapter whose base model is at `path`; None if it must be downloaded.

    An adapter inside its base's directory was downloaded with it. Anything but a store address is taken as a
    directory, existing or not.
    """
    if not is_address(reference):
        return Path(os.path.expanduser(reference))
    directory = (path if path.is_dir() else path.parent) / "adapter"
    needed = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    if reference == f"{base}/adapter" and all((directory / name).is_file() for name in needed):
        return directory
    return ModelStore().find(parse_address(reference))
