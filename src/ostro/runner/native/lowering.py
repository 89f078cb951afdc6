"""From a model's description to the native core's steps, and what is packed for them. Knows no family by name.

Imports neither torch nor arrays: weights go by their names to a `Sink`. One that writes a packed file is in `packing`;
`Sizes` only counts, which is how loading and planning alike learn how large that file will be.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import c_float
from itertools import groupby
from typing import Protocol

from ostro.formats.gguf_header import GGML_TYPES
from ostro.kernels.cpu.library import GROUP, After, Op
from ostro.kernels.cpu.packed_layout import PackedLayout
from ostro.kernels.cpu.program_spec import BufferSpec, ProgramSpec, RotationSpec, StepSpec
from ostro.models.architecture import MLP, Architecture, Attention, Layer, ModelShape, Norm, Part, Projection, QKNorm
from ostro.models.rope_settings import RopeSettings
from ostro.runner.native.support import ACTIVATIONS, NotNative, WrongPanel

FLOATS = frozenset({0, 1, 30})
"""GGUF's numbers of float32, float16 and bfloat16."""
_BUFFER_COLS = 64
_NO_ROTATION = -1
_LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where tensors go, by their names in the description. What it takes has a number."""

    @property
    def panel(self) -> int: ...

    def kind(self, name: str) -> int:
        """What a matrix is stored in, as GGUF numbers it."""

    def matrix(self, names: Sequence[str], rows: int, cols: int, *, bits: int, by_turns: bool) -> int:
        """Tensors end to end as one matrix; `by_turns` a panel of the first half's rows, then one of the second's."""

    def vector(self, pieces: Sequence[tuple[str, int]], size: int, *, by_turns: bool = False) -> int:
        """Vectors end to end, each as often as said."""

    def rotation(self, rope: RopeSettings, shape: ModelShape) -> RotationSpec: ...


class Sizes:
    """A sink that only counts."""

    def __init__(self, panel: int, kind: Callable[[str], int]) -> None:
        """`kind` tells what a tensor is stored in, by its name."""
        self.panel, self.kind = panel, kind
        self.layout = PackedLayout(panel)

    def matrix(self, names: Sequence[str], rows: int, cols: int, *, bits: int, by_turns: bool) -> int:
        kind = self.kind(names[0])
        number = self.layout.matrix(kind, rows, cols, bits)
        if number is None:
            raise NotNative(f"its weights are of type {GGML_TYPES[kind].name}, for which there is no kernel")
        return number

    def vector(self, pieces: Sequence[tuple[str, int]], size: int, *, by_turns: bool = False) -> int:
        return self.layout.vector(size)

    def rotation(self, rope: RopeSettings, shape: ModelShape) -> RotationSpec:
        return RotationSpec(frequencies=self.layout.vector(rope.rotary_dim(shape.head_dim) // 2))


class Lowering:
    """Buffers, by their numbers: the stream, a product beside it, queries with keys and values, what attention gives,
    the inner states, the rows asked for, their logits.
    """

    _STREAM, _BESIDE, _QKV, _ATTENDED, _INNER, _ASKED, _LOGITS = range(7)

    def __init__(self, described: Architecture, sink: Sink, *, bits: int) -> None:
        """Floats of layers are packed in so many bits; 0 leaves everything at its own precision."""
        self._model, self._sink = described, sink
        self._panel, self._bits = sink.panel, bits
        self._steps: list[StepSpec] = []
        self._norms: dict[Norm, int] = {}
        self._precisions: Counter[str] = Counter()
        self._tensors: list[list[str]] = []

    def program(self) -> ProgramSpec:
        model, shape = self._model, self._model.shape
        embedding = self._embed()
        rotations = [self._sink.rotation(rope, shape) for rope in model.ropes]
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
        buffers = [BufferSpec(cols=padded(width, _BUFFER_COLS)) for width in widths]
        buffers.append(BufferSpec(cols=padded(shape.hidden_size, _BUFFER_COLS), asked=True))
        buffers.append(BufferSpec(cols=padded(shape.vocab_size if model.head else 1, _BUFFER_COLS), asked=True))
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
            tensors=self._tensors,
            precision=", ".join(name for name, _ in self._precisions.most_common()),
        )

    def _embed(self) -> int:
        embedding, shape = self._model.embedding, self._model.shape
        matrix = self._pack([Part(embedding.name, shape.vocab_size)], shape.hidden_size, head=True)
        # Rounded to what the embedding is computed in.
        scale = c_float(embedding.scale).value
        self._add(op=Op.EMBED, out=self._STREAM, matrix=matrix, cols=shape.hidden_size, scale=scale)
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
        spec, head_norm, qkv = attention.spec, attention.qk_norm, attention.qkv
        at = 0
        # Parts of one type are one matrix.
        for _, group in groupby(qkv.parts, key=self._kind):
            parts = list(group)
            rows = sum(part.rows for part in parts)
            if rows % self._panel:
                raise WrongPanel(f"its projections have {rows} rows, not a multiple of {self._panel}")
            self._add(
                op=Op.LINEAR,
                input=self._STREAM,
                out=self._QKV,
                out_at=at,
                cols=qkv.columns,
                norm=self._weight(norm),
                eps=norm.eps,
                bias=self._biases(parts) if qkv.bias else None,
                matrix=self._pack(parts, qkv.columns),
            )
            at += rows
        self._add(
            op=Op.ATTEND,
            input=self._QKV,
            out=self._ATTENDED,
            layer=number,
            rotation=_NO_ROTATION if attention.rope is None else attention.rope,
            window=spec.window or 0,
            scale=spec.scale,
            cap=spec.softcap or 0.0,
            norm=None if head_norm is None else self._head_weights(head_norm),
            eps=0.0 if head_norm is None else head_norm.query.eps,
        )

    def _gate_and_up(self, mlp: MLP, norm: Norm) -> int:
        """Gates and ups by turns, a panel of each: whoever has made both multiplies them."""
        up = mlp.up
        if len({self._kind(part) for part in up.parts}) > 1:
            raise NotNative("its gates and ups are kept in different types")
        self._add(
            op=Op.LINEAR,
            input=self._STREAM,
            out=self._INNER,
            cols=up.columns,
            after=ACTIVATIONS[mlp.activation],
            norm=self._weight(norm),
            eps=norm.eps,
            bias=self._biases(up.parts, by_turns=True) if up.bias else None,
            matrix=self._pack(up.parts, up.columns, by_turns=True),
        )
        return padded(mlp.down.columns, self._panel)

    def _product(self, projection: Projection, source: int, target: int, after: After = After.STORE) -> None:
        self._add(
            op=Op.LINEAR,
            input=source,
            out=target,
            cols=projection.columns,
            after=after,
            bias=self._biases(projection.parts) if projection.bias else None,
            matrix=self._pack(projection.parts, projection.columns),
        )

    def _head(self, embedding: int) -> None:
        head, shape = self._model.head, self._model.shape
        if head is None:
            return
        matrix = embedding
        if head.name is not None:
            matrix = self._pack([Part(head.name, shape.vocab_size)], shape.hidden_size, head=True)
        self._add(op=Op.LINEAR, input=self._ASKED, out=self._LOGITS, cols=shape.hidden_size, matrix=matrix)
        if head.softcap is not None:
            width = padded(shape.vocab_size, self._panel)
            self._add(op=Op.SOFTCAP, out=self._LOGITS, cols=width, cap=head.softcap)
        self._add(op=Op.SAMPLE, input=self._LOGITS, cols=shape.vocab_size)

    def _norm(self, norm: Norm, source: int, target: int, after: After = After.STORE) -> None:
        self._add(
            op=Op.NORM, input=source, out=target, cols=norm.size, norm=self._weight(norm), eps=norm.eps, after=after
        )

    def _kind(self, part: Part) -> int:
        return self._sink.kind(f"{part.name}.weight")

    def _pack(self, parts: Sequence[Part], cols: int, *, head: bool = False, by_turns: bool = False) -> int:
        # Embedding and head tell one token from the next: they keep eight bits where layers have four.
        bits = 8 if head and self._bits else self._bits
        kind, rows = self._kind(parts[0]), sum(part.rows for part in parts)
        rows = 2 * padded(rows // 2, self._panel) if by_turns else rows
        quantized = kind in FLOATS and bits and cols % GROUP == 0
        self._precisions[f"int{bits}" if quantized else GGML_TYPES[kind].name] += rows * cols
        names = [f"{part.name}.weight" for part in parts]
        self._tensors.append(names)
        return self._sink.matrix(names, rows, cols, bits=bits, by_turns=by_turns)

    def _biases(self, parts: Sequence[Part], *, by_turns: bool = False) -> int:
        rows = sum(part.rows for part in parts)
        rows = 2 * padded(rows // 2, self._panel) if by_turns else rows
        return self._sink.vector([(f"{part.name}.bias", 1) for part in parts], rows, by_turns=by_turns)

    def _weight(self, norm: Norm) -> int:
        if norm not in self._norms:
            self._norms[norm] = self._sink.vector([(f"{norm.name}.weight", 1)], norm.size)
        return self._norms[norm]

    def _head_weights(self, norm: QKNorm) -> int:
        """A row for each head of queries and keys."""
        shape = self._model.shape
        counts = [(f"{norm.query.name}.weight", shape.num_heads), (f"{norm.key.name}.weight", shape.num_kv_heads)]
        return self._sink.vector(counts, (shape.num_heads + shape.num_kv_heads) * shape.head_dim)

    def _add(self, **values: object) -> None:
        self._steps.append(StepSpec(**values))  # type: ignore[arg-type]


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
