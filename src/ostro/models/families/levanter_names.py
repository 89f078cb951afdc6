"""A family's names in Levanter's settings. Reads no files; `weights.levanter_config` does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Config = dict[str, object]

LLAMA: Mapping[str, object] = {
    "max_seq_len": 2048,
    "hidden_dim": 4096,
    "intermediate_dim": 11008,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 32,
    "activation_function": "silu",
    "layer_norm_epsilon": 1e-5,
}
"""The defaults that most types share."""


class LevanterSettings(Protocol):
    """A model's settings, including the type's defaults."""

    @property
    def given(self) -> Mapping[str, object]: ...
    def get(self, name: str) -> object: ...
    def integer(self, name: str) -> int: ...
    def number(self, name: str) -> float: ...
    def flag(self, name: str) -> bool: ...
    def text(self, name: str) -> str: ...


def context(settings: LevanterSettings) -> int:
    # Older versions call it seq_len.
    older = "seq_len" in settings.given and "max_seq_len" not in settings.given
    return settings.integer("seq_len" if older else "max_seq_len")


def llama_config(settings: LevanterSettings, head_dim: int) -> Config:
    return {
        "hidden_act": settings.text("activation_function"),
        "attention_bias": settings.flag("attention_bias"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LevanterNames:
    type: str
    """The family's name in YAML."""
    defaults: Mapping[str, object]
    own_settings: frozenset[str] = frozenset()
    """Settings specific to this type."""
    like_llama: bool = True
    """Whether it also has the settings, and under the same names the arrays, that most types share with Llama."""
    head_dim: Literal["set", "derived", "stored"] = "derived"
    """Where it comes from: the settings if present, division, or only the arrays' shapes."""
    config: Callable[[LevanterSettings, int], Config] = llama_config
    """Fields of config.json that add to or replace those common to all types; also takes the head_dim."""
