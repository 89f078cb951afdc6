"""From a model's description and a checkpoint's tensors to a packed file with the model's step as a list of operations.

Knows the parts that an `Architecture` may have, and refuses those without a kernel; knows no family by name. Nothing
else of the native path needs torch: where the packed file is there already, nothing here is called.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from ctypes import byref
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from ostro.errors import BadCheckpoint
from ostro.kernels.cpu.library import After, CMatrix, Op, library
from ostro.kernels.cpu.packed_file import Floats, PackedLayout, PackedWriter
from ostro.kernels.cpu.program import BufferSpec, ProgramSpec, RotationSpec, StepSpec
from ostro.models.architecture import MLP, Architecture, Attention, Layer, Norm, Projection, QKNorm
from ostro.models.loading import REDUNDANT, not_finite
from ostro.models.rope import Rotary
from ostro.models.rope_settings import RopeSettings
from ostro.runner.native.support import ACTIVATIONS, NotNative, WrongPanel
from ostro.weights.checkpoint import Checkpoint
from ostro.weights.gguf_checkpoint import GgufCheckpoint
from ostro.weights.gguf_header import GGML_TYPES
from ostro.weights.gguf_model import Undo

_LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)

_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""GGUF's numbers of what safetensors hold."""

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor where it lies: rows of GGUF's type `kind`, by their addresses."""

    kind: int
    rows: Addresses
    cols: int
    memory: object
    """What the addresses point into."""

    @property
    def is_float(self) -> bool:
        return self.kind in _FLOATS.values()


def lower(
    described: Architecture,
    checkpoint: Checkpoint,
    writer: PackedWriter,
    *,
    bits: int,
    make_room: Callable[[int], None] = lambda nbytes: None,
) -> ProgramSpec:
    """Packs the weights and lists the steps of a model that `native_architecture` has passed.

    `make_room` is told how many bytes the file will take before any is written.
    """
    tensors, layout = _Tensors(described, checkpoint), PackedLayout(writer.panel)
    _Lowering(described, tensors, layout, bits).program()
    make_room(layout.nbytes)
    writer.allocate(layout.nbytes)
    return _Lowering(described, tensors, writer, bits).program()


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

    @property
    def formats(self) -> set[tuple[int, int]]:
        """Types and widths of all matrices."""
        return {(each.kind, each.cols) for each in self._matrices.values()}

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


