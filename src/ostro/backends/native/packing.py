"""Packs a checkpoint's tensors into a file for the native core. Imports no torch."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ostro.backends.native.lowering import lowered
from ostro.backends.native.sinks import ALIGNED, FLOAT32, KINDS, Sizes, kind_of, padded, padded_rows
from ostro.backends.native.support import NotNative
from ostro.kernels.cpu.packed_file import Floats, PackedWriter
from ostro.kernels.cpu.program_spec import ProgramSpec, RotationSpec
from ostro.models.architecture import Architecture, Convolution, ExpertMatrices, ModelShape, StoredTensor
from ostro.models.encoder import Encoder
from ostro.models.expert_layers import ExpertLayers
from ostro.models.rope_frequencies import rope_frequencies
from ostro.models.rope_settings import RopeSettings
from ostro.models.tensor_errors import REDUNDANT, lacking, misshapen, no_place, not_finite, not_floats
from ostro.weights.arrays import Bytes, Weight, WeightArray
from ostro.weights.quantized.blocks import DoesNotFit
from ostro.weights.quantized.weight import QuantizedWeight

Packable = Architecture | Encoder | ExpertLayers
Addresses = npt.NDArray[np.uint64]
_log = logging.getLogger(__name__)
_Number = TypeVar("_Number", np.uint64, np.float32)


def pack(
    described: Packable,
    arrays: Iterable[tuple[str, Weight]],
    writer: PackedWriter,
    *,
    bits: int,
    make_room: Callable[[int], None] = lambda nbytes: None,
) -> ProgramSpec:
    """Packs a checkpoint's arrays for a model accepted by `native_architecture`, and returns its steps.

    `make_room` is called with the file's size before anything is written.
    """
    tensors = _Tensors(described, arrays)
    sizes = Sizes(writer.panel, tensors.kind)
    lowered(described, sizes, bits=bits)
    make_room(sizes.layout.nbytes)
    writer.allocate(sizes.layout.nbytes)
    return lowered(described, _Packer(tensors, writer), bits=bits)


class _Rows(NamedTuple):
    """The addresses of a matrix's rows, one per output."""

    addresses: Addresses
    memory: Bytes
    """What the addresses point into."""


class _Matrix(NamedTuple):
    """A stored matrix, or one tensor of all experts' matrices, and its place in the description."""

    weight: Weight
    place: StoredTensor

    @property
    def kind(self) -> int:
        kind = kind_of(self.weight.format)
        assert kind is not None, "formats are checked beforehand"
        return kind


class _Tensors:
    """A checkpoint's tensors, keyed by their names in the description. Matrices stay in the files until packed."""

    def __init__(self, described: Packable, arrays: Iterable[tuple[str, Weight]]) -> None:
        self._scales = described.row_scales if isinstance(described, Architecture) else {}
        self._matrices: dict[str, _Matrix] = {}
        self._vectors: dict[str, Floats] = {}
        wanted = {tensor.name: tensor for tensor in described.tensors()}
        for given, weight in arrays:
            if kind_of(weight.format) is None:
                raise not_floats(given, weight.format_name)
            name = given if given in wanted else f"{described.backbone}.{given}"
            place = wanted.pop(name, None)
            if place is None:
                if REDUNDANT.fullmatch(given):
                    continue
                raise no_place(given)
            if place.shape != weight.shape:
                raise misshapen(given, weight.shape, place.shape)
            if len(weight.shape) - place.stacked == 2:
                self._matrices[name] = _Matrix(weight, place)
                continue
            values = weight.floats()
            if not np.isfinite(values).all():
                raise not_finite(given)
            vector = _ordered(values.reshape(-1), place) + np.float32(place.offset)
            self._vectors[name] = vector * self._factors(name) if name in self._scales else vector
        if wanted:
            raise lacking(wanted)
        self._log_repacked()

    def kind(self, name: str) -> int:
        return FLOAT32 if name in self._scales else self._matrices[name].kind

    def _factors(self, name: str) -> Floats:
        """What multiplies each row of a tensor."""
        return np.concatenate([np.full(rows, factor, np.float32) for rows, factor in self._scales[name]])

    def matrix(self, name: str) -> _Rows:
        """The matrix as it is packed; a copy if the checkpoint stores another format, or the transpose."""
        weight, place = self._matrices[name]
        try:
            # Other float formats have no kernels: they are packed from a float32 copy, as are numbers that change.
            if name in self._scales:
                assert place.order is None, "scaled parts have our order"
                assert not place.transposed, "scaled parts are not transposed"
                whole = WeightArray.of(weight.floats() * self._factors(name)[:, None])
            else:
                whole = weight.stored() if weight.format in KINDS else WeightArray.of(weight.floats())
        except DoesNotFit as error:
            raise NotNative(f"{name} cannot be repacked: {error}") from error
        if whole.transposed != place.transposed:
            if whole.is_quantized:
                raise NotNative(f"{name} is stored in a form that cannot be packed")
            *_, rows, columns = whole.shape
            numbers = whole.raw.view(f"u{whole.raw.shape[-1] // (rows if whole.transposed else columns)}")
            whole = WeightArray.of(np.ascontiguousarray(numbers.swapaxes(-1, -2)))
        if len(whole.raw.shape) == 3:
            raw = whole.raw.reshape(-1, whole.raw.shape[-1])
            whole = replace(whole, shape=(len(raw), whole.shape[-1]), raw=raw)
        return _Rows(_ordered(whole.row_addresses(), place), whole.raw)

    def vector(self, name: str) -> Floats:
        return self._vectors[name]

    def _log_repacked(self) -> None:
        packings = Counter(
            (each.weight.packing.format, each.weight.packing.how)
            for each in self._matrices.values()
            if isinstance(each.weight, QuantizedWeight)
        )
        for (format, how), count in packings.most_common():
            _log.info("%d quantised matrices become %s, %s", count, format, how)


