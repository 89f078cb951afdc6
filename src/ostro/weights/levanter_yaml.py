"""Reads the model section of a Levanter YAML, with typed access to its settings. Knows no model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from ostro.formats.yaml_file import read_yaml, shown


@dataclass(frozen=True, slots=True)
class Settings:
    path: Path
    given: Mapping[str, object]
    """The values in the file."""
    defaults: Mapping[str, object] = field(default_factory=dict)

    def get(self, name: str) -> object:
        return self.given.get(name, self.defaults.get(name))

    def integer(self, name: str) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(name, "an integer above 0")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        try:
            # YAML parses 1e-5, which has no decimal point, as a string.
            number = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
        except (OverflowError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise self._wrong(name, "a number above 0")
        return number

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise self._wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def table(self, name: str) -> dict[str, object]:
        value = self.get(name)
        if not isinstance(value, dict | None):
            raise self._wrong(name, "a table")
        return value or {}

    def _wrong(self, name: str, kind: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path}: {name} must be {kind}, got {shown(self.get(name))}.")


def read_model_section(path: Path) -> Settings:
    """The `model` section of a trainer's YAML, or a file that consists of such a section."""
    content = _read(path)
    if isinstance(content, dict) and content.get("use_hf_model_config"):
        raise UnsupportedModel(
            f"{path} takes the model's settings from the Hub (use_hf_model_config). Write them out in a YAML: type, "
            "hidden_dim, intermediate_dim, num_layers, num_heads, num_kv_heads and what else differs from the defaults."
        )
    section = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(section, dict) or not all(isinstance(name, str) for name in section):
        raise BadCheckpoint(
            f"{path} holds no model settings. Give the YAML that has them in its section 'model', or only that section."
        )
    return Settings(path, section)


class LevanterLoader(yaml.SafeLoader):
    """Reads any value with one of Levanter's tags, such as !include, as None."""


LevanterLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _read(path: Path) -> object:
    if not path.exists():
        raise ModelNotFound(f"There is no file {path} with the model's settings. Check the path.")
    return read_yaml(path, LevanterLoader)
