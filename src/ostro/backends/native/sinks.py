"""Where a lowered model's weights go, by name: the sink in `packing` writes a packed file; `Sizes` only counts, so that
loading and planning know how large that file will be.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from ostro.backends.native.support import NotNative
from ostro.formats.gguf_header import GGML_TYPES
from ostro.kernels.cpu.packed_layout import PackedLayout
from ostro.kernels.cpu.program_spec import RotationSpec
from ostro.models.architecture import Convolution, ExpertMatrices, ModelShape
from ostro.models.rope_settings import RopeSettings

_FLOATS = ("F32", "F16", "BF16")
KINDS = {each.name: kind for kind, each in GGML_TYPES.items() if each.block_size > 1 or each.name in _FLOATS}
"""GGUF's number of each format that is packed as stored, if there are kernels for it."""
FLOAT32 = KINDS["F32"]
ALIGNED = 16
"""Channels of states are padded to a multiple of this: a line of the cache, and whole panels of any width."""
# By safetensors' names.
_WIDENED = ("F64", "F8_E4M3", "F8_E5M2")


def kind_of(stored: str) -> int | None:
    """GGUF's number of the type that a stored format is packed as; None if it is no floating-point format."""
    return FLOAT32 if stored in _WIDENED else KINDS.get(stored)


class Sink(Protocol):
    """Receives tensors by their names in the description; returns a number for each."""

    @property
    def panel(self) -> int: ...

    def kind(self, name: str) -> int:
        """GGUF's number of the type in which a matrix is stored."""

    def matrix(self, names: Sequence[str], rows: int, cols: int, *, bits: int, by_turns: bool) -> int:
        """Concatenates tensors into one matrix; `by_turns` interleaves panels of the first and second half's rows."""

    def experts(self, matrices: ExpertMatrices, *, bits: int, by_turns: bool) -> int:
        """One matrix per expert, one below the other, each padded to whole panels; `by_turns` applies to each."""

    def expert_biases(self, matrices: ExpertMatrices, *, by_turns: bool) -> int:
        """The biases of such matrices, in the same order."""

    def vector(self, pieces: Sequence[tuple[str, int]], size: int, *, by_turns: bool = False) -> int:
        """Concatenates vectors, each repeated as given, and pads with zeros to `size`."""

    def filters(self, convolution: Convolution) -> int:
        """A convolution's weights, tap by tap, each padded to a multiple of ALIGNED."""

    def rotation(self, rope: RopeSettings, shape: ModelShape) -> RotationSpec: ...


class Sizes:
    """A sink that only counts bytes."""

    def __init__(self, panel: int, kind: Callable[[str], int]) -> None:
        """`kind` returns the stored type of a tensor by its name."""
        self.panel, self.kind = panel, kind
        self.layout = PackedLayout(panel)

    def matrix(self, names: Sequence[str], rows: int, cols: int, *, bits: int, by_turns: bool) -> int:
        return self._sized(self.kind(names[0]), rows, cols, bits)

    def experts(self, matrices: ExpertMatrices, *, bits: int, by_turns: bool) -> int:
        kinds = {self.kind(name) for part in matrices.parts for name in matrices.weight_names(part)}
        if len(kinds) > 1:
            raise NotNative("its experts are kept in different types")
        rows = matrices.experts * padded_rows(matrices.rows, self.panel, by_turns=by_turns)
        return self._sized(kinds.pop(), rows, matrices.columns, bits)

    def expert_biases(self, matrices: ExpertMatrices, *, by_turns: bool) -> int:
        return self.layout.vector(matrices.experts * padded_rows(matrices.rows, self.panel, by_turns=by_turns))

    def _sized(self, kind: int, rows: int, cols: int, bits: int) -> int:
        number = self.layout.matrix(kind, rows, cols, bits)
        if number is None:
            raise NotNative(f"its weights are of type {GGML_TYPES[kind].name}, for which there is no kernel")
        return number

    def vector(self, pieces: Sequence[tuple[str, int]], size: int, *, by_turns: bool = False) -> int:
        return self.layout.vector(size)

    def filters(self, convolution: Convolution) -> int:
        return self.layout.vector(convolution.taps * padded(convolution.channels, ALIGNED))

    def rotation(self, rope: RopeSettings, shape: ModelShape) -> RotationSpec:
        return RotationSpec(frequencies=self.layout.vector(rope.rotary_dim(shape.head_dim) // 2))


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def padded_rows(rows: int, panel: int, *, by_turns: bool) -> int:
    """A matrix's rows, padded to whole panels; if they are interleaved, each half of them."""
    return 2 * padded(rows // 2, panel) if by_turns else padded(rows, panel)
