"""Reads Levanter's model settings, and translates them to Hugging Face's config.json. Knows which of them affect what a
model computes.

    type: llama
    hidden_dim: 2048
    num_layers: 16
    rope: {type: llama3}

Omitted settings take Levanter's defaults. The config describes the model as Levanter computes it: sliding windows and
final soft caps that its settings allow but its code ignores are left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from ostro.formats.yaml_file import read_yaml, shown
from ostro.models.families.levanter_names import LevanterNames, context
from ostro.models.family import Family
from ostro.models.registry import FAMILIES


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


_TYPES = {names.type: (family, names) for family in FAMILIES for names in family.levanter}

# Settings common to all types that are used or checked, and those of all that are like Llama. Any setting that is
# neither here, nor type-specific, nor below is refused: the family does not implement it.
_USED = frozenset(
    (
        *("type", "max_seq_len", "seq_len", "hidden_dim", "num_layers", "num_heads", "vocab_size"),
        *("activation_function", "layer_norm_epsilon", "tie_word_embeddings"),
    )
)
_USED_LIKE_LLAMA = _USED.union(
    (
        *("intermediate_dim", "num_kv_heads", "use_layer_norm_weight", "rope", "rope_theta", "rope_scaling"),
        # Levanter, too, ignores these for types that lack them.
        *("head_dim", "sliding_window", "layer_types", "attn_logit_softcapping"),
    )
)
# Only relevant to training, or exported without affecting the computation.
_WITHOUT_EFFECT = frozenset(
    (
        *("attention_dropout", "attn_backend", "cross_entropy_block_size", "flash_attention_block_size"),
        *("gradient_checkpointing", "gradient_checkpointing_block_size", "initializer_range", "reference_checkpoint"),
        *("scan_layers", "tokenizer", "upcast_attn", "use_flash_attention"),
        *("final_logit_softcapping", "max_window_layers", "query_pre_attn_scalar", "rope_local_base_freq"),
        *("sliding_window_pattern", "use_sliding_window"),
    )
)


@dataclass(frozen=True, slots=True)
class LevanterModel:
    family: Family
    names: LevanterNames
    settings: Settings

    def config(self, *, stored_vocab: int, stored_head_dim: int, dtype: str) -> dict[str, object]:
        """The equivalent config.json; some values are only known from the arrays."""
        settings, head_dim = self.settings, self._head_dim(stored_head_dim)
        config = {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "vocab_size": stored_vocab if settings.get("vocab_size") is None else settings.integer("vocab_size"),
            "tie_word_embeddings": settings.flag("tie_word_embeddings"),
            "torch_dtype": dtype,
        }
        sizes = self._llama_sizes(head_dim) if self.names.like_llama else {}
        return config | sizes | self.names.config(settings, head_dim)

    def _llama_sizes(self, head_dim: int) -> dict[str, object]:
        settings = self.settings
        heads, kv_heads = settings.integer("num_heads"), settings.integer("num_kv_heads")
        if heads % kv_heads:
            raise BadCheckpoint(f"{settings.path}: {heads} num_heads cannot share {kv_heads} num_kv_heads evenly.")
        return {
            "hidden_size": settings.integer("hidden_dim"),
            "intermediate_size": settings.integer("intermediate_dim"),
            "num_hidden_layers": settings.integer("num_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": context(settings),
            "rms_norm_eps": settings.number("layer_norm_epsilon"),
            **_rope(settings),
        }

    def check(self) -> None:
        """Raises UnsupportedModel for settings that the family does not implement."""
        settings = self.settings
        if settings.get("use_layer_norm_weight") is False:
            raise _unsupported(settings, "norms without weights")
        if "rope" in settings.given and settings.get("rope") is None:
            raise _unsupported(settings, "attention without rotary positions (rope: null)")
        used = _USED_LIKE_LLAMA if self.names.like_llama else _USED
        for name, value in settings.given.items():
            if value and name not in _WITHOUT_EFFECT | used | self.names.own_settings:
                raise _unsupported(settings, name)

    def _head_dim(self, stored: int) -> int:
        if self.names.head_dim == "stored":
            # These types have a setting for it that some versions ignore.
            return stored
        if self.names.head_dim == "set" and self.settings.get("head_dim") is not None:
            return self.settings.integer("head_dim")
        return max(self.settings.integer("hidden_dim") // self.settings.integer("num_heads"), 1)


def read_levanter_model(path: Path) -> LevanterModel:
    """The model described by a YAML file. Raises ModelNotFound, BadCheckpoint or UnsupportedModel."""
    settings = read_model_section(path)
    kind = settings.get("type")
    if kind is None:
        raise BadCheckpoint(f"{path} does not state the model's type. Add it, as in 'type: llama'.")
    if not isinstance(kind, str) or kind not in _TYPES:
        known = ", ".join(sorted(_TYPES))
        raise UnsupportedModel(f"{path}: Levanter's model type {kind!r} is not supported; supported: {known}.")
    family, names = _TYPES[kind]
    model = LevanterModel(family, names, replace(settings, defaults=names.defaults))
    model.check()
    return model


def _rope(settings: Settings) -> dict[str, object]:
    table = settings.table("rope")
    if not table:
        # The notation of older versions.
        scaling = settings.table("rope_scaling")
        table = {**scaling, "type": scaling.get("rope_type") or scaling.get("type") or "default"}
        table |= {"theta": settings.given["rope_theta"]} if "rope_theta" in settings.given else {}
    kind = table.get("type", "default")
    rope = Settings(settings.path, table, _ROPE_DEFAULTS)
    if kind == "llama3":
        rope = replace(rope, defaults=_LLAMA3_DEFAULTS)
    theta, factor = rope.number("theta"), rope.number("factor")
    original = "original_max_position_embeddings"
    match kind:
        case "default" | "linear" if factor == 1.0:
            return {"rope_theta": theta}
        case "default" | "linear":
            scaling = {"factor": factor, "rope_type": "linear"}
        case "llama3":
            scaling = {name: rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
            scaling |= {original: rope.integer(original), "rope_type": "llama3"}
        case "yarn":
            scaling = {name: rope.number(name) for name in ("factor", "beta_fast", "beta_slow")}
            stretch = 0.1 * rope.number("mscale") * math.log(max(factor, 1.0)) + 1.0
            scaling |= {original: rope.integer(original), "attention_factor": stretch, "rope_type": "yarn"}
        case _:
            raise _unsupported(settings, f"rope of the type {kind!r}")
    return {"rope_theta": theta, "rope_scaling": scaling}


_ROPE_DEFAULTS: Mapping[str, object] = {
    "theta": 10_000.0,
    "factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "original_max_position_embeddings": 2048,
}
_LLAMA3_DEFAULTS: Mapping[str, object] = {
    "theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _unsupported(settings: Settings, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{settings.path} asks for {what}, which Ostro does not serve for Levanter's type {settings.get('type')!r}."
    )
