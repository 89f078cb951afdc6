"""Runs encoders: whole texts, each in one step, without a KV cache. Batch -> rows -> model -> pooled vectors.
Knows no schedule and no text.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from ostro.backends.memory import second_layout_fits
from ostro.backends.pooling import token_types
from ostro.backends.precision import in_words
from ostro.backends.torch.devices import weight_formats
from ostro.backends.torch.profiler import TorchProfiler
from ostro.engine.batch import Batch, Chunk
from ostro.engine.profile import Profiler
from ostro.engine.runner import RunnerSpec, Step, StepOutput
from ostro.models.tensor_errors import lacking, misshapen
from ostro.system.machine import free_memory
from ostro.torch_models.encoder import EncoderModel
from ostro.torch_models.layers import Linear
from ostro.torch_models.loading import Place, fill
from ostro.torch_models.ragged import Ragged
from ostro.weights.encoder_files import dense_tensors
from ostro.weights.pooling import Dense, DenseActivation, Pooling, PoolingMode

_ACTIVATIONS: Mapping[DenseActivation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}


class EncoderRunner:
    """Owns the model; keeps no state per text."""

    failure = None

    def __init__(
        self,
        model: EncoderModel,
        pooling: Pooling | None = None,
        *,
        max_batch_tokens: int = 2048,
        max_batch_seqs: int = 64,
    ) -> None:
        """`pooling` is None for a classifier only."""
        assert (pooling is None) == (model.head is not None), "an encoder either embeds or classifies"
        shape, parameter = model.shape, next(model.parameters())
        self.model, self.device = model, parameter.device
        self.strides = 0
        self._mode: PoolingMode = "mean"
        if pooling is not None:
            self._mode = pooling.mode
        elif model.described.head is not None:
            self._mode = model.described.head.pooling
        self._dense = [DenseLayer(each, like=parameter) for each in (() if pooling is None else pooling.dense)]
        self._pack()
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
            device=self.device.type,
            backend=f"torch ({self.device.type})",
            precision=in_words(weight_formats(model), None),
        )

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def profiler(self) -> Profiler:
        return TorchProfiler(self.device)

    def launch(self, batch: Batch) -> Step:
        output = self.run(batch)
        return Step(lambda: output)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        # Sorted by length, because attention batches texts of equal length.
        chunks = sorted(batch.chunks, key=lambda chunk: chunk.length)
        assert all(chunk.length == chunk.seq.num_tokens for chunk in chunks), "texts are computed whole"
        layout = Ragged([chunk.length for chunk in chunks], self.device)
        ids = self._tensor(chain.from_iterable(chunk.token_ids for chunk in chunks))
        hidden = self.model(ids, self._types(chunks), layout, self._stride)
        vectors = pool(self._mode, hidden, layout)
        for dense in self._dense:
            vectors = dense(vectors)
        if self.model.head is not None:
            vectors = self.model.classify(vectors)
        found = vectors.float().tolist()
        return StepOutput(pooled={chunk.seq.id: row for chunk, row in zip(chunks, found, strict=True)})

    def _stride(self) -> None:
        """Reports a finished layer: a long text may take minutes, and must not look stuck."""
        self.strides += 1

    def _types(self, chunks: Seq[Chunk]) -> Tensor | None:
        """Ones for the second texts of pairs, if the model tells them apart."""
        types = self.model.described.embedding.types
        if types is None or types.rows < 2 or not any(chunk.seq.request.second_at for chunk in chunks):
            return None
        return self._tensor(chain.from_iterable(token_types(chunk) for chunk in chunks))

    def _tensor(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=self.device)

    def _pack(self) -> None:
        """Trades memory for speed, unless memory is short."""
        matrices = [module for module in self.model.modules() if isinstance(module, Linear)]
        if self.device.type == "cpu" and second_layout_fits(
            sum(matrix.weight.nbytes for matrix in matrices), free_memory()
        ):
            for matrix in matrices:
                matrix.pack()


class DenseLayer:
    """A module of sentence-transformers that follows the pooling."""

    def __init__(self, described: Dense, *, like: Tensor) -> None:
        self._act = _ACTIVATIONS[described.activation]
        tensors, shape = dict(dense_tensors(described)), (described.rows, described.columns)
        # Checked before memory is allocated: the sizes come from a config.
        if (weight := tensors.get("linear.weight")) is not None and weight.shape != shape:
            raise misshapen("linear.weight", weight.shape, shape)
        if weight is None:
            raise lacking(["linear.weight"])
        self._weight = like.new_empty(described.rows, described.columns)
        self._bias = like.new_empty(described.rows) if described.bias else None
        places = {"linear.weight": Place(self._weight)}
        if self._bias is not None:
            places["linear.bias"] = Place(self._bias)
        fill(places, tensors.items())

    def __call__(self, vectors: Tensor) -> Tensor:
        return self._act(F.linear(vectors, self._weight, self._bias))


def pool(mode: PoolingMode, hidden: Tensor, layout: Ragged) -> Tensor:
    """[rows, hidden] -> [texts, hidden], in float32 where rows are summed up."""
    parts = [hidden[run.start : run.end].unflatten(0, (run.count, run.length)) for run in layout.runs]
    return torch.cat([_POOLS[mode](part) for part in parts]).to(hidden.dtype)


def _weighted_mean(texts: Tensor) -> Tensor:
    weights = torch.arange(1, texts.shape[1] + 1, device=texts.device, dtype=torch.float32)
    return (texts * weights[:, None]).sum(1) / weights.sum()


_POOLS: Mapping[PoolingMode, Callable[[Tensor], Tensor]] = {
    "mean": lambda texts: texts.mean(1, dtype=torch.float32),
    "cls": lambda texts: texts[:, 0],
    "lasttoken": lambda texts: texts[:, -1],
    "max": lambda texts: texts.amax(1),
    "mean_sqrt_len_tokens": lambda texts: texts.sum(1, dtype=torch.float32) / texts.shape[1] ** 0.5,
    "weightedmean": _weighted_mean,
}
