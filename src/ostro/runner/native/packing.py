"""From a model's description and a checkpoint's tensors to a packed file.

Reads tensors with torch. Nothing else of the native path needs it: where the packed file is there already, nothing
here is called.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ostro.errors import BadCheckpoint
from ostro.kernels.cpu.packed_file import Floats, PackedWriter
from ostro.kernels.cpu.program_spec import ProgramSpec, RotationSpec
from ostro.models.architecture import Architecture, ModelShape
from ostro.models.rope_settings import RopeSettings
from ostro.runner.native.lowering import Lowering, Sizes, padded
from ostro.runner.native.support import NotNative
from ostro.torch_models.loading import REDUNDANT, not_finite
from ostro.torch_models.rope import Rotary
from ostro.weights.checkpoint import Checkpoint
from ostro.weights.gguf_checkpoint import GgufCheckpoint
from ostro.weights.gguf_model import Undo

_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""GGUF's numbers of what safetensors hold."""

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
    """Packs the weights of a model that `native_architecture` has passed, and returns its steps.

    `make_room` is told how many bytes the file will take before any is written.
    """
    tensors = _Tensors(described, checkpoint)
    sizes = Sizes(writer.panel, tensors.kind)
    Lowering(described, sizes, bits=bits).program()
    make_room(sizes.layout.nbytes)
    writer.allocate(sizes.layout.nbytes)
    return Lowering(described, _Packer(tensors, writer), bits=bits).program()


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor where it lies: rows of GGUF's type `kind`, by their addresses."""

    kind: int
    rows: Addresses
    cols: int
    memory: object
    """What the addresses point into."""


class _Tensors:
    """A checkpoint's tensors by their names in the description."""

    def __init__(self, described: Architecture, checkpoint: Checkpoint) -> None:
        self._matrices: dict[str, Stored] = {}
        self._vectors: dict[str, Floats] = {}
        wanted = {tensor.name: tensor for tensor in described.tensors()}
        for given, tensor in _stored(checkpoint):
            name = given if given in wanted else f"{described.backbone}.{given}"
            place = wanted.pop(name, None)
            if place is None:
                if REDUNDANT.fullmatch(given):
                    continue
                raise BadCheckpoint(
                    f"The checkpoint holds a tensor {given!r} that its architecture has no place for, or holds it "
                    "twice; its config may belong to another model."
                )
            shape = (len(tensor.rows), tensor.cols) if isinstance(tensor, Stored) else tensor.shape
            if place.shape != tuple(shape):
                raise BadCheckpoint(
                    f"Tensor {given!r} has shape {tuple(shape)}, but its config asks for {place.shape}; "
                    "they may belong to different models."
                )
            if isinstance(tensor, Stored):
                self._matrices[name] = tensor
            elif not np.isfinite(tensor).all():
                raise not_finite(given)
            else:
                self._vectors[name] = tensor + np.float32(place.offset)
        if wanted:
            some = ", ".join(sorted(wanted)[:3]) + (", …" if len(wanted) > 3 else "")
            raise BadCheckpoint(f"The checkpoint lacks {len(wanted)} tensors ({some}); fetch the model again.")

    def kind(self, name: str) -> int:
        return self._matrices[name].kind

    def matrix(self, name: str) -> Stored:
        return self._matrices[name]

    def vector(self, name: str) -> Floats:
        return self._vectors[name]


def _stored(checkpoint: Checkpoint) -> Iterator[tuple[str, "Stored | Floats"]]:
    """Every tensor: matrices as they lie in the file, vectors as floats."""
    if isinstance(checkpoint, GgufCheckpoint):
        for weight in checkpoint.weights:
            if len(weight.info.shape) != 2:
                yield weight.name, checkpoint.tensor(weight).float().numpy()
                continue
            raw = checkpoint.raw(weight)
            if weight.undo is Undo.NOTHING:
                order = np.arange(len(raw))
            elif weight.undo is Undo.ROTATE_HALVES:
                order = np.arange(len(raw)).reshape(weight.heads, -1, 2).transpose(0, 2, 1).reshape(-1)
            else:
                raise NotNative(f"{weight.name} is stored in a form that cannot be packed")
            kind = weight.info.ggml_type
            addresses = (raw.ctypes.data + order * raw.shape[1]).astype(np.uint64)
            yield weight.name, Stored(kind, addresses, weight.info.shape[1], raw)
        return
    for name, tensor in checkpoint.tensors():
        if not tensor.is_floating_point():
            raise BadCheckpoint(
                f"Tensor {name!r} holds {str(tensor.dtype).removeprefix('torch.')}, not floating-point numbers: the "
                "checkpoint is quantised in a way that its config does not tell. Fetch the unquantised model."
            )
        if tensor.dim() != 2:
            yield name, tensor.float().numpy()
            continue
        whole = (tensor if tensor.dtype in _FLOATS else tensor.float()).contiguous()
        addresses = whole.data_ptr() + np.arange(len(whole), dtype=np.uint64) * np.uint64(
            whole.shape[1] * whole.itemsize
        )
        kind = _FLOATS[whole.dtype]
        yield name, Stored(kind, addresses, whole.shape[1], whole)


class _Packer:
    """The sink that writes."""

    def __init__(self, tensors: _Tensors, writer: PackedWriter) -> None:
        self.panel, self.kind = writer.panel, tensors.kind
        self._tensors, self._writer = tensors, writer

    def matrix(self, names: Sequence[str], rows: int, cols: int, *, bits: int, by_turns: bool) -> int:
        addresses = np.concatenate([self._tensors.matrix(name).rows for name in names])
        found = self._writer.matrix(self.kind(names[0]), self._in_order(addresses, by_turns), cols, bits)
        assert found is not None, "its size was asked for"
        return found

    def vector(self, pieces: Sequence[tuple[str, int]], size: int, *, by_turns: bool = False) -> int:
        values = np.concatenate([np.tile(self._tensors.vector(name), count) for name, count in pieces])
        return self._writer.vector(self._in_order(values, by_turns))

    def rotation(self, rope: RopeSettings, shape: ModelShape) -> RotationSpec:
        rotary = Rotary(rope, head_dim=shape.head_dim, max_seq_len=shape.max_seq_len)
        frequencies = rotary.frequencies[len(rotary.frequencies) // 2 :].numpy()
        return RotationSpec(frequencies=self._writer.vector(frequencies), factor=rotary.attention_factor)

    def _in_order(self, rows: npt.NDArray[_Number], by_turns: bool) -> npt.NDArray[_Number]:
        """As they are, or by turns a panel of each half; a half is filled up with zeros."""
        if not by_turns:
            return rows
        half = len(rows) // 2
        panels = np.zeros((2, padded(half, self.panel)), rows.dtype)
        panels[:, :half] = rows.reshape(2, half)
        return panels.reshape(2, -1, self.panel).swapaxes(0, 1).reshape(-1)
