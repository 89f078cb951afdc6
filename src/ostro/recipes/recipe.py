"""One recipe: a model, its config, and what is known about running it. Refuses unknown fields by name."""

import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal

import msgspec

from ostro.config import KINDS, EngineConfig, Size, ToolFormat, read_size
from ostro.errors import BadCheckpoint, BadRequest
from ostro.formats.yaml_file import read_yaml
from ostro.recipes.devices import DEVICES
from ostro.sampling_defaults import SamplingDefaults
from ostro.weights.described import DescribedCheckpoint, Formats

Value = str | int | float | bool
SamplingSource = Literal["generation_config.json", "the short name's", "recommended by the model card", "none known"]


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `ostro plan` says of a model that fits. Sizes are in bytes, of each device."""

    runs_on: str
    weights: int
    page: int
    pages: int
    page_tokens: int
    total: int
    longest: int
    """Longest sequence, in tokens."""
    at_a_time: int
    """Most sequences that run at once, however short."""

    def sequences(self, length: int) -> int:
        """How many sequences of this length, prompt plus output, can run at a time."""
        return min(self.at_a_time, self.pages // -(-length // self.page_tokens))


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for a device."""

    device: str
    """A name in `recipes.devices.DEVICES`."""
    settings: dict[str, Value] = {}
    plan: Expectation

    @property
    def options(self) -> list[str]:
        """The settings as options of `ostro serve`."""
        return [word for name, value in self.settings.items() for word in _option(name, value)]


class Files(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number formats of a model's files, if they are not in bfloat16."""

    matrices: str
    embedding: str
    vectors: str
    in_one_file: bool


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A figure from a file in the repository."""

    what: str
    figure: float
    unit: str
    machine: str
    command: str
    source: str
    """The file, from the repository's root."""
    at: list[str]
    """The keys that lead to the figure, or to several runs, of which it is the median."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    title: str
    model: str
    """What `ostro serve` is given."""
    upstream: str
    """The model's id on the Hugging Face Hub."""
    licence: str
    config: dict[str, object]
    """The part of the published config.json that describes the language model."""
    config_source: str
    files: Files | None = None
    sampling: dict[str, float | int]
    """Defaults that the model brings."""
    sampling_source: SamplingSource
    tools: ToolFormat
    """The format of its calls. generic describes tools to models that were not trained to call any."""
    reasoning: str | None
    """How it marks its reasoning, and who turns that off; None for a model that does not reason."""
    setups: list[Setup]
    too_large_for: list[str] = []
    """Devices on which it fits with no setting."""
    measured: list[Measured] = []
    notes: list[str] = []

    @property
    def checkpoint(self) -> DescribedCheckpoint:
        """The model as far as its config tells."""
        formats = None if self.files is None else Formats(**msgspec.structs.asdict(self.files))
        return DescribedCheckpoint.of(self.name, self.config, formats)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(**self.sampling)  # type: ignore[arg-type]

    def setup(self, device: str) -> Setup | None:
        return next((each for each in self.setups if each.device == device), None)

    def command(self, setup: Setup) -> str:
        return shlex.join(["ostro", "serve", self.model, *setup.options])


def read_recipe(path: Path) -> Recipe:
    """Raises BadCheckpoint for a file that is not a recipe, naming the field."""
    try:
        recipe = msgspec.convert(read_yaml(path), Recipe)
        _check(recipe)
    except (msgspec.ValidationError, BadRequest, ValueError) as error:
        # ValueError comes from sizes. Some of these messages are sentences.
        raise BadCheckpoint(f"{path} is not a recipe: {str(error).rstrip('.')}.") from error
    if recipe.name != path.stem:
        raise BadCheckpoint(f"{path} is not a recipe: name is {recipe.name!r}, but the file is {path.stem!r}.")
    return recipe


def _check(recipe: Recipe) -> None:
    if unknown := set(recipe.sampling) - {each.name for each in fields(SamplingDefaults)}:
        raise BadRequest(f"there is no sampling default {min(unknown)!r}")
    _ = recipe.sampling_defaults
    for device in (*(each.device for each in recipe.setups), *recipe.too_large_for):
        if device not in DEVICES:
            raise BadRequest(f"there is no device {device!r}")
    for setup in recipe.setups:
        if unknown := set(setup.settings) - set(KINDS):
            raise BadRequest(f"there is no setting {min(unknown)!r} (device {setup.device})")
        engine_config(setup.settings)


def engine_config(settings: Mapping[str, Value], **others: object) -> EngineConfig:
    """Raises BadRequest like EngineConfig. A size may be written 2G, as on the command line."""
    return EngineConfig(**(others | {name: _read(name, value) for name, value in settings.items()}))  # type: ignore[arg-type]


def _option(name: str, value: Value) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def _read(name: str, value: Value) -> object:
    return read_size(value) if isinstance(value, str) and KINDS[name] in _SIZES else value


_SIZES: tuple[object, ...] = (Size, Size | None)


def as_json(recipe: Recipe) -> Mapping[str, object]:
    """The recipe with the command of each setup."""
    found: dict[str, object] = msgspec.to_builtins(recipe)
    commands = [msgspec.to_builtins(each) | {"command": recipe.command(each)} for each in recipe.setups]
    return found | {"setups": commands}
