"""LoRA adapters in PEFT's layout: a directory with adapter_config.json and adapter_model.safetensors. Decides what can
be served; knows no model. Imports numpy only to read the tensors, and never torch.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [out, rank]
                                          └───── the adapted projection ────────┘            W + scale · B A
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING

from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from ostro.formats.json_file import parse_json_object, read_json_object
from ostro.formats.linear_regex import linear_matcher
from ostro.models.architecture import RowScale
from ostro.models.row_order import RowOrder
from ostro.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from ostro.weights.arrays import Floats, WeightArray

PICKLE = "adapter_model.bin"

# Fields that we apply as PEFT does, that only concern training, or that the tensors imply anyway. Any other field is
# refused unless it is empty or false.
_UNDERSTOOD = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Initialisations that leave the base model's weights unchanged.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_TENSOR = re.compile(r"base_model\.model\.(?P<target>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_VOCABULARY = ("embed_in", "embed_out", "embed_tokens", "lm_head", "wte", "wpe")
_MOST_ALPHA = 1e30
_MERGE = "Merge the adapter into its base model and serve that."


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's update to one projection: scale · B A."""

    a: "Floats"
    """[rank, in]"""
    b: "Floats"
    """[out, rank]"""
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """The projection's shape: [out, in]."""
        return self.b.shape[0], self.a.shape[1]

    def ordered(self, order: RowOrder | None) -> "LowRank":
        """The update with its outputs in our order, where a checkpoint's differs."""
        return self if order is None else replace(self, b=self.b[order.stored(len(self.b))])

    def scaled(self, scales: Sequence[RowScale]) -> "LowRank":
        """The update with its outputs, in our order, multiplied as the matrix is on loading; none multiply nothing."""
        if not scales:
            return self
        factors = [factor for rows, factor in scales for _ in range(rows)]
        return replace(self, b=(self.b.T * factors).T.astype(self.b.dtype))

    def picked(self, outputs: Sequence[int], inputs: Sequence[int]) -> "LowRank":
        """The update of some of the projection's outputs, with all its inputs in another order."""
        return replace(self, a=self.a[:, inputs], b=self.b[outputs])


def read_adapter(directory: str | Path) -> dict[str, LowRank]:
    """The adapter's updates, keyed by the projection's name in the base checkpoint.

    Raises ModelNotFound if files are missing, BadCheckpoint if they are damaged, and UnsupportedModel if the adapter
    contains anything but low-rank updates of projections.
    """
    path = Path(os.path.expanduser(directory))
    if not path.is_dir():
        raise ModelNotFound(f"There is no directory {path}, which should hold an adapter. Check its path.")
    scaling = _Scaling.of(path / ADAPTER_CONFIG, read_json_object(path / ADAPTER_CONFIG))
    if not (path / ADAPTER_WEIGHTS).is_file():
        if (path / PICKLE).is_file():
            raise ModelNotFound(
                f"{path} holds its weights only as pickle ({PICKLE}), which is not read. "
                f"Convert it to {ADAPTER_WEIGHTS}."
            )
        raise ModelNotFound(f"{path} holds no {ADAPTER_WEIGHTS}. Download the adapter's weights into it.")
    halves: dict[str, dict[str, WeightArray]] = {}
    for name, array in _arrays(path / ADAPTER_WEIGHTS):
        target, half = _target(path / ADAPTER_WEIGHTS, name)
        halves.setdefault(target, {})[half] = array
    if not halves:
        raise BadCheckpoint(
            f"{path / ADAPTER_WEIGHTS} holds no tensors: the adapter changes nothing. Download it again."
        )
    return {target: _low_rank(path / ADAPTER_WEIGHTS, target, both, scaling) for target, both in halves.items()}


def read_base(config: bytes) -> str | None:
    """The base model named by the text of an adapter_config.json; None if it names none.

    Raises BadCheckpoint or UnsupportedModel for a config that `read_adapter` would refuse.
    """
    found = parse_json_object(Path(ADAPTER_CONFIG), config)
    _Scaling.of(Path(ADAPTER_CONFIG), found)
    base = found.get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


