"""Packs a checkpoint's tensors into a file for the native core. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ostro.kernels.cpu.packed_file import Floats, PackedWriter
from ostro.kernels.cpu.program_spec import ProgramSpec, RotationSpec
from ostro.models.architecture import Architecture, ModelShape
from ostro.models.rope_frequencies import rope_frequencies
from ostro.models.rope_settings import RopeSettings
from ostro.models.tensor_errors import REDUNDANT, lacking, misshapen, no_place, not_finite, not_floats
from ostro.runner.native.formats import KINDS, kind_of
from ostro.runner.native.lowering import FLOATS, Lowering, Sizes, padded
from ostro.runner.native.support import NotNative
from ostro.weights.arrays import Bytes, WeightArray
from ostro.weights.checkpoint import Checkpoint

Addresses = npt.NDArray[np.uint64]
_Number = TypeVar("_Number", np.uint64, np.float32)


def pack(
    described: Architecture,
    checkpoint: Checkpoint,
    writer: PackedWriter,
    *,
    bits: int,
    make_room: Callable[[int], None] = lambda nbytes: None,
) -> ProgramSpec:
    """Packs the weights of a model accepted by `native_architecture`, and returns its steps.

    `make_room` is called with the file's size before anything is written.
    """
    tensors = _Tensors(described, checkpoint)
    sizes = Sizes(writer.panel, tensors.kind)
    Lowering(described, sizes, bits=bits).program()
    make_room(sizes.layout.nbytes)
    writer.allocate(sizes.layout.nbytes)
    return Lowering(described, _Packer(tensors, writer), bits=bits).program()


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in place: the addresses of its rows, in GGUF's type `kind`."""

    kind: int
    rows: Addresses
    cols: int
    memory: Bytes
    """The memory that the addresses point into, one row each."""
    transposed: bool = False
    """Whether the rows are columns of the checkpoint's tensor."""

    @property
    def shape(self) -> tuple[int, int]:
        """The checkpoint tensor's shape."""
        return (self.cols, len(self.rows)) if self.transposed else (len(self.rows), self.cols)


class _Tensors:
    """A checkpoint's tensors, keyed by their names in the description."""

    def __init__(self, described: Architecture, checkpoint: Checkpoint) -> None:
        self._matrices: dict[str, Stored] = {}
        self._vectors: dict[str, Floats] = {}
        self._to_transpose: set[str] = set()
        wanted = {tensor.name: tensor for tensor in described.tensors()}
        for given, tensor in _stored(checkpoint):
            name = given if given in wanted else f"{described.backbone}.{given}"
            place = wanted.pop(name, None)
            if place is None:
                if REDUNDANT.fullmatch(given):
                    continue
                raise no_place(given)
            if place.shape != tensor.shape:
                raise misshapen(given, tensor.shape, place.shape)
            if isinstance(tensor, Stored):
                self._matrices[name] = replace(tensor, rows=_by_part(tensor.rows, place.by_head))
                if tensor.transposed != place.transposed:
                    self._to_transpose.add(name)
            elif not np.isfinite(tensor).all():
                raise not_finite(given)
            else:
                self._vectors[name] = _by_part(tensor, place.by_head) + np.float32(place.offset)
        if wanted:
            raise lacking(wanted)

    def kind(self, name: str) -> int:
        return self._matrices[name].kind

    def matrix(self, name: str) -> Stored:
        """The matrix with a row per output; a copy if the checkpoint stores the transpose."""
        found = self._matrices[name]
        if name not in self._to_transpose:
            return found
        if found.kind not in FLOATS:
            raise NotNative(f"{name} is stored in a form that cannot be packed")
        numbers = found.memory.view(f"u{found.memory.shape[1] // found.cols}")
        turned = WeightArray.of(np.ascontiguousarray(numbers.T))
        return Stored(found.kind, turned.row_addresses(), turned.shape[1], turned.raw)

    def vector(self, name: str) -> Floats:
        return self._vectors[name]


def _by_part(rows: npt.NDArray[_Number], heads: int) -> npt.NDArray[_Number]:
    """Reorders rows that interleave q, k and v per head into all q, all k, all v; unchanged if `heads` is 0."""
    return rows.reshape(heads, 3, -1).swapaxes(0, 1).reshape(-1) if heads else rows


def _stored(checkpoint: Checkpoint) -> Iterator[tuple[str, Stored | Floats]]:
    """All tensors: matrices in place, vectors as floats."""
    for name, array in checkpoint.arrays():
        if (kind := kind_of(array.format)) is None:
            raise not_floats(name, array.format_name)
        if len(array.shape) != 2:
            yield name, array.floats()
            continue
        # Other float formats have no kernels: they are packed from a float32 copy.
        whole = array if array.format in KINDS else WeightArray.of(array.floats())
        cols = whole.shape[0 if whole.transposed else 1]
        yield name, Stored(kind, whole.row_addresses(), cols, whole.raw, whole.transposed)


class _Packer:
    """The sink that writes a packed file."""

    def __init__(self, tensors: _Tensors, writer: PackedWriter) -> None:
        self.panel, self.kind = writer.panel, tensors.kind
        self._tensors, self._writer = tensors, writer

    def matrix(self, names: Sequence[str], rows: int, cols: int, *, bits: int, by_turns: bool) -> int:
        parts = [self._tensors.matrix(name) for name in names]
        addresses = self._in_order(np.concatenate([part.rows for part in parts]), by_turns)
        found = self._writer.matrix(self.kind(names[0]), addresses, cols, bits)
        assert found is not None, "its size was asked for"
        return found

    def vector(self, pieces: Sequence[tuple[str, int]], size: int, *, by_turns: bool = False) -> int:
        values = np.concatenate([np.tile(self._tensors.vector(name), count) for name, count in pieces])
        ordered = self._in_order(values, by_turns)
        return self._writer.vector(np.pad(ordered, (0, size - len(ordered))))

    def rotation(self, rope: RopeSettings, shape: ModelShape) -> RotationSpec:
        found = rope_frequencies(rope, head_dim=shape.head_dim, max_seq_len=shape.max_seq_len)
        return RotationSpec(frequencies=self._writer.vector(found.frequencies), factor=found.attention_factor)

    def _in_order(self, rows: npt.NDArray[_Number], turns: bool) -> npt.NDArray[_Number]:
        return by_turns(rows, self.panel) if turns else rows


def by_turns(rows: npt.NDArray[_Number], panel: int) -> npt.NDArray[_Number]:
    """Interleaves panels of the first and second half's rows; each half is padded with zeros."""
    half = len(rows) // 2
    panels = np.zeros((2, padded(half, panel)), rows.dtype)
    panels[:, :half] = rows.reshape(2, half)
    return panels.reshape(2, -1, panel).swapaxes(0, 1).reshape(-1)
