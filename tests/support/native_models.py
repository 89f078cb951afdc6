"""Models of the native core: a torch model's weights packed as a checkpoint's would be, and runners on them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tiny_models import random_model

from ostro.backends.native.lora import NativeAdapters
from ostro.backends.native.packing import pack
from ostro.backends.native.runner import NativeRunner
from ostro.backends.native.support import native_architecture
from ostro.kernels.cpu.library import Cells, instruction_sets, is_built, panel_of, why_missing
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.models.registry import describe
from ostro.torch_models.base import Model
from ostro.torch_models.loading import Picked, Place, places_of
from ostro.weights import Pooling
from ostro.weights.arrays import WeightArray, array_of
from ostro.weights.slices import SlicedWeight, sliced
from ostro.weights.stored import Stored, TensorHeader

# One that is there and cannot be used, being of another version, is no reason: then these tests fail.
needs_library = pytest.mark.skipif(not is_built(), reason=str(why_missing()))


def savable_model(config: Mapping[str, object]) -> Model:
    """A random model that a checkpoint can hold: what is stored once for all heads is the same for all."""
    model = random_model(config)
    for place in places_of(model).values():
        if place.repeated:
            place.memory[:] = place.memory[0]
    return model


@dataclass(frozen=True)
class ModelCheckpoint:
    """A checkpoint backed by a torch model in memory."""

    model: Model
    config: Mapping[str, object]
    dtype: torch.dtype = torch.float32
    path: Path = Path()
    name: str = "random"
    generation_config: Mapping[str, object] = field(default_factory=dict)
    pooling: Pooling | None = None
    tokenizer_path: Path = Path()
    files: list[Path] = field(default_factory=list)

    def stored(self) -> Stored:
        headers = [TensorHeader(name, tuple(tensor.shape), "F32") for name, tensor in self.tensors()]
        return Stored(tensors=headers, file_bytes=0, largest_file=0)

    def arrays(self) -> Iterator[tuple[str, WeightArray]]:
        return ((name, array_of(tensor)) for name, tensor in self.tensors())

    def slices(self) -> Iterator[tuple[str, SlicedWeight]]:
        return sliced(self.arrays())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, place in places_of(self.model).items():
            stored = stored_in(place) - place.offset
            yield name, (stored / place.factors() if place.scales else stored).to(self.dtype)


def stored_in(place: Place) -> torch.Tensor:
    """The tensor that the place was filled with, but for its offset."""
    if not isinstance(place.taken, Picked):
        return place.memory[0] if place.repeated else place.memory
    stored = torch.empty(place.shape, dtype=place.memory.dtype)
    return stored.index_copy_(place.taken.dim, torch.tensor(place.taken.rows), place.memory)


def packed(
    config: Mapping[str, object], model: Model, path: Path, *, isa: str | None = None, bits: int = 0
) -> PackedFile:
    """The model's weights, packed for an instruction set: without one, for the best that there is."""
    panel = panel_of(isa or instruction_sets()[0])
    described = native_architecture(describe(config), panel)
    with path.open("w+b") as file:
        writer = PackedWriter(file, panel)
        writer.finish(pack(described, ModelCheckpoint(model, config).arrays(), writer, bits=bits).to_json())
        return PackedFile(file, path)


def native(
    weights: PackedFile,
    *,
    isa: str | None = None,
    pages: int = 64,
    states: int = 16,
    budget: int = 64,
    rows: int = 8,
    cells: Cells = Cells.FLOAT32,
    threads: int = 2,
    pooling: Pooling | None = None,
    adapters: NativeAdapters | None = None,
) -> NativeRunner:
    return NativeRunner(
        weights,
        isa=isa or instruction_sets()[0],
        num_pages=pages,
        num_states=states if weights.program["state_floats"] else 0,
        max_batch_tokens=budget,
        max_batch_seqs=rows,
        cells=cells,
        threads=threads,
        pooling=pooling,
        adapters=adapters,
    )