class _Lowering:
    """Buffers, by their numbers: the stream, a product beside it, queries with keys and values, what attention gives,
    the inner states, the rows asked for, their logits.
    """

    _STREAM, _BESIDE, _QKV, _ATTENDED, _INNER, _ASKED, _LOGITS = range(7)

    def __init__(self, described: Architecture, tensors: _Tensors, writer: PackedLayout, bits: int) -> None:
        self._model, self._tensors, self._writer = described, tensors, writer
        self._panel, self._bits = writer.panel, bits
        self._steps: list[StepSpec] = []
        self._norms: dict[Norm, int] = {}
        self._precisions: Counter[str] = Counter()

    def program(self) -> ProgramSpec:
        # Before anything is written.
        for kind, cols in self._tensors.formats:
            if library().ostro_format(kind, self._bits, byref(CMatrix(rows=self._panel, cols=cols))) < 0:
                raise NotNative(f"its weights are of type {GGML_TYPES[kind].name}, for which there is no kernel")
        model, shape = self._model, self._model.shape
        embedding = self._embed()
        rotations = [self._rotation(rope) for rope in model.ropes]
        inner = 0
        told = time.monotonic()
        for number, layer in enumerate(model.layers):
            if time.monotonic() - told > _LOG_SECONDS:
                told = time.monotonic()
                _log.info("packing the weights: layer %d of %d", number, len(model.layers))
            inner = max(inner, self._layer(layer, number))
        head_step = len(self._steps)
        self._add(op=Op.GATHER, input=self._STREAM, out=self._ASKED, cols=shape.hidden_size)
        self._norm(model.norm, self._ASKED, self._ASKED)
        logits_step = len(self._steps)
        self._head(embedding)
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        widths = (shape.hidden_size, shape.hidden_size, qkv, shape.num_heads * shape.head_dim, inner)
        buffers = [BufferSpec(cols=self._padded(width)) for width in widths]
        buffers.append(BufferSpec(cols=self._padded(shape.hidden_size), asked=True))
        buffers.append(BufferSpec(cols=self._padded(shape.vocab_size if model.head else 1), asked=True))
        return ProgramSpec(
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_layers=shape.num_layers,
            max_seq_len=shape.max_seq_len,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            buffers=buffers,
            rotations=rotations,
            steps=self._steps,
            hidden=self._ASKED,
            logits=self._LOGITS if model.head else None,
            head_step=head_step,
            logits_step=logits_step,
            precision=", ".join(name for name, _ in self._precisions.most_common()),
        )

    def _rotation(self, settings: RopeSettings) -> RotationSpec:
        shape = self._model.shape
        rope = Rotary(settings, head_dim=shape.head_dim, max_seq_len=shape.max_seq_len)
        frequencies = rope.frequencies[len(rope.frequencies) // 2 :].numpy()
        return RotationSpec(frequencies=self._writer.vector(frequencies), factor=rope.attention_factor)

    def _embed(self) -> int:
        embedding = self._model.embedding
        matrix = self._pack([self._tensors.matrix(f"{embedding.name}.weight")], head=True)
        # Rounded to what the embedding is computed in.
        scale = float(np.float32(embedding.scale))
        self._add(op=Op.EMBED, out=self._STREAM, matrix=matrix, cols=self._model.shape.hidden_size, scale=scale)
        return matrix

    def _layer(self, layer: Layer, number: int) -> int:
        """Its steps; returns the width of its inner states."""
        assert layer.attention_norm is not None
        assert layer.mlp_norm is not None
        self._attention(layer.attention, layer.attention_norm, number)
        self._add_to_stream(layer.attention.output, self._ATTENDED, layer.attention_post_norm)
        inner = self._gate_and_up(layer.mlp, layer.mlp_norm)
        self._add_to_stream(layer.mlp.down, self._INNER, layer.mlp_post_norm)
        return inner

    def _add_to_stream(self, projection: Projection, source: int, norm: Norm | None) -> None:
        if norm is None:
            self._product(projection, source, self._STREAM, after=After.ADD)
        else:
            self._product(projection, source, self._BESIDE)
            self._norm(norm, self._BESIDE, self._STREAM, after=After.ADD)

    def _attention(self, attention: Attention, norm: Norm, number: int) -> None:
        spec, head_norm = attention.spec, attention.qk_norm
        parts, bias = self._parts(attention.qkv), self._bias(attention.qkv)
        at = 0
        # Parts of one type are one matrix.
        for _, group in groupby(parts, key=lambda part: part.kind):
            some = list(group)
            rows = sum(len(part.rows) for part in some)
            if rows % self._panel:
                raise WrongPanel(f"its projections have {rows} rows, not a multiple of {self._panel}")
            self._add(
                op=Op.LINEAR,
                input=self._STREAM,
                out=self._QKV,
                out_at=at,
                cols=some[0].cols,
                norm=self._weight(norm),
                eps=norm.eps,
                bias=None if bias is None else self._writer.vector(bias[at : at + rows]),
                matrix=self._pack(some),
            )
            at += rows
        self._add(
            op=Op.ATTEND,
            input=self._QKV,
            out=self._ATTENDED,
            layer=number,
            rotation=attention.rope,
            window=spec.window or 0,
            scale=spec.scale,
            cap=spec.softcap or 0.0,
            norm=None if head_norm is None else self._head_weights(head_norm),
            eps=0.0 if head_norm is None else head_norm.query.eps,
        )

    def _gate_and_up(self, mlp: MLP, norm: Norm) -> int:
        """Gates and ups by turns, a panel of each: whoever has made both multiplies them."""
        parts, bias = self._parts(mlp.up), self._bias(mlp.up)
        gate, up = parts if len(parts) == 2 else _halves(parts[0])
        if gate.kind != up.kind:
            raise NotNative("its gates and ups are kept in different types")
        width = self._padded(len(gate.rows), self._panel)
        order = np.stack([self._panels(part.rows) for part in (gate, up)], 1).reshape(-1)
        if bias is not None:
            halves = np.split(bias, 2)
            bias = np.stack([self._panels(half) for half in halves], 1).reshape(-1)
        self._add(
            op=Op.LINEAR,
            input=self._STREAM,
            out=self._INNER,
            cols=gate.cols,
            after=ACTIVATIONS[mlp.activation],
            norm=self._weight(norm),
            eps=norm.eps,
            bias=None if bias is None else self._writer.vector(bias),
            matrix=self._pack([Stored(gate.kind, order, gate.cols, (gate, up))]),
        )
        return width

    def _product(self, projection: Projection, source: int, target: int, after: After = After.STORE) -> None:
        bias = self._bias(projection)
        (stored,) = self._parts(projection)
        self._add(
            op=Op.LINEAR,
            input=source,
            out=target,
            cols=stored.cols,
            after=after,
            bias=None if bias is None else self._writer.vector(self._padded_vector(bias)),
            matrix=self._pack([stored]),
        )

    def _head(self, embedding: int) -> None:
        head, shape = self._model.head, self._model.shape
        if head is None:
            return
        matrix = (
            embedding if head.name is None else self._pack([self._tensors.matrix(f"{head.name}.weight")], head=True)
        )
        self._add(op=Op.LINEAR, input=self._ASKED, out=self._LOGITS, cols=shape.hidden_size, matrix=matrix)
        if head.softcap is not None:
            width = self._padded(shape.vocab_size, self._panel)
            self._add(op=Op.SOFTCAP, out=self._LOGITS, cols=width, cap=head.softcap)
        self._add(op=Op.SAMPLE, input=self._LOGITS, cols=shape.vocab_size)

    def _norm(self, norm: Norm, source: int, target: int, after: After = After.STORE) -> None:
        self._add(
            op=Op.NORM, input=source, out=target, cols=norm.size, norm=self._weight(norm), eps=norm.eps, after=after
        )

    def _parts(self, projection: Projection) -> list[Stored]:
        return [self._tensors.matrix(f"{part.name}.weight") for part in projection.parts]

    def _bias(self, projection: Projection) -> Floats | None:
        if not projection.bias:
            return None
        return np.concatenate([self._tensors.vector(f"{part.name}.bias") for part in projection.parts])

    def _pack(self, parts: Iterable[Stored], *, head: bool = False) -> int:
        some = list(parts)
        first = some[0]
        # Embedding and head tell one token from the next: they keep eight bits where layers have four.
        bits = 8 if head and self._bits else self._bits
        found = self._writer.matrix(first.kind, np.concatenate([part.rows for part in some]), first.cols, bits)
        assert found is not None, "its format was looked at"
        quantized = first.is_float and bits and first.cols % 32 == 0
        name = f"int{bits}" if quantized else GGML_TYPES[first.kind].name
        self._precisions[name] += sum(len(part.rows) for part in some) * first.cols
        return found

    def _weight(self, norm: Norm) -> int:
        if norm not in self._norms:
            self._norms[norm] = self._writer.vector(self._tensors.vector(f"{norm.name}.weight"))
        return self._norms[norm]

    def _head_weights(self, norm: QKNorm) -> int:
        """A row for each head of queries and keys."""
        shape = self._model.shape
        counts = ((norm.query, shape.num_heads), (norm.key, shape.num_kv_heads))
        rows = [np.tile(self._tensors.vector(f"{each.name}.weight"), count) for each, count in counts]
        return self._writer.vector(np.concatenate(rows))

    def _panels(self, rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        padded = np.zeros(self._padded(len(rows), self._panel), rows.dtype)
        padded[: len(rows)] = rows
        return padded.reshape(-1, self._panel)

    def _padded_vector(self, values: Floats) -> Floats:
        return np.pad(values, (0, -len(values) % self._panel))

    def _padded(self, width: int, multiple: int = 64) -> int:
        return -(-width // multiple) * multiple

    def _add(self, **values: object) -> None:
        self._steps.append(StepSpec(**values))  # type: ignore[arg-type]


def _halves(whole: Stored) -> list[Stored]:
    return [Stored(whole.kind, rows, whole.cols, whole) for rows in np.split(whole.rows, 2)]
