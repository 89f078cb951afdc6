"""A checkpoint written by Levanter during training, as a Checkpoint. Finds and validates it.

RUN/step-1000/metadata.json     {"step": 1000, …}, written last: the checkpoint is complete
RUN/step-1000/model/…           the weights, or a database with everything: see ostro.weights.levanter_arrays

It includes neither the model's settings nor a tokenizer: both must be given separately.
"""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostro.errors import BadCheckpoint, BadRequest, ModelNotFound, OstroError
from ostro.formats.json_file import read_json_object
from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from ostro.weights.levanter_arrays import DATABASE, MODEL, LevanterArrays
from ostro.weights.levanter_config import read_levanter_model
from ostro.weights.levanter_layout import EMBEDDING, StoredWeight, find_layers, stored_weights
from ostro.weights.pooling import Pooling
from ostro.weights.stored import Stored, TensorHeader

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from ostro.weights.arrays import WeightArray
    from ostro.weights.slices import SlicedWeight

METADATA = "metadata.json"
_STEP = re.compile(r"step-\d+")
_WEIGHT = re.compile(r".+/(weight|bias)")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LevanterCheckpoint:
    path: Path
    name: str
    config: dict[str, object]
    weights: tuple[StoredWeight, ...]

    @property
    def generation_config(self) -> dict[str, object]:
        return {}

    @property
    def pooling(self) -> Pooling | None:
        return None

    @property
    def tokenizer_path(self) -> Path:
        if not any((self.path / name).is_file() for name in _TOKENIZERS):
            raise ModelNotFound(
                f"{self.path} has no tokenizer: Levanter stores none. Give --tokenizer ORG/NAME, or its directory: the "
                "one that the model was trained with.",
                param="tokenizer",
            )
        return self.path

    @property
    def files(self) -> list[Path]:
        return sorted(each for each in self.path.rglob("*") if each.is_file())

    def stored(self) -> Stored:
        # Each array's header has its format, but Levanter writes floats, mostly float32.
        tensors = [TensorHeader(name, weight.hub_shape, "F32") for weight in self.weights for name in weight.names]
        # A stacked array is read one row of chunks at a time: all layers in the worst case.
        stacks = [prod(each.hub_shape) * len(each.names) * 4 for each in self.weights]
        return Stored(tensors=tensors, file_bytes=sum(stacks), largest_file=max(stacks))

    def arrays(self) -> Iterator[tuple[str, "WeightArray"]]:
        from ostro.weights.arrays import WeightArray

        return ((name, WeightArray.of(values)) for name, values in self._values())

    def slices(self) -> Iterator[tuple[str, "SlicedWeight"]]:
        """A chunk of stacked layers is read once, and kept until all of its layers have been passed."""
        from ostro.weights.levanter_slices import LevanterSlices

        arrays = LevanterArrays(self.path)
        for weight in self.weights:
            assert not weight.experts, "JAX runs no mixtures of experts"
            array = arrays.open(weight.path)
            kept = array.decoded_bytes(array.rows_per_chunk if weight.stacked else array.shape[0])
            # A little more, for the cache's own overhead.
            array = arrays.open(weight.path, cache_bytes=kept + kept // 16)
            for layer, name in enumerate(weight.names):
                yield name, LevanterSlices(array, layer if weight.stacked else None, weight.hub_shape)

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        import torch

        for name, values in self._values():
            tensor = torch.from_numpy(values)
            yield name, tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor

    def _values(self) -> Iterator[tuple[str, "npt.NDArray[Any]"]]:
        """Weights under the Hub's names, in their stored format. Stacked layers are read a few at a time."""
        arrays = LevanterArrays(self.path)
        for weight in self.weights:
            array = arrays.open(weight.path)
            parts = array.read_rows() if weight.stacked else iter([array.read()])
            if weight.experts:
                parts = (matrix.T for layer in parts for matrix in layer)
            for name, part in zip(weight.names, parts, strict=True):
                if part.size > prod(weight.hub_shape):
                    # Levanter pads the vocabulary to a multiple that its devices can shard.
                    part = part[: weight.hub_shape[0]]
                yield name, part.reshape(weight.hub_shape)


def is_levanter(path: Path) -> bool:
    """Whether a directory looks like a Levanter checkpoint, complete or not, or a run that contains some."""
    if not path.is_dir() or (path / "config.json").is_file():
        return False
    return _has_arrays(path) or any(_has_arrays(child) for child in _children(path) if _STEP.fullmatch(child.name))


def open_levanter(path: Path, model_config: Path | None, *, name: str | None = None) -> LevanterCheckpoint:
    """Opens a checkpoint, or the newest complete one of a run, and checks it against the settings.

    `name` identifies the run if the path does not, as in a cache. Reads no weights.
    """
    path = Path(os.path.expanduser(path))
    step, directory = _newest(path)
    if model_config is None:
        raise BadRequest(
            f"{directory} is a Levanter checkpoint, which does not hold the model's settings. Give --model-config "
            "the YAML that it was trained with.",
            param="model_config",
        )
    model = read_levanter_model(Path(os.path.expanduser(model_config)))
    arrays = LevanterArrays(directory)
    layers = find_layers(arrays.paths)
    if layers is None:
        raise BadCheckpoint(f"{directory} has no layers of a language model under {MODEL}/transformer/layers.")
    embedding = arrays.open(EMBEDDING)
    keys = arrays.open(layers.first("self_attn.k_proj.weight")).shape if model.names.like_llama else ()
    # All shapes are checked below.
    vocab, head_dim = (*embedding.shape, 0)[0], (0, 0, *keys)[-2]
    config = model.config(stored_vocab=vocab, stored_head_dim=head_dim, dtype=embedding.dtype)
    described = describe(config)
    assert isinstance(described, Architecture), "Levanter trains decoders only"
    weights = tuple(stored_weights(described, layers, vocab))
    _check(directory, arrays, weights)
    return LevanterCheckpoint(directory, _name(name or os.path.abspath(path), step), config, weights)


# --- finding --------------------------------------------------------------------------------------------------------


def _newest(path: Path) -> tuple[int, Path]:
    """The highest complete step, among the directory itself and its subdirectories."""
    if not path.is_dir():
        raise ModelNotFound(f"There is no directory {path}.")
    found: list[tuple[int, Path]] = []
    incomplete: list[str] = []
    for directory in (path, *_children(path)):
        if not _has_arrays(directory) and not (directory / METADATA).is_file():
            continue
        try:
            found.append((_step(directory), directory))
        except OstroError as error:
            incomplete.append(error.message)
    if found:
        for message in incomplete:
            _log.warning("skipped: %s", message)
        return max(found)
    if incomplete:
        raise BadCheckpoint(incomplete[-1])
    raise ModelNotFound(f"{path} holds no Levanter checkpoint. Give the path of a run, or of its step-N.")


def _step(directory: Path) -> int:
    if not (directory / METADATA).is_file():
        raise BadCheckpoint(
            f"{directory} is incomplete: it has no {METADATA}, which Levanter writes last. Wait until it is written, "
            "or give another step."
        )
    step = read_json_object(directory / METADATA).get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise BadCheckpoint(f"{directory / METADATA} does not state the step. Copy the checkpoint again.")
    if not _has_arrays(directory):
        raise BadCheckpoint(f"{directory} has neither {MODEL}/transformer nor {DATABASE}. Copy the checkpoint again.")
    return step


def _has_arrays(directory: Path) -> bool:
    return (directory / DATABASE).is_file() or (directory / MODEL / "transformer").is_dir()


def _children(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir())


def _name(place: str, step: int) -> str:
    """The run's name and the step; the name is the last path component other than step-N or checkpoints."""
    parts = [part for part in place.split("/") if part and not _STEP.fullmatch(part) and part != "checkpoints"]
    return f"{parts[-1]}-step-{step}" if parts else f"step-{step}"


# --- checking -------------------------------------------------------------------------------------------------------


def _check(directory: Path, arrays: LevanterArrays, weights: tuple[StoredWeight, ...]) -> None:
    for weight in weights:
        stored, asked = arrays.open(weight.path).shape, weight.shape
        if stored == asked and prod(asked) < len(weight.names) * prod(weight.hub_shape):
            asked = weight.hub_shape
        if stored != asked:
            raise BadCheckpoint(
                f"The array {weight.path!r} has shape {stored}, but the model's settings ask for {asked}. "
                "They may be of another model."
            )
    others = {path for path in arrays.paths if _WEIGHT.fullmatch(path)} - {weight.path for weight in weights}
    if others:
        raise BadCheckpoint(
            f"{directory} has an array {min(others)!r} that the model's settings have no place for. They may be of "
            "another model."
        )
