"""What to call a model that nobody has named: by its reference alone, so the same before it is loaded and after."""

import os
import re
from pathlib import Path, PurePosixPath

from ostro.sources.aliases import Alias
from ostro.sources.hub import HubModel
from ostro.sources.pypi import WheelModel
from ostro.sources.references import LocalModel, StoredModel, parse_model

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
# A file's name says something only if it is not one of these.
_USUAL = ("model", "pytorch_model", "consolidated")


def reference_name(reference: str | None) -> str:
    """Never empty. Raises ModelNotFound for what is no reference."""
    return _name(reference) or "default"


def _name(reference: str | None) -> str:
    match parse_model(reference):
        case LocalModel(path):
            return _path_name(path)
        case HubModel(repo=name) | Alias(name=name) | StoredModel(name=name):
            return name
        case WheelModel() as model:
            return _wheel_name(model)


def _path_name(path: Path) -> str:
    # Without dots: `.` is a directory that has a name.
    whole = Path(os.path.abspath(path))
    if whole.is_dir():
        return whole.name
    stem = _SHARD.sub("", whole.stem)
    return whole.parent.name if stem in _USUAL else stem


def _wheel_name(model: WheelModel) -> str:
    first = model.parts[0]
    if model.is_split or first.member is None:
        return model.label or first.project
    return model.label or PurePosixPath(first.member).stem
