"""How an embedding model pools token vectors into one, according to its sentence-transformers files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.formats.json_file import read_json_list, read_json_object

PoolingMode = Literal["mean", "cls", "lasttoken"]
_MODES: dict[str, PoolingMode] = {"mean": "mean", "cls": "cls", "lasttoken": "lasttoken"}
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    mode: PoolingMode
    normalize: bool
    """Whether the pooled vector is scaled to length one."""


def read_pooling(directory: Path) -> Pooling | None:
    """The settings in modules.json and the pooling module's config; None if this is no embedding model."""
    modules_file = directory / "modules.json"
    if not modules_file.is_file():
        return None
    kinds: dict[str, str] = {}
    for module in read_json_list(modules_file):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise BadCheckpoint(f"{modules_file} lists a module without a type. Download it again.")
        kinds[module["type"].rpartition(".")[2]] = str(module.get("path", ""))
    unknown = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise UnsupportedModel(f"{directory} is an embedding model with a {min(unknown)} module; Ostro knows none.")
    if "Pooling" not in kinds:
        return None
    return Pooling(_mode(directory, kinds["Pooling"]), normalize="Normalize" in kinds)


def _mode(directory: Path, folder: str) -> PoolingMode:
    config_file = directory / folder / "config.json"
    if not config_file.resolve().is_relative_to(directory.resolve()):
        raise BadCheckpoint(f"{directory / 'modules.json'} points outside its directory, to {folder!r}.")
    config = read_json_object(config_file)
    named = config.get("pooling_mode")
    modes = [str(named)] if named is not None else [mode for flag, mode in _FLAGS.items() if config.get(flag)]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(
            f"{config_file} pools by {' and '.join(modes) or 'nothing'}; Ostro pools by {', '.join(_MODES)}."
        )
    return _MODES[modes[0]]
