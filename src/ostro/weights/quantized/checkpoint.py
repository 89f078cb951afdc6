"""A quantised Hub checkpoint as a Checkpoint of ordinary weights: decodes what the plain one reads from the files."""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ostro.errors import ModelError, UnsupportedModel
from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from ostro.sources.files import PICKLE_SUFFIXES
from ostro.weights.arrays import Weight, tensor_of
from ostro.weights.hf_checkpoint import HfCheckpoint
from ostro.weights.pooling import Pooling
from ostro.weights.quantized import read_scheme
from ostro.weights.quantized.scheme import PLAIN, Scheme
from ostro.weights.read_ahead import run_ahead
from ostro.weights.slices import SlicedWeight, sliced
from ostro.weights.stored import Stored, TensorHeader

if TYPE_CHECKING:
    import torch

_ONE_EXPERT = re.compile(r"(?P<module>.+\.experts)\.\d+\.")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    plain: HfCheckpoint
    """The same files, read as plain tensors: the parts of quantised weights."""
    scheme: Scheme

    @property
    def path(self) -> Path:
        return self.plain.path

    @property
    def name(self) -> str:
        return self.plain.name

    @property
    def config(self) -> Mapping[str, object]:
        return self.plain.config

    @property
    def generation_config(self) -> Mapping[str, object]:
        return self.plain.generation_config

    @property
    def pooling(self) -> Pooling | None:
        return self.plain.pooling

    @property
    def tokenizer_path(self) -> Path:
        return self.plain.tokenizer_path

    @property
    def files(self) -> list[Path]:
        return self.plain.files

    def stored(self) -> Stored:
        stored = self.plain.stored()
        shapes = _shapes(self.config, stored.tensors)
        tensors = [_with_shape(header, shapes) for header in self.scheme.headers(stored.tensors)]
        return replace(stored, tensors=tensors, quantization=self.scheme.label)

    def arrays(self) -> Iterator[tuple[str, Weight]]:
        headers = self.plain.stored().tensors
        _shapes(self.config, headers)
        names = [header.name for header in headers]
        return self.scheme.weights(names, self.plain.arrays())

    def slices(self) -> Iterator[tuple[str, SlicedWeight]]:
        return sliced(self.arrays())

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        _log.info("decoding the weights, which are quantised: %s", self.scheme.label)
        return run_ahead(partial(_named_tensor, name, weight) for name, weight in self.arrays())


def decoding(plain: HfCheckpoint, quantization: object) -> QuantizedCheckpoint:
    """The checkpoint with its weights decoded, as its `quantization_config` says."""
    try:
        scheme = read_scheme(quantization)
    except ModelError as error:
        raise type(error)(f"{plain.path}: {error.message}") from error
    if plain.encoder is not None:
        raise UnsupportedModel(f"{plain.path} is a quantised encoder. Fetch the unquantised model.")
    if any(path.suffix in PICKLE_SUFFIXES for path in plain.files):
        raise UnsupportedModel(f"{plain.path} holds quantised weights in pickles. Convert them to safetensors.")
    return QuantizedCheckpoint(plain, scheme)


def _named_tensor(name: str, weight: Weight) -> tuple[str, "torch.Tensor"]:
    return name, tensor_of(weight)


def _shapes(config: Mapping[str, object], headers: Iterable[TensorHeader]) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors. Refuses models whose matrices are not [out, in], as decoded ones are, and
    experts that are not stored as the architecture's are.
    """
    described = describe(config)
    tensors = list(described.tensors()) if isinstance(described, Architecture) else []
    # Stacks of experts' matrices are decoded as the Hub's unquantised checkpoints have them.
    if any(tensor.transposed and not tensor.stacked for tensor in tensors):
        raise UnsupportedModel(
            "The model is quantised, and of an architecture that stores matrices as [in, out], for which Ostro does "
            "not read quantised checkpoints. Use the original model in safetensors, or a GGUF of it."
        )
    _check_experts({tensor.name for tensor in tensors if tensor.stacked}, headers)
    return {tensor.name: tensor.shape for tensor in tensors}


def _check_experts(stacks: Collection[str], headers: Iterable[TensorHeader]) -> None:
    """Raises UnsupportedModel where the model has stacks of experts' matrices, and the files hold them one by one, or
    quantised under the stack's own name. MXFP4's stacks have other names.
    """
    modules = {name.rpartition(".")[0] for name in stacks}
    for header in headers:
        one = _ONE_EXPERT.match(header.name)
        if (header.name in stacks and header.format not in PLAIN) or (one is not None and one["module"] in modules):
            raise UnsupportedModel(
                f"Tensor {header.name!r}: the model's experts are quantised in a way that Ostro does not read for its "
                "architecture. Use the original model in safetensors, or one whose experts are not quantised."
            )


def _with_shape(header: TensorHeader, shapes: Mapping[str, tuple[int, ...]]) -> TensorHeader:
    """Not every format's headers give a weight's shape, but all give its size."""
    described = shapes.get(header.name, header.shape)
    return replace(header, shape=described) if prod(described) == header.values else header