def _ordered(rows: npt.NDArray[_Number], place: StoredTensor) -> npt.NDArray[_Number]:
    """The entries of all rows, in our order. A stack's matrices follow each other."""
    if place.order is None:
        return rows
    stack = rows.reshape(place.shape[0] if place.stacked else 1, -1)
    return stack[:, place.order.stored(stack.shape[1])].reshape(-1)


class _Packer:
    """The sink that writes a packed file."""

    def __init__(self, tensors: _Tensors, writer: PackedWriter) -> None:
        self.panel, self.kind = writer.panel, tensors.kind
        self._tensors, self._writer = tensors, writer

    def matrix(self, names: Sequence[str], rows: int, cols: int, *, bits: int, by_turns: bool) -> int:
        parts = [self._tensors.matrix(name) for name in names]
        addresses = self._in_order(np.concatenate([part.addresses for part in parts]), by_turns)
        found = self._writer.matrix(self.kind(names[0]), addresses, cols, bits)
        assert found is not None, "its size was asked for"
        return found

    def experts(self, matrices: ExpertMatrices, *, bits: int, by_turns: bool) -> int:
        # Kept alive until packed: the writer only has addresses.
        parts = [[self._tensors.matrix(name) for name in matrices.weight_names(part)] for part in matrices.parts]
        ordered = self._by_expert(matrices, [[own.addresses for own in part] for part in parts], by_turns)
        kind = self.kind(next(matrices.tensors()).name)
        found = self._writer.matrix(kind, ordered, matrices.columns, bits)
        assert found is not None, "its size was asked for"
        return found

    def expert_biases(self, matrices: ExpertMatrices, *, by_turns: bool) -> int:
        parts = [[self._tensors.vector(name) for name in matrices.bias_names(part)] for part in matrices.parts]
        return self._writer.vector(self._by_expert(matrices, parts, by_turns))

    def _by_expert(
        self, matrices: ExpertMatrices, parts: list[list[npt.NDArray[_Number]]], by_turns: bool
    ) -> npt.NDArray[_Number]:
        """The entries of all rows, expert by expert, each padded with zeros to whole panels."""
        rows = np.concatenate([np.concatenate(part).reshape(matrices.experts, -1) for part in parts], 1)
        height = padded_rows(matrices.rows, self.panel, by_turns=by_turns)
        ordered = np.zeros((matrices.experts, height), rows.dtype)
        for own, to in zip(rows, ordered, strict=True):
            in_order = self._in_order(own, by_turns)
            to[: len(in_order)] = in_order
        return ordered.reshape(-1)

    def vector(self, pieces: Sequence[tuple[str, int]], size: int, *, by_turns: bool = False) -> int:
        repeated = (np.tile(self._tensors.vector(name), count) for name, count in pieces)
        values = np.concatenate([np.zeros(0, np.float32), *repeated])
        ordered = self._in_order(values, by_turns)
        return self._writer.vector(np.pad(ordered, (0, size - len(ordered))))

    def filters(self, convolution: Convolution) -> int:
        weights = self._tensors.vector(f"{convolution.name}.weight").reshape(convolution.channels, -1)
        channels = convolution.channels
        return self._writer.vector(np.pad(weights.T, ((0, 0), (0, padded(channels, ALIGNED) - channels))).reshape(-1))

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
