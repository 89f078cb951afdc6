"""What is particular to an encoder's files: old and unused tensors, and the settings of sentence-transformers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ostro.errors import ModelNotFound, UnsupportedModel
from ostro.models.encoder import Encoder
from ostro.sources.files import SINGLE
from ostro.weights.pooling import Dense, Pooling, max_text_length, read_pooling
from ostro.weights.tensor_files import read_safetensors, safetensors_names

if TYPE_CHECKING:
    import torch

    from ostro.weights.arrays import WeightArray

# Unused: heads for training or in models that embed, and a table of consecutive numbers.
_UNUSED = ("cls.", "pooler.", "lm_head.", "head.", "decoder.", "classifier.", "embeddings.position_ids")
# TensorFlow's names of a norm's weight and bias.
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}
# Decoders pool a prompt in chunks, so that their vectors are sums over rows.
_SUMS = ("mean", "cls", "lasttoken")


def encoder_config(directory: Path, config: dict[str, object]) -> dict[str, object]:
    """The config with the longest text that sentence-transformers would not truncate, as the default context."""
    longest = max_text_length(directory)
    return config if longest is None else {**config, "max_seq_length": longest}


def encoder_pooling(directory: Path, described: Encoder) -> Pooling | None:
    """None for a classifier. Without any settings, sentence-transformers takes the mean."""
    if described.head is not None:
        return None
    pooling = read_pooling(directory) or Pooling("mean", normalize=False)
    width = described.shape.hidden_size
    for dense in pooling.dense:
        if dense.columns != width:
            raise UnsupportedModel(
                f"{dense.directory / 'config.json'}: 'in_features' is {dense.columns}, but its vectors have {width}."
            )
        width = dense.rows
    return replace(pooling, keeps_start=True)


def decoder_pooling(directory: Path) -> Pooling | None:
    pooling = read_pooling(directory)
    if pooling is not None and pooling.mode not in _SUMS:
        raise UnsupportedModel(f"{directory} pools by {pooling.mode}; for a decoder Ostro pools by {', '.join(_SUMS)}.")
    if pooling is not None and pooling.dense:
        raise UnsupportedModel(f"{directory} is a decoder with a Dense module, which Ostro only runs for encoders.")
    return pooling


def encoder_renamer(described: Encoder) -> Callable[[str], str | None]:
    """Maps stored names to canonical names, or to None for tensors that the model does not use."""
    wanted = {tensor.name for tensor in described.tensors()}
    backbone = f"{described.backbone}."

    def rename(name: str) -> str | None:
        stem, _, last = name.removeprefix("_orig_mod.").rpartition(".")
        name = f"{stem}.{_OLD_NAMES.get(last, last)}" if stem else last
        full = name if name in wanted or name.startswith(backbone) else backbone + name
        unused = full not in wanted and full.removeprefix(backbone).startswith(_UNUSED)
        return None if unused else full

    return rename


def dense_tensors(dense: Dense) -> Iterator[tuple[str, "torch.Tensor"]]:
    """The weights of a module that follows an embedding model's pooling."""
    path = _dense_file(dense)
    return read_safetensors(path, safetensors_names(path))


def dense_arrays(dense: Dense) -> Iterator[tuple[str, "WeightArray"]]:
    """The same, without torch."""
    from ostro.weights import arrays

    path = _dense_file(dense)
    return arrays.read_safetensors(path, safetensors_names(path))


def _dense_file(dense: Dense) -> Path:
    path = dense.directory / SINGLE
    if not path.is_file():
        raise ModelNotFound(f"There is no {path}, which has the weights of a Dense module. Download it, or convert it.")
    return path