@dataclass(frozen=True, slots=True)
class _Scaling:
    """The scale of each update. Ranks come from the tensors and must be among those that the config lists."""

    ranks: frozenset[int]
    alpha: float
    alphas: tuple[tuple[Callable[[str], bool], float], ...]
    """Which names an alpha is for, and the alpha; the first that matches counts."""
    by_root: bool

    @classmethod
    def of(cls, path: Path, config: Mapping[str, object]) -> "_Scaling":
        _check(path, config)
        ranks = [config.get("r", 8), *_table(path, config, "rank_pattern").values()]
        alphas = _table(path, config, "alpha_pattern").items()
        return cls(
            ranks=frozenset(_rank(path, rank) for rank in ranks),
            alpha=_number(path, "lora_alpha", config.get("lora_alpha", 8)),
            alphas=tuple((_names(path, each), _number(path, "alpha_pattern", alpha)) for each, alpha in alphas),
            by_root=bool(config.get("use_rslora")),
        )

    def scale(self, target: str, rank: int) -> float:
        alpha = next((alpha for matches, alpha in self.alphas if matches(target)), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _check(path: Path, config: Mapping[str, object]) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{path}: peft_type is {config.get('peft_type')!r}, and Ostro serves LORA. {_MERGE}")
    for name, value in config.items():
        if value and name not in _UNDERSTOOD:
            raise UnsupportedModel(f"{path}: {name} is set, and Ostro cannot serve such an adapter. {_MERGE}")
    if config.get("bias", "none") != "none":
        raise UnsupportedModel(f"{path}: bias is {config['bias']!r}, and Ostro serves adapters without. {_MERGE}")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise UnsupportedModel(
            f"{path}: init_lora_weights {config['init_lora_weights']!r} changes the base's own weights. {_MERGE}"
        )


def _table(path: Path, config: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise BadCheckpoint(f"{path}: {key!r} must be an object, got {value!r}.")
    return value


def _names(path: Path, pattern: str) -> Callable[[str], bool]:
    """Whether the pattern is one of a name: it matches the name's end, starting at a dot."""
    try:
        return linear_matcher(rf"(?:.*\.)?(?:{pattern})")
    except ValueError as error:
        raise BadCheckpoint(
            f"{path}: 'alpha_pattern' holds {shown(pattern)}, which is not a pattern, or one with look-ahead or "
            "references to groups. Write it without."
        ) from error


def _rank(path: Path, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadCheckpoint(f"{path}: 'r' and the ranks in 'rank_pattern' must be integers above 0, got {value!r}.")
    return value


def _number(path: Path, key: str, value: object) -> float:
    # Compared without conversion: a JSON integer may be too large for a float.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _MOST_ALPHA:
        raise BadCheckpoint(f"{path}: {key!r} must hold numbers up to {_MOST_ALPHA}, got {shown(value)}.")
    return float(value)


def _arrays(path: Path) -> Iterator[tuple[str, "WeightArray"]]:
    from ostro.weights.arrays import read_safetensors

    yield from read_safetensors(path)


def _target(path: Path, name: str) -> tuple[str, str]:
    """The projection that a tensor belongs to, and whether it is A or B."""
    match = _TENSOR.fullmatch(name)
    target = match["target"] if match else name
    if "lora_embedding_" in name or target.rpartition(".")[2] in _VOCABULARY:
        raise UnsupportedModel(
            f"{path} changes embeddings or the head ({name!r}); Ostro serves adapters of layers' projections. {_MERGE}"
        )
    if match is None:
        raise UnsupportedModel(f"{path} holds a tensor {name!r}, which is not half of a low-rank product. {_MERGE}")
    return target, match["half"]


def _low_rank(path: Path, target: str, halves: Mapping[str, "WeightArray"], scaling: _Scaling) -> LowRank:
    import numpy as np

    if halves.keys() != {"A", "B"}:
        raise BadCheckpoint(f"{path} holds only lora_{min(halves)} of {target!r}. Download it again.")
    a, b = halves["A"], halves["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.shape[0] not in scaling.ranks:
        raise BadCheckpoint(
            f"{path}: lora_A and lora_B of {target!r} have shapes {a.shape} and {b.shape}, which do not "
            f"join at a rank that {ADAPTER_CONFIG} names. Download both files again."
        )
    for half in (a, b):
        # Better to fail once here than on every request.
        if not half.is_float or not np.isfinite(half.floats()).all():
            raise BadCheckpoint(f"{path}: {target!r} holds something other than finite floating-point numbers.")
    return LowRank(a.floats(), b.floats(), scaling.scale(target, a.shape[0]))
