"""Runs a batch with a torch model: Batch -> step plan -> model -> sampler. Knows no schedule and no text.

With several ranks this is the first: it sends each plan to the others, and samples alone.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from ostro.backends.draft_lanes import DraftLanes, Lane
from ostro.backends.memory import page_bytes
from ostro.backends.pooling import pooled_rows
from ostro.backends.precision import in_words
from ostro.backends.ranks.messages import Begin, Peers
from ostro.backends.sampling.sampler import position_logprobs, sample
from ostro.backends.torch.devices import format_name, weight_formats
from ostro.backends.torch.part import TorchPart
from ostro.backends.torch.profiler import TorchProfiler
from ostro.backends.torch.step_plan import Forward, Logits
from ostro.engine.batch import Batch, Chunk
from ostro.engine.drafter import MOST_DRAFTS
from ostro.engine.profile import Profiler
from ostro.engine.request import Task
from ostro.engine.runner import RunnerSpec, Step, StepOutput, TokenLogprob
from ostro.kernels.paged_attention import KVCache, Piece
from ostro.kernels.recurrent_state import StateCache, StateRows
from ostro.torch_models.base import Model
from ostro.torch_models.lora import Adapters
from ostro.weights import Pooling

# Prompt log-probabilities are computed in blocks of rows: never a whole prompt times the vocabulary.
_LOGITS_BLOCK_BYTES = 64 << 20


class TorchRunner:
    """Owns the model and its KV cache, and the other ranks' processes, if any."""

    def __init__(
        self,
        model: Model,
        *,
        page_size: int,
        num_pages: int,
        num_states: int = 0,
        max_batch_tokens: int = 512,
        max_batch_seqs: int = 64,
        pooling: Pooling | None = None,
        adapters: Adapters | None = None,
        ranks: Peers | None = None,
    ) -> None:
        """`num_states` is for models with recurrent states, which need one for each sequence that runs. With `ranks`,
        the model is the first rank's part, and the others have loaded theirs.
        """
        shape = model.shape
        parameter = next(model.parameters())
        self.model = model
        self.pooling = pooling
        self.adapters = adapters
        self._ranks = ranks
        # A step that advances states cannot be repeated, so these models never rely on it.
        self._all_finite = not model.states
        self.device = parameter.device
        number = 1 if ranks is None else ranks.ranks
        self._spec = RunnerSpec(
            page_size=page_size,
            num_pages=num_pages,
            max_seq_len=shape.max_seq_len,
            vocab_size=shape.vocab_size,
            max_batch_tokens=max_batch_tokens,
            max_batch_seqs=max_batch_seqs,
            generates=model.has_head,
            constrains=True,
            max_sampled=max(max_batch_seqs, MOST_DRAFTS + 1),
            num_states=num_states,
            state_bytes=number * model.state_bytes,
            pages_bytes=number
            * (page_bytes(shape, page_size, parameter.itemsize) * num_pages + num_states * model.state_bytes),
            device=self.device.type,
            devices=number,
            backend=f"torch ({self.device.type}" + (f", {number} devices)" if number > 1 else ")"),
            precision=in_words(weight_formats(model), format_name(parameter.dtype)),
        )
        self._part = TorchPart(
            model, page_size=page_size, num_pages=num_pages, num_states=num_states, adapters=adapters, ranks=number
        )
        self._lanes = DraftLanes(num_states)
        if ranks is not None:
            ranks.send(Begin(num_pages, num_states))

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def strides(self) -> int:
        return self._part.states.advanced

    def profiler(self) -> Profiler:
        return TorchProfiler(self.device)

    @property
    def cache(self) -> KVCache:
        return self._part.cache

    @property
    def states(self) -> StateCache:
        return self._part.states

    def note_overwritten(self, slot: int) -> None:
        """A state is about to be written to the slot, by no step's doing."""
        self._lanes.forget(slot)

    @property
    def failure(self) -> str | None:
        return None if self._ranks is None else self._ranks.failure

    def launch(self, batch: Batch) -> Step:
        output = self.run(batch)
        return Step(lambda: output)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        if self._ranks is None:
            return self._run(batch)
        with self._ranks.in_step():
            return self._run(batch)

    def _run(self, batch: Batch) -> StepOutput:
        slots: Seq[tuple[int, int]] = ()
        if self.adapters is not None:
            batch, slots = _by_adapter(batch, self.adapters)
        pieces = _pieces(batch.chunks)
        ids = [token for chunk in batch.chunks for token in chunk.token_ids]
        step = Forward(ids, pieces, batch.page_copies, slots, self._all_finite)
        if self.model.states:
            fresh = [chunk.state for chunk in batch.chunks if chunk.start == 0]
            lanes = self._lanes.begin(batch)
            states = [_state_rows(*each) for each in zip(batch.chunks, pieces, lanes, strict=True)]
            step = msgspec.structs.replace(step, states=states, fresh=fresh, state_copies=batch.state_copies)
        hidden = self._forward(step)
        if self._all_finite and not hidden.sum().isfinite():
            # A sequence overflowed, and its neighbours may have read it through a mask: avoid masks from now on.
            self._all_finite = False
            hidden = self._forward(msgspec.structs.replace(step, copies=(), masks=False))
        output = StepOutput()
        self._sample(batch.chunks, pieces, len(ids), output)
        for chunk, piece in zip(batch.chunks, pieces, strict=True):
            if chunk.scored:
                output.scored[chunk.seq.id] = self._score(chunk, piece)
            if chunk.seq.request.task is Task.EMBED:
                own = hidden[piece.offset : piece.offset + piece.length]
                pooled, divisor = pooled_rows(self.pooling, chunk)
                output.pooled[chunk.seq.id] = (own[pooled].sum(0) / divisor).tolist()
        return output

    def _forward(self, step: Forward) -> Tensor:
        if self._ranks is not None:
            self._ranks.send(step)
        return self._part.forward(step)

    def _logits(self, rows: Seq[int] | None) -> Tensor:
        asked = Logits(rows)
        if self._ranks is not None:
            self._ranks.send(asked)
        return self._part.logits(asked)

    def _sample(self, chunks: Seq[Chunk], pieces: Seq[Piece], num_tokens: int, output: StepOutput) -> None:
        """Draws from each row of logits that is asked for, once for each of its samplers."""
        samplers = [chunk.samplers for chunk in chunks]
        seqs = [seq for each in samplers for row in each for seq in row]
        if not seqs:
            return
        ends = [piece.offset + piece.length for piece in pieces]
        asked = [end - len(own) + at for end, own in zip(ends, samplers, strict=True) for at in range(len(own))]
        logits = self._logits(None if len(asked) == num_tokens else asked)
        if len(seqs) > len(asked):
            counts = torch.tensor([len(row) for own in samplers for row in own], device=self.device)
            logits = logits.repeat_interleave(counts, 0)
        drawn = iter(sample(logits, seqs))
        for chunk in chunks:
            output.sampled.update((seq.id, next(drawn)) for seq in chunk.samples)
            if chunk.drafts:
                output.followed[chunk.seq.id] = [next(drawn) for _ in chunk.drafts]

    def _score(self, chunk: Chunk, piece: Piece) -> list[TokenLogprob]:
        top = chunk.num_top
        targets = chunk.seq.token_ids[chunk.scored.start + 1 : chunk.scored.stop + 1]
        first = piece.offset + chunk.scored.start - chunk.start
        block = max(1, _LOGITS_BLOCK_BYTES // (4 * self._spec.vocab_size))
        found: list[TokenLogprob] = []
        for at in range(0, len(targets), block):
            some = targets[at : at + block]
            found += position_logprobs(self._logits(list(range(first + at, first + at + len(some)))), some, top)
        return found


def _state_rows(chunk: Chunk, piece: Piece, lane: Lane) -> StateRows:
    return StateRows(
        piece.offset,
        piece.length,
        chunk.state,
        chunk.captures,
        drafts=len(chunk.drafts),
        accepted=lane.applied,
        lane=lane.number,
    )


def _by_adapter(batch: Batch, adapters: Adapters) -> tuple[Batch, list[tuple[int, int]]]:
    """The same batch, sorted by adapter, and how many rows each has, in order."""
    slots = {chunk.seq.id: adapters.slot(chunk.seq.request.adapter) for chunk in batch.chunks}
    chunks = sorted(batch.chunks, key=lambda chunk: slots[chunk.seq.id])
    return replace(batch, chunks=tuple(chunks)), [(slots[chunk.seq.id], chunk.num_rows) for chunk in chunks]


def _pieces(chunks: Seq[Chunk]) -> list[Piece]:
    pieces, offset = [], 0
    for chunk in chunks:
        pieces.append(Piece(offset, chunk.start, chunk.num_rows, chunk.seq.pages))
        offset += chunk.num_rows
    return pieces
