"""What to call a model that nobody has named: by its reference alone, so the same before it is loaded and after."""

import os
import re
from pathlib import Path, PurePosixPath

from ostro.sources.base import is_reference, parse_reference
from ostro.weights import pypi
from ostro.weights.hub import parse_hub_id

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
# A file's name says something only if it is not one of these.
_USUAL = ("model", "pytorch_model", "consolidated")


def reference_name(reference: str | None) -> str:
    """Never empty. Raises ModelNotFound for an address that is none."""
    return _name(reference) or "default"


def _name(reference: str | None) -> str:
    if reference is None:
        return _wheel_name(pypi.DEFAULT_WHEEL)
    path = os.path.expanduser(reference)
    if os.path.exists(path):
        return _path_name(path)
    if reference.startswith("pypi:"):
        return _wheel_name(pypi.parse_wheel(reference.removeprefix("pypi:")))
    if is_reference(reference):
        return parse_reference(reference).name
    hub_id = parse_hub_id(reference)
    return _path_name(path) if hub_id is None else hub_id[0]


def _path_name(path: str) -> str:
    # Without dots: `.` is a directory that has a name.
    whole = Path(os.path.abspath(path))
    if whole.is_dir():
        return whole.name
    stem = _SHARD.sub("", whole.stem)
    return whole.parent.name if stem in _USUAL else stem


def _wheel_name(wheel: pypi.Wheel) -> str:
    return wheel.project if wheel.member is None else PurePosixPath(wheel.member).stem
