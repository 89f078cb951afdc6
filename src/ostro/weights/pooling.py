"""How an embedding model turns a text into a vector, according to its sentence-transformers files.

modules.json                        the modules, in order: Transformer, Pooling, Dense …, Normalize
N_Pooling/config.json               how token vectors become one
N_Dense/config.json                 a linear layer after that; model.safetensors beside it has the weights
config_sentence_transformers.json   prompts to put before texts
sentence_bert_config.json           the longest text
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ostro.errors import BadCheckpoint, BadRequest, Unsupported, UnsupportedModel
from ostro.formats.json_file import read_json_list, read_json_object
from ostro.models.config import MOST_HIDDEN, ConfigReader

PoolingMode = Literal["mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"]
_FLAGS: Mapping[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
DenseActivation = Literal["identity", "tanh", "relu", "gelu", "sigmoid"]
_ACTIVATIONS: Mapping[str, DenseActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
# What sentence-transformers calls the prompts of the two sides of a search.
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer that pooled vectors pass through."""

    directory: Path
    """The directory with the weights, `linear.weight` and `linear.bias`."""
    columns: int
    rows: int
    bias: bool
    activation: DenseActivation


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts to put before an input, by name."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    """The name of the prompt for inputs that name none."""

    def named(self, name: str | None) -> str:
        """Raises BadRequest for a name that the model does not have."""
        if name is None:
            return "" if self.default is None else self.texts[self.default]
        if name not in self.texts:
            known = ", ".join(sorted(self.texts)) or "none"
            raise BadRequest(f"This model has no prompt {name!r}; it has: {known}.", param="prompt_name")
        return self.texts[name]

    @property
    def query(self) -> str | None:
        """The name of the prompt for queries (`document`: for documents); None means the default."""
        return self._first(_QUERY)

    @property
    def document(self) -> str | None:
        return self._first(_DOCUMENT)

    def _first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self.texts), None)


@dataclass(frozen=True, slots=True)
class Matryoshka:
    """Lengths to which vectors may be shortened: the model was trained to put the most important numbers first."""

    choices: tuple[int, ...] = ()
    """The allowed lengths; empty if all are."""

    def includes(self, dimensions: int, whole: int) -> bool:
        return 0 < dimensions < whole and (not self.choices or dimensions in self.choices)


@dataclass(frozen=True, slots=True)
class Pooling:
    mode: PoolingMode
    normalize: bool
    """Whether the pooled vector is scaled to length one."""
    keeps_start: bool = False
    """Whether truncation drops a long text's end, as in encoders, instead of its beginning."""
    dense: tuple[Dense, ...] = ()
    prompts: Prompts = Prompts()
    dimensions: Matryoshka | None = None

    def shortened(self, vector: list[float], dimensions: int | None) -> list[float]:
        """The vector's first `dimensions`, scaled to length one again if the model's vectors are. None means all.
        Raises Unsupported for a model, or a number, that was not trained for that.
        """
        if dimensions in (None, len(vector)):
            return vector
        if self.dimensions is None:
            raise Unsupported(
                f"This model has vectors of {len(vector)} dimensions and no shorter ones.", param="dimensions"
            )
        if not self.dimensions.includes(dimensions or 0, len(vector)):
            known = ", ".join(map(str, self.dimensions.choices)) or f"from 1 to {len(vector)}"
            raise Unsupported(f"This model has vectors of {known} dimensions, not of {dimensions}.", param="dimensions")
        first = vector[:dimensions]
        return unit(first) if self.normalize else first


def unit(vector: Sequence[float]) -> list[float]:
    """Scaled to length one."""
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]


def read_pooling(directory: Path) -> Pooling | None:
    """The settings in modules.json and the modules' configs; None if this is no embedding model."""
    modules_file, modules = directory / "modules.json", modules_of(directory)
    kinds = [kind for kind, _ in modules]
    if "LogitScore" in kinds:
        # A ranking model: see `relevance`.
        return None
    unknown = set(kinds) - set(_MODULES)
    if unknown:
        raise UnsupportedModel(f"{directory} has a {min(unknown)} module, which Ostro does not support.")
    if "Pooling" not in kinds:
        return None
    if kinds != sorted(kinds, key=_MODULES.index) or any(kinds.count(kind) > 1 for kind in kinds if kind != "Dense"):
        raise UnsupportedModel(
            f"{modules_file} lists {', '.join(kinds)}; Ostro runs one of each, and any number of Dense, in the order "
            f"{', '.join(_MODULES)}."
        )
    folders = dict(modules)
    prompts = read_prompts(directory)
    return Pooling(
        _mode(module_config(directory, folders["Pooling"]), prompts),
        normalize="Normalize" in kinds,
        dense=tuple(_dense(directory, path) for kind, path in modules if kind == "Dense"),
        prompts=prompts,
    )


