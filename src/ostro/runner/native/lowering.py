"""Translates a model's description into the native core's steps and packed tensors. Knows no family by name.

Imports neither torch nor numpy: weights go by name to a sink (`runner.native.sinks`).
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from ctypes import c_float
from itertools import groupby
from typing import NamedTuple

from ostro.formats.gguf_header import GGML_TYPES
from ostro.kernels.cpu.library import GROUP, After, Op
from ostro.kernels.cpu.program_spec import BufferSpec, ProgramSpec, StepSpec
from ostro.models.architecture import (
    MLP,
    Architecture,
    Attention,
    ExpertMatrices,
    Experts,
    Layer,
    Norm,
    Part,
    Projection,
    QKNorm,
)
from ostro.runner.native.sinks import Sink, padded, padded_rows
from ostro.runner.native.support import ACTIVATIONS, GATED, NotNative, WrongPanel

_FLOATS = frozenset({0, 1, 30})
"""GGUF's type numbers of float32, float16 and bfloat16."""
_BUFFER_COLS = 64
_NO_ROTATION = -1
_LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)


class _Read(NamedTuple):
    """The input of a matmul: a buffer, and the RMS norm fused into the matmul, if any."""

    input: int
    norm: int | None = None
    eps: float = 0.0


class Lowering:
    """Buffer numbers: the residual stream, a scratch row beside it, q/k/v, attention output, the MLP's inner states,
    the rows whose output is requested, their logits. With experts also the router's logits, and rows per token and
    expert: inner states, outputs.
    """

    _STREAM, _BESIDE, _QKV, _ATTENDED, _INNER, _ASKED, _LOGITS, _ROUTED, _SLOTS, _SLOTS_OUT = range(10)

    def __init__(self, described: Architecture, sink: Sink, *, bits: int) -> None:
        """Layers' floats are packed in this many bits; 0 keeps every tensor's own precision."""
        self._model, self._sink = described, sink
        self._panel, self._bits = sink.panel, bits
        # The embedding and head distinguish tokens: they keep 8 bits even if layers have 4.
        self._token_bits = 8 if bits else 0
        self._steps: list[StepSpec] = []
        self._vectors: dict[str, int] = {}
        self._zeros: dict[int, int] = {}
        self._precisions: Counter[str] = Counter()
        self._tensors: list[list[str]] = []

    def program(self) -> ProgramSpec:
        model, shape = self._model, self._model.shape
        embedding = self._embed()
        rotations = [self._sink.rotation(rope, shape) for rope in model.ropes]
        inner = self._panel
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
        buffers += self._expert_buffers()
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

    def _expert_buffers(self) -> list[BufferSpec]:
        mixtures = [layer.mlp for layer in self._model.layers if isinstance(layer.mlp, Experts)]
        if not mixtures:
            return []
        logits = max(padded(each.count, self._panel) for each in mixtures)
        inner = max(padded(each.down.columns, self._panel) for each in mixtures)
        chosen = max(each.chosen for each in mixtures)
        return [
            BufferSpec(cols=padded(logits, _BUFFER_COLS)),
            BufferSpec(cols=padded(inner, _BUFFER_COLS), per_token=chosen),
            BufferSpec(cols=padded(self._model.shape.hidden_size, _BUFFER_COLS), per_token=chosen),
        ]

    def _embed(self) -> int:
        embedding, shape = self._model.embedding, self._model.shape
        matrix = self._pack([Part(embedding.name, shape.vocab_size)], shape.hidden_size, bits=self._token_bits)
        # Rounded to float32, in which the embedding is computed.
        scale = c_float(embedding.scale).value
        self._add(op=Op.EMBED, out=self._STREAM, matrix=matrix, cols=shape.hidden_size, scale=scale)
        if embedding.positions is not None:
            positions = self._pack([embedding.positions], shape.hidden_size, bits=0)
            self._add(op=Op.POSITION, out=self._BESIDE, matrix=positions, cols=shape.hidden_size)
            self._add_beside(1.0)
        return matrix

    def _layer(self, layer: Layer, number: int) -> int:
        """Adds the layer's steps; returns the width of its inner states."""
        attention, scale, inner = layer.attention, layer.residual_scale, 0
        self._attention(attention, layer.attention_norm, number)
        if layer.parallel:
            inner = self._up(layer.dense, layer.mlp_norm)
        self._add_to_stream(attention.output, self._ATTENDED, layer.attention_post_norm, scale)
        if isinstance(layer.mlp, Experts):
            return self._experts(layer.mlp, layer.mlp_norm, layer.mlp_post_norm, scale)
        if not layer.parallel:
            inner = self._up(layer.dense, layer.mlp_norm)
        self._add_to_stream(layer.dense.down, self._INNER, layer.mlp_post_norm, scale)
        return inner

    def _experts(self, mixture: Experts, norm: Norm | None, post_norm: Norm | None, scale: float) -> int:
        """Adds a mixture's steps; returns the width of its shared MLP's inner states, if it has one."""
        read, width = self._normed_stream(norm), 0
        which = {"experts": mixture.count, "chosen": mixture.chosen}
        # Which experts are chosen changes with the last bits of the router.
        self._product(mixture.router, read, self._ROUTED, bits=0)
        self._add(op=Op.ROUTE, input=self._ROUTED, normalized=mixture.normalized, **which)
        self._add(
            op=Op.EXPAND,
            **read._asdict(),
            out=self._SLOTS,
            cols=mixture.up.columns,
            after=GATED[mixture.activation],
            matrix=self._pack_experts(mixture.up, by_turns=True),
            **which,
        )
        matrix, cols = self._pack_experts(mixture.down), mixture.down.columns
        self._add(op=Op.EXPERT, input=self._SLOTS, out=self._SLOTS_OUT, cols=cols, matrix=matrix, **which)
        # The shared MLP reads the stream before anything is added to it.
        if mixture.shared is not None:
            width = self._up(mixture.shared, norm)
            if mixture.shared_gate is not None:
                self._product(mixture.shared_gate, read, self._ROUTED, bits=0)
                self._add(op=Op.GATE, input=self._ROUTED, out=self._INNER, cols=width)
        added = {"input": self._SLOTS_OUT, "cols": self._model.shape.hidden_size}
        if post_norm is None:
            self._add(op=Op.COMBINE, out=self._STREAM, scale=scale, after=After.ADD, **added, **which)
            if mixture.shared is not None:
                self._add_to_stream(mixture.shared.down, self._INNER, None, scale)
            return width
        self._add(op=Op.COMBINE, out=self._BESIDE, **added, **which)
        if mixture.shared is not None:
            self._product(mixture.shared.down, self._INNER, self._BESIDE, after=After.ADD)
        self._norm(post_norm, self._BESIDE, self._BESIDE)
        self._add_beside(scale)
        return width

    def _add_to_stream(self, projection: Projection, source: int, norm: Norm | None, scale: float) -> None:
        if norm is None and scale == 1.0:
            self._product(projection, source, self._STREAM, after=After.ADD)
            return
        self._product(projection, source, self._BESIDE)
        if norm is not None and norm.kind == "rms" and scale == 1.0:
            self._norm(norm, self._BESIDE, self._STREAM, after=After.ADD)
            return
        if norm is not None:
            self._norm(norm, self._BESIDE, self._BESIDE)
        self._add_beside(scale)

    def _add_beside(self, scale: float) -> None:
        cols = self._model.shape.hidden_size
        self._add(op=Op.SCALE, input=self._BESIDE, out=self._STREAM, cols=cols, scale=scale, after=After.ADD)

    def _normed_stream(self, norm: Norm | None) -> _Read:
        if norm is None:
            return _Read(self._STREAM)
        if norm.kind == "rms":
            return _Read(self._STREAM, self._weight(norm), norm.eps)
        self._norm(norm, self._STREAM, self._BESIDE)
        return _Read(self._BESIDE)

    def _attention(self, attention: Attention, norm: Norm | None, number: int) -> None:
        spec, qk_norm = attention.spec, attention.qk_norm
        self._queries_keys_values(attention.qkv, self._normed_stream(norm))
        if qk_norm is not None and qk_norm.over == "width":
            self._norm(qk_norm.query, self._QKV, self._QKV)
            self._norm(qk_norm.key, self._QKV, self._QKV, at=qk_norm.query.size)
            qk_norm = None
        self._add(
            op=Op.ATTEND,
            input=self._QKV,
            out=self._ATTENDED,
            layer=number,
            rotation=_NO_ROTATION if attention.rope is None else attention.rope,
            window=spec.window or 0,
            scale=spec.scale,
            cap=spec.softcap or 0.0,
            norm=None if qk_norm is None else self._head_weights(qk_norm),
            eps=0.0 if qk_norm is None else qk_norm.query.eps,
        )

    def _queries_keys_values(self, qkv: Projection, read: _Read) -> None:
        at = 0
        # Consecutive parts of the same type form one matrix.
        for _, group in groupby(qkv.parts, key=self._kind):
            parts = list(group)
            rows = sum(part.rows for part in parts)
            if rows % self._panel:
                raise WrongPanel(f"its projections have {rows} rows, not a multiple of {self._panel}")
            self._add(
                op=Op.LINEAR,
                **read._asdict(),
                out=self._QKV,
                out_at=at,
                cols=qkv.columns,
                bias=self._biases(parts) if qkv.bias else None,
                matrix=self._pack(parts, qkv.columns),
            )
            at += rows

    def _up(self, mlp: MLP, norm: Norm | None) -> int:
        """Computes the inner states; returns their width."""
        read, width = self._normed_stream(norm), padded(mlp.down.columns, self._panel)
        if mlp.gated:
            self._gate_and_up(mlp, read)
        else:
            self._product(mlp.up, read, self._INNER)
            self._add(op=Op.APPLY, out=self._INNER, cols=width, after=ACTIVATIONS[mlp.activation])
        return width

    def _gate_and_up(self, mlp: MLP, read: _Read) -> None:
        """Interleaves panels of gates and ups, so that whichever thread has computed both multiplies them."""
        up = mlp.up
        if len({self._kind(part) for part in up.parts}) > 1:
            raise NotNative("its gates and ups are kept in different types")
        self._add(
            op=Op.LINEAR,
            **read._asdict(),
            out=self._INNER,
            cols=up.columns,
            after=GATED[mlp.activation],
            bias=self._biases(up.parts, by_turns=True) if up.bias else None,
            matrix=self._pack(up.parts, up.columns, by_turns=True),
        )

    def _product(
        self,
        projection: Projection,
        source: int | _Read,
        target: int,
        after: After = After.STORE,
        *,
        bits: int | None = None,
    ) -> None:
        read = _Read(source) if isinstance(source, int) else source
        self._add(
            op=Op.LINEAR,
            **read._asdict(),
            out=target,
            cols=projection.columns,
            after=after,
            bias=self._biases(projection.parts) if projection.bias else None,
            matrix=self._pack(projection.parts, projection.columns, bits=bits),
        )

    def _head(self, embedding: int) -> None:
        head, shape = self._model.head, self._model.shape
        if head is None:
            return
        matrix = embedding
        if head.name is not None:
            matrix = self._pack([Part(head.name, shape.vocab_size)], shape.hidden_size, bits=self._token_bits)
        self._add(op=Op.LINEAR, input=self._ASKED, out=self._LOGITS, cols=shape.hidden_size, matrix=matrix)
        width = padded(shape.vocab_size, self._panel)
        if head.scale != 1.0:
            self._add(op=Op.SCALE, input=self._LOGITS, out=self._LOGITS, cols=width, scale=head.scale)
        if head.softcap is not None:
            self._add(op=Op.SOFTCAP, out=self._LOGITS, cols=width, cap=head.softcap)
        self._add(op=Op.SAMPLE, input=self._LOGITS, cols=shape.vocab_size)

    def _norm(self, norm: Norm, source: int, target: int, *, at: int = 0, after: After = After.STORE) -> None:
        self._add(
            op=Op.NORM,
            input=source,
            in_at=at,
            out=target,
            out_at=at,
            cols=norm.size,
            norm=self._weight(norm),
            bias=self._bias(norm) if norm.kind == "layer" else None,
            eps=norm.eps,
            after=after,
        )

    def _kind(self, part: Part) -> int:
        return self._sink.kind(f"{part.name}.weight")

    def _pack(self, parts: Sequence[Part], cols: int, *, bits: int | None = None, by_turns: bool = False) -> int:
        bits = self._bits if bits is None else bits
        kind, rows = self._kind(parts[0]), sum(part.rows for part in parts)
        rows = padded_rows(rows, self._panel, by_turns=True) if by_turns else rows
        self._count_precision(kind, rows * cols, cols, bits)
        names = [f"{part.name}.weight" for part in parts]
        self._tensors.append(names)
        return self._sink.matrix(names, rows, cols, bits=bits, by_turns=by_turns)

    def _pack_experts(self, matrices: ExpertMatrices, *, by_turns: bool = False) -> int:
        rows, cols = matrices.experts * matrices.rows, matrices.columns
        self._count_precision(self._sink.kind(next(matrices.tensors()).name), rows * cols, cols, self._bits)
        self._tensors.append([f"{part.name}.weight" for part in matrices.parts])
        return self._sink.experts(matrices, bits=self._bits, by_turns=by_turns)

    def _count_precision(self, kind: int, values: int, cols: int, bits: int) -> None:
        quantized = kind in _FLOATS and bits and cols % GROUP == 0
        self._precisions[f"int{bits}" if quantized else GGML_TYPES[kind].name] += values

    def _biases(self, parts: Sequence[Part], *, by_turns: bool = False) -> int:
        rows = sum(part.rows for part in parts)
        rows = padded_rows(rows, self._panel, by_turns=by_turns)
        return self._sink.vector([(f"{part.name}.bias", 1) for part in parts], rows, by_turns=by_turns)

    def _weight(self, norm: Norm) -> int:
        return self._vector(f"{norm.name}.weight", norm.size)

    def _bias(self, norm: Norm) -> int:
        """A layer norm's: the kernel always adds one."""
        if norm.biased:
            return self._vector(f"{norm.name}.bias", norm.size)
        if norm.size not in self._zeros:
            self._zeros[norm.size] = self._sink.vector([], norm.size)
        return self._zeros[norm.size]

    def _vector(self, name: str, size: int) -> int:
        if name not in self._vectors:
            self._vectors[name] = self._sink.vector([(name, 1)], size)
        return self._vectors[name]

    def _head_weights(self, norm: QKNorm) -> int:
        """A row per query and key head."""
        shape = self._model.shape
        counts = [(f"{norm.query.name}.weight", shape.num_heads), (f"{norm.key.name}.weight", shape.num_kv_heads)]
        return self._sink.vector(counts, (shape.num_heads + shape.num_kv_heads) * shape.head_dim)

    def _add(self, **values: object) -> None:
        self._steps.append(StepSpec(**values))  # type: ignore[arg-type]
