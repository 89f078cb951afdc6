"""Translates a GGUF file's metadata and tensor names into Hugging Face's. Imports no torch and reads no weights.

Each family (`models.families`) describes how GGUF renames and transforms its tensors; this module reverses that.
"""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.formats.gguf_header import GGML_TYPES, GgufHeader, GgufTensorInfo, MetadataValue, damaged
from ostro.models.config import MOST_EXPERTS, MOST_EXPERTS_OF_ALL_LAYERS
from ostro.models.families.gguf_names import Config, GgufNames, kv_heads, num_layers
from ostro.models.family import Family
from ostro.models.registry import FAMILIES
from ostro.weights.pooling import Pooling, PoolingMode

_BY_ARCHITECTURE = {
    architecture: (family, family.gguf)
    for family in FAMILIES
    if family.gguf
    for architecture in family.gguf.architectures
}

_FLOAT32_MAX = 3.4e38
# Per-layer lists are allocated before the model is built, so bound their length.
_MOST_BLOCKS = 4096
# A header of few bytes can claim many matrices, each of which becomes an object.
_MOST_WEIGHTS = 8 * MOST_EXPERTS_OF_ALL_LAYERS


class Undo(Enum):
    """The operation that restores the original tensor from the stored one."""

    NOTHING = "nothing"
    ROTATE_HALVES = "rotate_halves"
    """The rows of each head are stored as 0, h/2, 1, h/2+1, …; restores 0, 1, … h/2, …"""
    SUBTRACT_ONE = "subtract_one"
    NEGATED_EXP = "negated_exp"
    """Stored as -exp(x); restores x."""
    TRANSPOSE = "transpose"
    BY_HEAD = "by_head"
    """Stored as all queries, then all keys, then all values; groups them by head."""


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """One weight under its canonical name, and how to read it from the file."""

    name: str
    path: Path
    info: GgufTensorInfo
    undo: Undo
    heads: int = 1
    """Number of heads among the rows, for ROTATE_HALVES and BY_HEAD."""


