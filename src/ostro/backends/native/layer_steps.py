"""Steps that decoders' and encoders' layers have in common: matmuls, norms, MLPs. Imports neither torch nor numpy.

Weights go by name to a sink (`backends.native.sinks`).
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ostro.backends.native.sinks import Sink, padded, padded_rows
from ostro.backends.native.support import ACTIVATIONS, GATED, NotNative
from ostro.formats.gguf_header import GGML_TYPES
from ostro.kernels.cpu.library import GROUP, After, Op
from ostro.kernels.cpu.program_spec import BufferSpec, StepSpec
from ostro.models.architecture import MLP, ModelShape, Norm, Part, Projection

_FLOATS = frozenset({0, 1, 30})
"""GGUF's type numbers of float32, float16 and bfloat16."""
BUFFER_COLS = 64
"""Buffers' rows are padded to a multiple of this."""


class Read(NamedTuple):
    """The input of a matmul: a buffer, and the RMS norm fused into the matmul, if any."""

    input: int
    norm: int | None = None
    eps: float = 0.0


class LayerSteps:
    """Collects steps. The first buffers: the residual stream, a scratch row beside it, q/k/v, attention output, the
    MLP's inner states.
    """

    _STREAM, _BESIDE, _QKV, _ATTENDED, _INNER = range(5)

    def __init__(self, shape: ModelShape, sink: Sink, *, bits: int) -> None:
        """Layers' floats are packed in this many bits; 0 keeps every tensor's own precision."""
        self._shape, self._sink = shape, sink
        self._panel, self._bits = sink.panel, bits
        # The embedding and head distinguish tokens: they keep 8 bits even if layers have 4.
        self._token_bits = 8 if bits else 0
        self._steps: list[StepSpec] = []
        self._vectors: dict[str, int] = {}
        self._zeros: dict[int, int] = {}
        self._precisions: Counter[str] = Counter()
        self._tensors: list[list[str]] = []
        self._widths: Counter[int] = Counter()
        """Columns that buffers have at least."""

    def _add_beside(self, scale: float) -> None:
        cols = self._shape.hidden_size
        self._add(op=Op.SCALE, input=self._BESIDE, out=self._STREAM, cols=cols, scale=scale, after=After.ADD)

    def _normed_stream(self, norm: Norm | None) -> Read:
        if norm is None:
            return Read(self._STREAM)
        if norm.kind == "rms":
            return Read(self._STREAM, self._weight(norm), norm.eps)
        self._norm(norm, self._STREAM, self._BESIDE)
        return Read(self._BESIDE)

    def _queries_keys_values(self, qkv: Projection, read: Read, *, at: int = 0, bits: int | None = None) -> None:
        # Consecutive parts of the same type form one matrix. What one's padding writes, the next one overwrites.
        for _, group in groupby(qkv.parts, key=self._kind):
            parts = list(group)
            rows = sum(part.rows for part in parts)
            self._add(
                op=Op.LINEAR,
                **read._asdict(),
                out=self._QKV,
                out_at=at,
                cols=qkv.columns,
                bias=self._biases(parts) if qkv.bias else None,
                matrix=self._pack(parts, qkv.columns, bits=bits),
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

    def _gate_and_up(self, mlp: MLP, read: Read) -> None:
        """Interleaves panels of gates and ups, so that one thread computes both and multiplies them."""
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
        source: int | Read,
        target: int,
        after: After = After.STORE,
        *,
        bits: int | None = None,
    ) -> None:
        read = Read(source) if isinstance(source, int) else source
        self._add(
            op=Op.LINEAR,
            **read._asdict(),
            out=target,
            cols=projection.columns,
            after=after,
            bias=self._biases(projection.parts) if projection.bias else None,
            matrix=self._pack(projection.parts, projection.columns, bits=bits),
        )

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
        if len({self._kind(part) for part in parts}) > 1:
            raise NotNative(f"parts of one matrix, such as {parts[0].name}, are kept in different types")
        kind, rows = self._kind(parts[0]), sum(part.rows for part in parts)
        rows = padded_rows(rows, self._panel, by_turns=True) if by_turns else rows
        self._count_precision(kind, rows * cols, cols, bits)
        names = [f"{part.name}.weight" for part in parts]
        self._tensors.append(names)
        return self._sink.matrix(names, rows, cols, bits=bits, by_turns=by_turns)

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
        """A layer norm's bias; zeros if it has none, because the kernel always adds one."""
        if norm.biased:
            return self._vector(f"{norm.name}.bias", norm.size)
        if norm.size not in self._zeros:
            self._zeros[norm.size] = self._sink.vector([], norm.size)
        return self._zeros[norm.size]

    def _vector(self, name: str, size: int) -> int:
        if name not in self._vectors:
            self._vectors[name] = self._sink.vector([(name, 1)], size)
        return self._vectors[name]

    def _add(self, **values: object) -> None:
        self._steps.append(StepSpec(**values))  # type: ignore[arg-type]

    @property
    def _precision(self) -> str:
        """The weights' formats, in words."""
        return ", ".join(name for name, _ in self._precisions.most_common())

    def _layer_buffers(self, inner: int) -> list[BufferSpec]:
        """The first buffers, for inner states of this width."""
        shape = self._shape
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        widths = (shape.hidden_size, shape.hidden_size, qkv, shape.num_heads * shape.head_dim, inner)
        for buffer, width in enumerate(widths):
            self._widen(buffer, width)
        return [BufferSpec(cols=padded(self._widths[buffer], BUFFER_COLS)) for buffer in range(len(widths))]

    def _widen(self, buffer: int, cols: int) -> None:
        """Gives one of the first buffers this many columns, unless it has more."""
        self._widths[buffer] = max(self._widths[buffer], cols)