def modules_of(directory: Path) -> list[tuple[str, str]]:
    """Each module's kind and the folder with its config, in order; none without a modules.json."""
    path = directory / "modules.json"
    modules: list[tuple[str, str]] = []
    for module in read_json_list(path) if path.is_file() else ():
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise BadCheckpoint(f"{path} lists a module without a type. Download it again.")
        modules.append((module["type"].rpartition(".")[2], str(module.get("path", ""))))
    return modules


def read_matryoshka(config: ConfigReader) -> Matryoshka | None:
    """From config.json: `matryoshka_dimensions` or `is_matryoshka`; None if it has neither."""
    listed = config.get("matryoshka_dimensions")
    if listed is None:
        return Matryoshka() if config.flag("is_matryoshka", False) else None
    choices = config.numbers("matryoshka_dimensions")
    if any(number != int(number) or number < 1 for number in choices):
        raise config.bad("matryoshka_dimensions", listed, "a list of lengths")
    return Matryoshka(tuple(map(int, choices)))


def max_text_length(directory: Path) -> int | None:
    """The longest text, in tokens, that sentence-transformers would not truncate; None if the files do not say."""
    path = directory / "sentence_bert_config.json"
    if not path.is_file():
        return None
    return ConfigReader(read_json_object(path), path.name).optional_integer("max_seq_length")


def module_config(directory: Path, folder: str) -> ConfigReader:
    config_file = directory / folder / "config.json"
    if not config_file.resolve().is_relative_to(directory.resolve()):
        raise BadCheckpoint(f"{directory / 'modules.json'} points outside its directory, to {folder!r}.")
    return ConfigReader(read_json_object(config_file), str(config_file))


def _mode(config: ConfigReader, prompts: Prompts) -> PoolingMode:
    if any(prompts.texts.values()) and not config.flag("include_prompt", True):
        raise UnsupportedModel(f"{config.source}: 'include_prompt' is false; Ostro pools over the prompt too.")
    named = config.get("pooling_mode")
    modes = [str(each) for each in (named if isinstance(named, list) else [named])]
    if named is None:
        modes = [mode for flag, mode in _FLAGS.items() if config.flag(flag, False)]
    for mode in get_args(PoolingMode):
        if modes == [mode]:
            found: PoolingMode = mode
            return found
    raise UnsupportedModel(
        f"{config.source} pools by {' and '.join(modes) or 'nothing'}; Ostro pools by "
        f"{', '.join(get_args(PoolingMode))}, but not by several at once."
    )


def _dense(directory: Path, folder: str) -> Dense:
    config = module_config(directory, folder)
    if config.flag("use_residual", False):
        raise UnsupportedModel(f"{config.source}: 'use_residual' is true, which Ostro does not know.")
    if (key := config.text("module_input_name", "sentence_embedding")) != "sentence_embedding":
        raise UnsupportedModel(f"{config.source}: 'module_input_name' is {key!r}; Ostro knows sentence_embedding.")
    name = config.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{config.source}: 'activation_function' {name!r} is not known; known are {', '.join(_ACTIVATIONS)}."
        )
    return Dense(
        directory / folder,
        columns=config.integer("in_features", most=MOST_HIDDEN),
        rows=config.integer("out_features", most=MOST_HIDDEN),
        bias=config.flag("bias", True),
        activation=_ACTIVATIONS[name],
    )


def read_prompts(directory: Path) -> Prompts:
    path = directory / "config_sentence_transformers.json"
    if not path.is_file():
        return Prompts()
    config = ConfigReader(read_json_object(path), str(path))
    texts = dict(config.table("prompts") or {})
    default = None if config.get("default_prompt_name") is None else config.text("default_prompt_name")
    if bad := next((name for name, text in texts.items() if not isinstance(text, str)), None):
        raise BadCheckpoint(f"{path}: the prompt {bad!r} is not a text. Download it again.")
    if default is not None and default not in texts:
        raise BadCheckpoint(f"{path}: 'default_prompt_name' is {default!r}, and there is no such prompt.")
    return Prompts({name: str(text) for name, text in texts.items()}, default)