class _Facts:
    """Typed access to the metadata of one model."""

    def __init__(self, headers: tuple[GgufHeader, ...]) -> None:
        self.path = headers[0].path
        self.metadata = headers[0].metadata
        self.arch = self._architecture()
        self._tensors = {info.name: (header.path, info) for header in headers for info in header.tensors}

    def get(self, key: str, default: str) -> object:
        return self.metadata.get(f"{self.arch}.{key}", default)

    def damaged(self, reason: str) -> BadCheckpoint:
        return damaged(self.path, reason)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._own(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._bad(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._own(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._bad(key, value, "a finite number")
        # Metadata are 32-bit floats; the shortest decimal is what the author wrote (1e-05, not 9.99999974e-06).
        return _shortest_float32(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self._own(key, None) is not None else None

    def token_id(self, kind: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return value if isinstance(value, int) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def flags(self, key: str) -> list[bool] | None:
        value = self.metadata.get(f"{self.arch}.{key}")
        return [bool(each) for each in value] if isinstance(value, list) else None

    def integers(self, key: str) -> list[int] | None:
        value = self.metadata.get(f"{self.arch}.{key}")
        if not isinstance(value, list):
            return None
        if any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in value):
            raise self._bad(key, value, "whole numbers")
        return [each for each in value if isinstance(each, int)]

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise damaged(self.path, f"it holds no tensor {name!r}")
        return self._tensors[name][1].shape

    def factors(self, name: str) -> list[float] | None:
        """A small float32 tensor that belongs in the config rather than among the weights."""
        if name not in self._tensors:
            return None
        path, info = self._tensors[name]
        if GGML_TYPES[info.ggml_type].name != "F32" or len(info.shape) != 1:
            raise damaged(path, f"tensor {name!r} is not a list of 32-bit floats")
        with path.open("rb") as file:
            file.seek(info.offset)
            return [_shortest_float32(value) for value in struct.unpack(f"<{info.shape[0]}f", file.read(info.nbytes))]

    def _architecture(self) -> str:
        key = "general.architecture"
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise self._bad(key, value, "a text")
        return value

    def _own(self, key: str, default: float | None) -> MetadataValue | None:
        """The architecture's own key. A per-layer list counts as a single value if all its entries are equal."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise UnsupportedModel(f"{self.path} varies {key} from layer to layer, which Ostro does not support.")
            return value[0]
        return value

    def _bad(self, key: str, value: object, wanted: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.path} should give {wanted} as {key} but gives {value!r}. Download or convert it again."
        )


def _shortest_float32(value: float) -> float:
    """The shortest decimal that rounds to this 32-bit float; other numbers are returned unchanged."""
    if abs(value) > _FLOAT32_MAX:
        return value
    for digits in range(6, 10):
        shorter = float(f"{value:.{digits}g}")
        if struct.pack("<f", shorter) == struct.pack("<f", value):
            return shorter
    return value


@dataclass(frozen=True, slots=True)
class GgufModel:
    config: Config
    generation_config: Config
    pooling: Pooling | None
    weights: tuple[GgufWeight, ...]


def describe(headers: tuple[GgufHeader, ...]) -> GgufModel:
    """Describes the model in these files; the first contains its metadata."""
    facts = _Facts(headers)
    if facts.arch not in _BY_ARCHITECTURE:
        raise UnsupportedModel(
            f"{facts.path} holds a {facts.arch!r} model; the GGUF architectures Ostro knows are "
            f"{', '.join(sorted(_BY_ARCHITECTURE))}."
        )
    family, names = _BY_ARCHITECTURE[facts.arch]
    if (blocks := facts.integer("block_count", 0)) > _MOST_BLOCKS:
        raise damaged(facts.path, f"it claims {blocks} blocks, but the limit is {_MOST_BLOCKS}")
    if not names.recurrent and 0 in (facts.integers("attention.head_count_kv") or ()):
        raise UnsupportedModel(
            f"{facts.path} has layers without attention, which Ostro does not support for {facts.arch}."
        )
    if facts.integer("expert_count", 0) and not names.has_experts:
        raise UnsupportedModel(f"{facts.path} is a mixture of experts, which Ostro does not support for {facts.arch}.")
    return GgufModel(
        _config(family, names, facts), _generation_config(facts), _pooling(facts), _weights(names, facts, headers)
    )


def _config(family: Family, names: GgufNames, facts: _Facts) -> Config:
    common: Config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": facts.shape("token_embd.weight")[0],
        "tie_word_embeddings": not facts.has_tensor("output.weight"),
        "bos_token_id": facts.token_id("bos"),
        "eos_token_id": facts.token_id("eos"),
        "pad_token_id": facts.token_id("padding"),
    }
    return common | names.config(facts)


def _generation_config(facts: _Facts) -> Config:
    config: Config = {}
    if (bos := facts.token_id("bos")) is not None:
        config["bos_token_id"] = bos
    if ends := _end_ids(facts):
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for ours, theirs in _SAMPLING.items():
        value = facts.metadata.get(f"general.sampling.{theirs}")
        if value is not None:
            config[ours] = _shortest_float32(value) if isinstance(value, float) else value
    return config


# generation_config.json's name -> GGUF's, after `general.sampling.`.
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def _pooling(facts: _Facts) -> Pooling | None:
    modes: dict[int, PoolingMode] = {1: "mean", 2: "cls", 3: "lasttoken"}
    kind = facts.integer("pooling_type", 0)
    if kind == 0:
        return None
    if kind not in modes:
        raise UnsupportedModel(f"{facts.path} pools in a way (type {kind}) that Ostro does not support.")
    return Pooling(modes[kind], normalize=True)


# Tokens that end a turn. Metadata seldom lists them, and a chat model that does not stop at its own is useless.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|return|>", "<|call|>")
# If the first ends a turn, the second ends only a message within it.
_RETURN, _MESSAGE_END = "<|return|>", "<|end|>"


def _end_ids(facts: _Facts) -> list[int]:
    ids = [facts.token_id(kind) for kind in ("eos", "eot", "eom")]
    template = facts.metadata.get("tokenizer.chat_template")
    tokens = facts.metadata.get("tokenizer.ggml.tokens")
    if isinstance(template, str) and isinstance(tokens, list):
        written = [text for text in _TURN_ENDS if text in template and text in tokens]
        ids += [tokens.index(text) for text in written if text != _MESSAGE_END or _RETURN not in written]
    return list(dict.fromkeys(each for each in ids if each is not None))


_BLOCK_NAME = re.compile(r"blk\.(\d{1,9})\.([\w.]+?)(\.weight|\.bias)?")
_ROOT_NAME = re.compile(r"(\w+)\.(weight|bias)")
_GATES_AND_UPS = "ffn_gate_up_exps"
_FUSED_PARTS = {"ffn_gate_exps": 0, "ffn_up_exps": 1}
# These belong in the config (see _rope) or can be computed.
_NOT_WEIGHTS = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short|blk\.\d+\.attn_rot_embd)\.weight")


def _weights(names: GgufNames, facts: _Facts, headers: tuple[GgufHeader, ...]) -> tuple[GgufWeight, ...]:
    found: list[GgufWeight] = []
    guessing = range(num_layers(facts), facts.integer("block_count"))
    for header in headers:
        for info in header.tensors:
            if not _NOT_WEIGHTS.fullmatch(info.name) and _block(info.name) not in guessing:
                found += _unfused(names, facts, header.path, info)
            if len(found) > _MOST_WEIGHTS:
                raise damaged(header.path, "it claims more experts than any model has")
    return tuple(found)


def _block(name: str) -> int | None:
    """The number of a tensor's block."""
    match = _BLOCK_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def _unfused(names: GgufNames, facts: _Facts, path: Path, info: GgufTensorInfo) -> Iterator[GgufWeight]:
    """A tensor's weights. A converter may store each expert's gate and up as one matrix, the gate's rows first."""
    short = "" if (match := _BLOCK_NAME.fullmatch(info.name)) is None else match[2]
    if short != _GATES_AND_UPS or short in names.blocks or not names.blocks.keys() >= _FUSED_PARTS.keys():
        yield from _unstacked(_weight(names, facts, path, info))
        return
    for part, at in _FUSED_PARTS.items():
        named = replace(info, name=info.name.replace(short, part))
        for weight in _unstacked(_weight(names, facts, path, named)):
            yield replace(weight, info=_half(path, replace(weight.info, name=info.name), at))


def _half(path: Path, info: GgufTensorInfo, at: int) -> GgufTensorInfo:
    """The first half of a matrix's rows, or the second."""
    rows, *rest = info.shape
    if rows % 2:
        raise damaged(path, f"tensor {info.name!r} has {rows} rows for each expert, which gate and up cannot share")
    each = info.nbytes // 2
    return replace(info, shape=(rows // 2, *rest), offset=info.offset + at * each, nbytes=each)


def _unstacked(weight: GgufWeight) -> Iterator[GgufWeight]:
    """The matrices, or biases, of a tensor that stacks those of all experts; any other tensor as it is."""
    if "{}" not in weight.name:
        yield weight
        return
    info = weight.info
    if len(info.shape) != (2 if weight.name.endswith(".bias") else 3) or info.shape[0] > MOST_EXPERTS:
        raise damaged(weight.path, f"tensor {info.name!r} has shape {info.shape}, which is no stack for all experts")
    each = info.nbytes // max(info.shape[0], 1)
    for expert in range(info.shape[0]):
        part = replace(info, shape=info.shape[1:], offset=info.offset + expert * each, nbytes=each)
        yield replace(weight, name=weight.name.format(expert), info=part)


def _weight(names: GgufNames, facts: _Facts, path: Path, info: GgufTensorInfo) -> GgufWeight:
    short, name = _canonical_name(names, info.name)
    if name is None:
        raise UnsupportedModel(f"{path} holds a tensor {info.name!r}, which Ostro does not know for {facts.arch}.")
    is_bias = info.name.endswith(".bias")
    if short in names.reshape and not is_bias:
        info = replace(info, shape=names.reshape[short](info.shape))
    if short in names.rotate_halves:
        return GgufWeight(name, path, info, Undo.ROTATE_HALVES, _heads(facts, path, info, short, each=2))
    if short in names.by_head:
        return GgufWeight(name, path, info, Undo.BY_HEAD, _heads(facts, path, info, short, each=3))
    undone = {
        Undo.SUBTRACT_ONE: names.subtract_one,
        Undo.NEGATED_EXP: names.negated_exp,
        Undo.TRANSPOSE: names.transpose,
    }
    for undo, shorts in undone.items():
        if short in shorts and not is_bias:
            return GgufWeight(name, path, info, undo)
    return GgufWeight(name, path, info, Undo.NOTHING)


def _heads(facts: _Facts, path: Path, info: GgufTensorInfo, short: str, *, each: int) -> int:
    """The number of heads in a tensor whose rows per head must be a multiple of `each`."""
    heads = kv_heads(facts) if short == "attn_k" else facts.integer("attention.head_count")
    if heads == 0 or info.shape[0] % (each * heads):
        raise damaged(path, f"tensor {info.name!r} has {info.shape[0]} rows, which {heads} heads cannot share")
    return heads


def _canonical_name(names: GgufNames, name: str) -> tuple[str, str | None]:
    """GGUF's short name and our full one; None if the family has no such tensor."""
    if match := _BLOCK_NAME.fullmatch(name):
        layer, short, ending = match[1], match[2], match[3] or ""
        ours = names.whole.get(f"{short}{ending}")
        if ours is None and ending and short in names.blocks:
            ours = f"{names.blocks[short]}{ending}"
        return short, f"{names.block_prefix}.{layer}.{ours}" if ours else None
    if match := _ROOT_NAME.fullmatch(name):
        short, kind = match.groups()
        ours = names.roots.get(short)
        return short, f"{ours}.{kind}" if ours else None
    return "", None
