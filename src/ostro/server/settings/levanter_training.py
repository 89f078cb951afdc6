"""A Levanter training YAML as server settings. Knows Levanter's keys; knows no other settings.

    model: {type: llama, …}         levanter_config: this file itself, which describes the model's structure
    trainer: {mp: "p=f32,c=bf16"}   dtype: the compute precision
    trainer: {mesh: {axes: {model: 4}}} or {model_axis_size: 4}
                                    tensor_parallel: the devices that a layer is divided over
    data: {tokenizer: org/name}     tokenizer; also at the top level
    hf_checkpoint, checkpoint_path  the model to serve
    max_new_tokens                  default_max_tokens: how long a sample is, rather than a limit on requests

Everything else only concerns training.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ostro.config import read_dtype
from ostro.errors import BadRequest
from ostro.weights.levanter_config import LevanterLoader


@dataclass(frozen=True, slots=True)
class Training:
    settings: Mapping[str, tuple[str, object]]
    """For each setting, the key it was found at and its value."""
    rest: Mapping[str, object]
    """Top-level keys that are not Levanter's serving settings; some may be settings of the server."""
    unused: tuple[str, ...] = field(default=())
    """Unused keys in sections that were read, such as `trainer.seed`."""


def load_training(text: str) -> object:
    """Parses a file that may contain Levanter's tags, such as !include, which are ignored here."""
    return yaml.load(text, LevanterLoader)


def read_training(content: object, path: Path) -> Training | None:
    """None if it is not a training config. Raises BadRequest for a value that cannot be used for serving."""
    if not isinstance(content, dict) or not _is_training(content):
        return None
    rest = dict(content)
    found = {name: (key, value) for name, key, value in _take(rest, path) if value is not None}
    taken = {key for key, _ in found.values()}
    unused: list[str] = []
    for section in ("trainer", "data"):
        # Anything but a table, such as an !include, stays in `rest`.
        if isinstance(rest.get(section), dict):
            unused += _unused(section, _section(rest, section), taken)
            del rest[section]
    return Training(found, rest, tuple(unused))


def _unused(path: str, section: Mapping[str, object], taken: Collection[str]) -> Iterator[str]:
    """The keys below `path` that were not taken; a table of which some were is listed key by key."""
    for key, value in section.items():
        name = f"{path}.{key}"
        if isinstance(value, dict) and any(each.startswith(f"{name}.") for each in taken):
            yield from _unused(name, value, taken)
        elif name not in taken:
            yield name


def _is_training(content: Mapping[str, object]) -> bool:
    model = content.get("model")
    return isinstance(content.get("trainer"), dict) or (isinstance(model, dict) and "type" in model)


def _take(rest: dict[str, object], path: Path) -> Iterator[tuple[str, str, object]]:
    """Setting, key and value of everything needed for serving; removes top-level keys from `rest`."""
    if isinstance(rest.get("model"), dict):
        rest.pop("model")
        yield "levanter_config", "model", str(path)
    trainer = _section(rest, "trainer")
    yield "dtype", "trainer.mp", _compute_dtype(trainer.get("mp"), path)
    yield "tensor_parallel", "trainer.model_axis_size", trainer.get("model_axis_size")
    # The newer notation wins.
    axes = _section(_section(trainer, "mesh"), "axes")
    yield "tensor_parallel", "trainer.mesh.axes.model", _axis(axes.get("model"))
    at_top = rest.pop("tokenizer", None)
    yield "tokenizer", "data.tokenizer", _section(rest, "data").get("tokenizer") if at_top is None else None
    yield "tokenizer", "tokenizer", at_top
    yield "model", "hf_checkpoint", _hub_reference(rest.pop("hf_checkpoint", None))
    yield "checkpoint_path", "checkpoint_path", rest.pop("checkpoint_path", None)
    yield "default_max_tokens", "max_new_tokens", rest.pop("max_new_tokens", None)


def _section(content: Mapping[str, object], name: str) -> dict[str, object]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _axis(size: object) -> object:
    """Levanter writes -1 for an axis that takes all devices."""
    return "auto" if size == -1 else size


def _compute_dtype(policy: object, path: Path) -> str | None:
    if policy is None:
        return None
    dtype = read_dtype(str(policy))
    if dtype is None:
        raise BadRequest(
            f"{path}: trainer.mp = {policy!r} names no precision to compute in. Write it as p=f32,c=bfloat16.",
            param="dtype",
        )
    return dtype


def _hub_reference(value: object) -> object:
    """Levanter also writes ORG/NAME@REVISION as a table."""
    if isinstance(value, dict) and "model_name_or_path" in value:
        revision = value.get("revision")
        return value["model_name_or_path"] if revision is None else f"{value['model_name_or_path']}@{revision}"
    return value
