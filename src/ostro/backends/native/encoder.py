"""Runs encoders with the native core: whole texts, each in one step, without a KV cache. Knows no schedule and no text.

Batch -> arrays -> native calls -> pooled vectors. Imports no torch.
"""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from ostro.backends.native.profiler import NativeProfiler
from ostro.backends.pooling import token_types
from ostro.backends.precision import in_words
from ostro.engine.batch import Batch, Chunk
from ostro.engine.profile import Profiler
from ostro.engine.runner import RunnerSpec, Step, StepOutput
from ostro.kernels.cpu.library import Op
from ostro.kernels.cpu.packed_file import Floats, PackedFile
from ostro.kernels.cpu.program import Piece, Program
from ostro.models.encoder import Encoder
from ostro.models.tensor_errors import lacking, misshapen, no_place, not_finite, not_floats
from ostro.weights.encoder_files import dense_arrays
from ostro.weights.pooling import Dense, DenseActivation, Pooling, PoolingMode

_NO_PAGES = np.zeros(0, np.int32)
# So few tokens are done in a moment, and a call per layer would be a good part of it.
_FEW_TOKENS = 64


class NativeEncoderRunner:
    """Owns the program; keeps no state per text."""

    failure = None

    def __init__(
        self,
        packed: PackedFile,
        described: Encoder,
        pooling: Pooling | None = None,
        *,
        isa: str,
        max_batch_tokens: int = 1024,
        max_batch_seqs: int = 64,
        threads: int = 1,
    ) -> None:
        """`pooling` is None for a classifier only."""
        assert (pooling is None) == (described.head is not None), "an encoder either embeds or classifies"
        shape = described.shape
        self.strides = 0
        self._described = described
        self._mode: PoolingMode = "mean"
        if pooling is not None:
            self._mode = pooling.mode
        elif described.head is not None:
            self._mode = described.head.pooling
        self._dense = [DenseLayer(each) for each in (() if pooling is None else pooling.dense)]
        self.program = Program(
            packed,
            isa=isa,
            num_pages=0,
            # A step's last text is computed whole, even beyond the step's tokens. Unwritten memory is not taken.
            max_tokens=max_batch_tokens + shape.max_seq_len,
            max_asked=max_batch_seqs,
            threads=threads,
        )
        spec = self.program.spec
        layers = [at for at, step in enumerate(spec.steps) if step.op is Op.ATTEND_TEXT]
        self._stops = [*layers[1:], spec.logits_step]
        self._spec = RunnerSpec(
            # A page is a seat in the batch: it holds nothing.
            page_size=shape.max_seq_len,
            num_pages=2 * max_batch_seqs,
            max_seq_len=shape.max_seq_len,
            vocab_size=shape.vocab_size,
            max_batch_tokens=max_batch_tokens,
            max_batch_seqs=max_batch_seqs,
            keeps_kv=False,
            generates=False,
            is_invariant=True,
            backend=f"native ({isa})",
            precision=in_words(spec.precision.split(", "), None),
        )

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def profiler(self) -> Profiler:
        return NativeProfiler(self.program)

    def launch(self, batch: Batch) -> Step:
        output = self.run(batch)
        return Step(lambda: output)

    def run(self, batch: Batch) -> StepOutput:
        chunks = batch.chunks
        assert all(chunk.length == chunk.seq.num_tokens for chunk in chunks), "texts are computed whole"
        tokens = np.array([token for chunk in chunks for token in chunk.token_ids], np.int32)
        ends = np.cumsum([chunk.length for chunk in chunks], dtype=np.int32)
        starts = ends - np.array([chunk.length for chunk in chunks], np.int32)
        begins_at = self._described.embedding.first_position
        pieces = [
            Piece(int(row), begins_at, chunk.length, _NO_PAGES) for row, chunk in zip(starts, chunks, strict=True)
        ]
        asked = ends - 1 if self._mode == "lasttoken" else starts
        types, first = self._types(chunks), 0
        for last in self._stops if len(tokens) > _FEW_TOKENS else self._stops[-1:]:
            self.program.run(tokens, pieces, asked, types=types, first=first, last=last)
            first = last
            # A layer is done: a long text may take minutes, and must not look stuck.
            self.strides += 1
        pooled = self._pooled(pieces)
        vectors = pooled
        for dense in self._dense:
            vectors = dense(vectors)
        if self.program.spec.logits is not None:
            self.program.run(tokens, pieces, asked, first=first)
            vectors = self.program.buffer(self.program.spec.logits)[: len(chunks), : self.program.spec.labels]
        return StepOutput(pooled={chunk.seq.id: row for chunk, row in zip(chunks, vectors.tolist(), strict=True)})

    def _pooled(self, texts: Seq[Piece]) -> Floats:
        """[texts, hidden_size], in the buffer that a classifier reads."""
        spec = self.program.spec
        pooled = self.program.buffer(spec.hidden)[: len(texts), : spec.hidden_size]
        # The rows asked for are there already.
        if (pool := _POOLS.get(self._mode)) is not None:
            states = self.program.buffer(spec.states)[:, : spec.hidden_size]
            for text, to in zip(texts, pooled, strict=True):
                to[:] = pool(states[text.row : text.row + text.length])
        return pooled

    def _types(self, chunks: Seq[Chunk]) -> npt.NDArray[np.int32] | None:
        """Ones for the second texts of pairs, if the model tells them apart."""
        types = self._described.embedding.types
        if types is None or types.rows < 2 or not any(chunk.seq.request.second_at for chunk in chunks):
            return None
        return np.array([each for chunk in chunks for each in token_types(chunk)], np.int32)


def _weighted_mean(states: Floats) -> Floats:
    weights = np.arange(1, len(states) + 1, dtype=np.float32)
    mean: Floats = weights @ states / weights.sum()
    return mean


_POOLS: Mapping[PoolingMode, Callable[[Floats], Floats]] = {
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.max(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / np.sqrt(np.float32(len(states))),
    "weightedmean": _weighted_mean,
}


_erf = np.vectorize(math.erf, otypes=[np.float32])
_ACTIVATIONS: Mapping[DenseActivation, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + _erf(x / np.float32(math.sqrt(2)))) / 2,
    "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
}


class DenseLayer:
    def __init__(self, described: Dense) -> None:
        self._act = _ACTIVATIONS[described.activation]
        wanted: dict[str, tuple[int, ...]] = {"linear.weight": (described.rows, described.columns)}
        if described.bias:
            wanted["linear.bias"] = (described.rows,)
        found: dict[str, Floats] = {}
        for name, weight in dense_arrays(described):
            if name not in wanted:
                raise no_place(name)
            if weight.shape != wanted[name]:
                raise misshapen(name, weight.shape, wanted[name])
            if not weight.is_float:
                raise not_floats(name, weight.format_name)
            found[name] = np.array(weight.floats(), np.float32)
            if not np.isfinite(found[name]).all():
                raise not_finite(name)
        if missing := wanted.keys() - found.keys():
            raise lacking(missing)
        self._weight, self._bias = found["linear.weight"], found.get("linear.bias")

    def __call__(self, vectors: Floats) -> Floats:
        # Row by row, because a matmul of several rows sums in another order than a matmul of one.
        return np.stack([self._one(vector) for vector in vectors])

    def _one(self, vector: Floats) -> Floats:
        products: Floats = self._weight @ vector
        return self._act(products if self._bias is None else products + self._bias)
