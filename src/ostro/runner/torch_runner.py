"""Runs a batch with a torch model: Batch -> tensors -> model -> sampler. Knows no schedule and no text."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ostro.engine.batch import Batch, Chunk
from ostro.engine.profile import Profiler
from ostro.engine.request import Task
from ostro.engine.runner import RunnerSpec, Step, StepOutput, TokenLogprob
from ostro.kernels.paged_attention import PagedAttention, Piece
from ostro.machine import free_memory
from ostro.runner.devices import format_name, weight_formats
from ostro.runner.memory import page_bytes, second_layout_fits
from ostro.runner.pooling import pooled_rows
from ostro.runner.precision import in_words
from ostro.runner.sampler import position_logprobs, sample
from ostro.runner.torch_profiler import TorchProfiler
from ostro.torch_models.base import Model
from ostro.torch_models.layers import Matrix
from ostro.torch_models.lora import Adapters
from ostro.weights import Pooling

# Prompt log-probabilities are computed in blocks of rows: never a whole prompt times the vocabulary.
_LOGITS_BLOCK_BYTES = 64 << 20


class TorchRunner:
    """Owns the model and its KV cache."""

    strides = 0

    def __init__(
        self,
        model: Model,
        *,
        page_size: int,
        num_pages: int,
        max_batch_tokens: int = 512,
        max_batch_seqs: int = 64,
        pooling: Pooling | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        shape = model.shape
        parameter = next(model.parameters())
        self.model = model
        self.pooling = pooling
        self.adapters = adapters
        self._packed = False
        self._all_finite = True
        self.device = parameter.device
        self._spec = RunnerSpec(
            page_size=page_size,
            num_pages=num_pages,
            max_seq_len=shape.max_seq_len,
            vocab_size=shape.vocab_size,
            max_batch_tokens=max_batch_tokens,
            max_batch_seqs=max_batch_seqs,
            generates=model.has_head,
            constrains=True,
            pages_bytes=page_bytes(shape, page_size, parameter.itemsize) * num_pages,
            device=self.device.type,
            backend=f"torch ({self.device.type})",
            precision=in_words(weight_formats(model), format_name(parameter.dtype)),
        )
        self.cache = _zeros((shape.num_layers, 2, shape.num_kv_heads, num_pages * page_size, shape.head_dim), parameter)

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
        if not self._packed and batch.num_tokens > 1:
            self._pack_weights()
        if self.adapters is not None:
            batch = _by_adapter(batch, self.adapters)
        self._copy_pages(batch.page_copies)
        pieces = _pieces(batch.chunks)
        hidden = self._forward(batch, pieces)
        if self._all_finite and not hidden.sum().isfinite():
            # A sequence overflowed, and its neighbours may have read it through a mask: avoid masks from now on.
            self._all_finite = False
            hidden = self._forward(batch, pieces)
        output = StepOutput()
        self._sample(batch.chunks, pieces, hidden, output)
        for chunk, piece in zip(batch.chunks, pieces, strict=True):
            if chunk.scored:
                first = piece.offset + chunk.scored.start - chunk.start
                rows = hidden[first : first + len(chunk.scored)]
                output.scored[chunk.seq.id] = self._score(chunk, rows)
            if chunk.seq.request.task is Task.EMBED:
                own = hidden[piece.offset : piece.offset + piece.length]
                pooled, divisor = pooled_rows(self.pooling, chunk)
                output.pooled[chunk.seq.id] = (own[pooled].sum(0) / divisor).tolist()
        return output

    def _forward(self, batch: Batch, pieces: Seq[Piece]) -> Tensor:
        """Hidden states of all tokens in the batch. Idempotent."""
        ids = [token for chunk in batch.chunks for token in chunk.seq.token_ids[chunk.start : chunk.end]]
        positions = [position for chunk in batch.chunks for position in range(chunk.start, chunk.end)]
        return self.model(
            torch.tensor(ids, device=self.device),
            torch.tensor(positions, device=self.device),
            PagedAttention(self.cache, pieces, self._spec.page_size, masks=self._all_finite),
        )

    def _pack_weights(self) -> None:
        """Trades memory for speed once several tokens are computed together, unless memory is short."""
        self._packed = True
        matrices = [module for module in self.model.modules() if isinstance(module, Matrix)]
        size = sum(matrix.weight.nbytes for matrix in matrices)
        if self.device.type == "cpu" and second_layout_fits(size, free_memory()):
            for matrix in matrices:
                matrix.pack()

    def _sample(self, chunks: Seq[Chunk], pieces: Seq[Piece], hidden: Tensor, output: StepOutput) -> None:
        """One row of logits per sampling chunk, drawn from once for each of its samplers."""
        seqs = [seq for chunk in chunks for seq in chunk.samples]
        if not seqs:
            return
        ends = [p.offset + p.length - 1 for c, p in zip(chunks, pieces, strict=True) if c.samples]
        logits = self.model.logits(hidden if len(ends) == len(hidden) else hidden[ends])
        if len(seqs) > len(ends):
            counts = torch.tensor([len(chunk.samples) for chunk in chunks if chunk.samples], device=self.device)
            logits = logits.repeat_interleave(counts, 0)
        output.sampled.update(zip((seq.id for seq in seqs), sample(logits, seqs), strict=True))

    def _score(self, chunk: Chunk, hidden: Tensor) -> list[TokenLogprob]:
        top = chunk.num_top
        targets = chunk.seq.token_ids[chunk.scored.start + 1 : chunk.scored.stop + 1]
        block = max(1, _LOGITS_BLOCK_BYTES // (4 * self._spec.vocab_size))
        return [
            logprob
            for at in range(0, len(targets), block)
            for logprob in position_logprobs(self.model.logits(hidden[at : at + block]), targets[at : at + block], top)
        ]

    def _copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        size = self._spec.page_size
        for source, target in copies:
            self.cache[..., target * size : (target + 1) * size, :] = self.cache[
                ..., source * size : (source + 1) * size, :
            ]


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros that on a CPU take no memory until they are touched."""
    if like.device.type == "cpu" and like.dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _by_adapter(batch: Batch, adapters: Adapters) -> Batch:
    """The same batch, sorted by adapter; tells the adapters which rows are whose."""
    slots = {chunk.seq.id: adapters.slot(chunk.seq.request.adapter) for chunk in batch.chunks}
    chunks = sorted(batch.chunks, key=lambda chunk: slots[chunk.seq.id])
    adapters.begin((slots[chunk.seq.id], chunk.length) for chunk in chunks)
    return replace(batch, chunks=tuple(chunks))


def _pieces(chunks: Seq[Chunk]) -> list[Piece]:
    pieces, offset = [], 0
    for chunk in chunks:
        pieces.append(Piece(offset, chunk.start, chunk.length, chunk.seq.pages))
        offset += chunk.length
    return pieces
