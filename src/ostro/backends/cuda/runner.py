"""Runs batches on a GPU: `launch` queues a step and returns, so that the next can be prepared while it runs.

A step with one token per sequence is replayed as a CUDA graph, sampling included; its inputs are first copied to fixed
device buffers. A step with short prompts is a graph too, up to its sampling (`backends.cuda.mixed_graphs`). Any other
step launches its kernels individually: with many tokens launch overhead is negligible, and with adapters the matmuls
depend on which rows the step has.

Each is planned here, on the host, and carried out by a `GpuPart`: on several ranks by one each, at the same time. Only
the first rank, this one, samples; its tokens go to the others on the device.

If a token that is not known yet decides what a constrained sequence may sample, the step is queued without sampling,
which follows as a graph of its own once the masks are known: usually while the device is still computing the step.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ostro.backends.cuda.decode_rows import DecodeRows, asked_logprobs, edits, masks_unknown
from ostro.backends.cuda.determinism import check_deterministic
from ostro.backends.cuda.graphs import StepGraphs
from ostro.backends.cuda.host_store import HostStore
from ostro.backends.cuda.layer_plan import can_capture, why_unfused
from ostro.backends.cuda.mixed_graphs import max_graph_tokens
from ostro.backends.cuda.part import GpuPart
from ostro.backends.cuda.projections import PackedLinear, QuantizedLinear
from ostro.backends.cuda.sampling import DrawnTokens, Sampler, TokenMasks, edited, failure, masked
from ostro.backends.cuda.shared_prefixes import PrefixLimits, SharedPrefixes
from ostro.backends.cuda.step_plan import (
    Array,
    Decode,
    GpuStep,
    Head,
    Mixed,
    Prelude,
    SamplerKind,
    StateChunks,
    StepKind,
    Tokens,
)
from ostro.backends.cuda.tiers import check_disk, check_host_memory, page_store, trial_stores
from ostro.backends.cuda.transfer import fetch, send
from ostro.backends.memory import Room, gpu_room
from ostro.backends.pooling import pooled_rows
from ostro.backends.precision import in_words, with_cpu_experts
from ostro.backends.ranks.messages import Begin, Peers
from ostro.backends.sampling.logprobs import logprob_table, read_logprobs
from ostro.backends.tiers.disk_store import TrialStores
from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.torch.devices import format_name, weight_formats
from ostro.backends.torch.plain_attention import recurrent_rows_bytes
from ostro.backends.torch.profiler import TorchProfiler
from ostro.config import EngineConfig, ResolvedConfig
from ostro.engine.batch import Batch, Chunk
from ostro.engine.drafter import MOST_DRAFTS
from ostro.engine.page_store import PageStore
from ostro.engine.profile import Profiler
from ostro.engine.request import Task
from ostro.engine.runner import RunnerSpec, SampledToken, Step, StepOutput
from ostro.engine.sequence import PENDING, Sequence
from ostro.errors import Unavailable
from ostro.kernels.gpu.state_rows import StateChunk, chunk_tables
from ostro.kernels.gpu.step_inputs import CAPTURED, FIELDS, LENGTH, POSITION, SAMPLER, SLOT, STATE, TOKEN
from ostro.models.architecture import ring_states, state_bytes
from ostro.sampling_params import MAX_CHOICES
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.experts import CpuExperts
from ostro.torch_models.lora import Adapters
from ostro.torch_models.shard import Collective
from ostro.weights import Pooling

# Limits the logits computed at a time when a step needs more rows than it has sequences: for scored prompts, and for
# many choices of one prompt.
_LOGITS_BLOCK_BYTES = 512 << 20

Wait = Callable[[], StepOutput]
Drawn = Callable[[], list[SampledToken]]
"""Waits for the drawn tokens, and returns them row by row."""


class DrawKind(NamedTuple):
    """A variant of sampling that follows its step; each has its own graph."""

    sampler: SamplerKind
    keeps_logits: bool


class GpuRunner:
    strides = 0

    def __init__(
        self,
        model: Model,
        *,
        page_size: int,
        num_pages: int,
        num_states: int = 0,
        max_batch_tokens: int,
        max_batch_seqs: int,
        graphs: bool = True,
        graph_max_rows: int | None = None,
        graph_max_tokens: int | None = None,
        deterministic: bool = False,
        kv_dtype: torch.dtype | None = None,
        pooling: Pooling | None = None,
        adapters: Adapters | None = None,
        ranks: Peers | None = None,
        group: Collective | None = None,
        kernel_choices: str = "off",
        prefix_limits: PrefixLimits | None = None,
    ) -> None:
        """With `ranks`, the model is the first rank's part of the `group`'s, and the others have loaded theirs. Steps
        with prompts of up to `graph_max_tokens` tokens are padded, and are graphs where decode steps are; None means
        up to the largest size that gains from it. Without `prefix_limits` each row reads its shared prefix separately.
        """
        if deterministic:
            check_deterministic(
                has_adapters=adapters is not None,
                unfused=why_unfused(model),
                quantizes=any(isinstance(module, QuantizedLinear) for module in model.modules()),
            )
        shape, parameter = model.shape, next(model.parameters())
        self.model, self.pooling, self._adapters = model, pooling, adapters
        self.device, self.dtype, self._ranks = parameter.device, parameter.dtype, ranks
        number = 1 if ranks is None else ranks.ranks
        # Rejected drafts cannot be taken out of a state.
        max_sampled = 0 if model.states else max(max_batch_seqs, MOST_DRAFTS + 1)
        self._spec = RunnerSpec(
            page_size=page_size,
            num_pages=num_pages,
            max_seq_len=shape.max_seq_len,
            vocab_size=shape.vocab_size,
            max_batch_tokens=max_batch_tokens,
            max_batch_seqs=max_batch_seqs,
            steps_ahead=1,
            generates=model.has_head,
            constrains=True,
            masks_late=True,
            max_sampled=max_sampled,
            num_states=num_states,
            state_bytes=state_bytes(ring_states(model.states), self.dtype.itemsize),
            device=self.device.type,
            devices=number,
            backend=f"torch ({self.device.type}" + (f", {number} devices)" if number > 1 else ")"),
            precision=_precision(model, format_name(kv_dtype or self.dtype)),
        )
        most_rows = max(max_batch_seqs, max_sampled)
        self._sampler = Sampler(most_rows + MAX_CHOICES, shape.vocab_size, self.device)
        self._masks = TokenMasks(most_rows, shape.vocab_size, self.device)
        self._drawn = DrawnTokens(max_batch_seqs, self.device)
        self._rows = DecodeRows([])
        self._logits: Tensor | None = None
        captures = self.device.type == "cuda" and can_capture(model) and (ranks is None or ranks.can_capture)
        captured = _captured_rows(graph_max_rows or max_batch_seqs, graphs=graphs, captures=captures)
        if ranks is not None:
            # The other ranks make their parts at the same time.
            ranks.send(Begin(num_pages, num_states))
        self.part = GpuPart(
            model,
            page_size=page_size,
            num_pages=num_pages,
            num_states=num_states,
            max_batch_seqs=max_batch_seqs,
            tokens=self._drawn.tokens,
            captured=captured,
            deterministic=deterministic,
            cascades=prefix_limits is not None,
            kv_dtype=kv_dtype,
            adapters=adapters,
            finish=self._finish_decode,
            group=group,
            kernel_choices=kernel_choices,
        )
        if graph_max_tokens is None:
            graph_max_tokens = max_graph_tokens(model) if captured else 0
        self.part.mixed.most = graph_max_tokens
        scratch = self.part.attention.scratch
        self._prefixes = (
            None
            if prefix_limits is None or scratch.prefix is None
            else SharedPrefixes(prefix_limits, max_rows=max_batch_seqs, page_size=page_size, block=scratch.tuning.block)
        )
        self._draws = StepGraphs(self._draw_step, idle=self.part.idle, most=max_batch_seqs, captured=captured)
        if self.device.type == "cuda":
            self._spec = replace(self._spec, device_bytes=torch.cuda.memory_reserved(self.device))

    @classmethod
    def sized(
        cls,
        model: Model,
        config: ResolvedConfig,
        room: Room,
        *,
        pooling: Pooling | None = None,
        adapters: Adapters | None = None,
        ranks: Peers | None = None,
        group: Collective | None = None,
    ) -> Self:
        """A runner with as many pages and states as `fitting_room` found, or as the ranks agreed on."""
        return cls(
            model,
            page_size=config.page_size,
            num_pages=room.pages,
            num_states=room.states,
            max_batch_tokens=config.max_batch_tokens,
            max_batch_seqs=config.max_batch_seqs,
            graphs=config.cuda_graphs,
            graph_max_rows=config.cuda_graph_max_bs,
            deterministic=config.deterministic,
            kv_dtype=kv_format(model, config),
            pooling=pooling,
            adapters=adapters,
            ranks=ranks,
            group=group,
            kernel_choices=config.kernel_choices,
            prefix_limits=PrefixLimits() if config.cascade_attention else None,
        )

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def page_bytes(self) -> int:
        return self.part.attention.pages.memory[:, :, 0].nbytes

    @property
    def state_memory(self) -> Seq[Tensor]:
        """The tensors that recurrent states are in, [states, …] each."""
        states = self.part.states
        return () if states is None else [each for each in (states.inputs, states.matrices) if each.nbytes]

    @property
    def stores_states(self) -> bool:
        return bool(self.state_memory)

    def host_store(self, num_slots: int, num_state_slots: int = 0) -> HostStore:
        """Host memory for this many evicted pages and states."""
        pages, states = self.part.attention.pages.memory, self.state_memory
        return HostStore(pages, num_slots, states=states, num_state_slots=num_state_slots)

    def check_tiers(self, config: EngineConfig) -> None:
        check_disk(config, self._spec.state_bytes)
        check_host_memory(config, self.page_bytes, self._spec.state_bytes)

    def page_store(self, config: EngineConfig, disk: PageDisk | None) -> PageStore | None:
        return page_store(self.host_store, config, disk, self.page_bytes, self._spec.state_bytes)

    def trial_stores(self) -> AbstractContextManager[TrialStores]:
        return trial_stores(self.host_store, self.page_bytes)

    @property
    def computes_with(self) -> list[str]:
        """What its results depend on besides the model."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return [str(torch.__version__), device]

    def profiler(self) -> Profiler:
        return TorchProfiler(self.device)

    @property
    def failure(self) -> str | None:
        return None if self._ranks is None else self._ranks.failure

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Step:
        if self._ranks is None:
            return self._launch(batch)
        with self._ranks.in_step():
            return self._watched(self._launch(batch), self._ranks)

    def _launch(self, batch: Batch) -> Step:
        decodes = all(map(_is_decode, batch.chunks))
        chunks = list(batch.chunks)
        if not decodes or self._adapters is not None:
            # Single tokens first: attention handles them separately.
            chunks.sort(key=lambda chunk: (not _is_single(chunk), self._slot(chunk)))
        slots = [(self._slot(chunk), chunk.num_rows) for chunk in chunks] if self._adapters is not None else ()
        tables, rows = self.part.attention.tables, [chunk.seq.pages for chunk in chunks]
        cells = tables.changes(rows)
        groups = None
        if self._prefixes is not None:
            num_single = bisect_left(chunks, True, key=lambda chunk: not _is_single(chunk))
            groups = self._prefixes.update(rows[:num_single], tables.num_replaced)
        prelude = Prelude(batch.page_copies, cells, slots, batch.state_copies, groups)
        self._tell(prelude)
        self.part.prepare(prelude)
        adapted = self._adapters is not None and self._adapters.adapted
        if decodes and not adapted:
            seqs = [chunk.seq for chunk in chunks]
            if seqs != self._rows.seqs:
                self._rows = DecodeRows(seqs)
            return self._launch_decode(self._rows, chunks)
        return self._launch_mixed(chunks, adapted=adapted)

    def _slot(self, chunk: Chunk) -> int:
        return 0 if self._adapters is None else self._adapters.slot(chunk.seq.request.adapter)

    @property
    def _shares_prefixes(self) -> bool:
        return self._prefixes is not None and self._prefixes.pays

    # ---- steps with one token per sequence

    def _launch_decode(self, rows: DecodeRows, chunks: Seq[Chunk]) -> Step:
        seqs = rows.seqs
        size = self.part.graphs.size_for(len(seqs))
        slots, kind = self._sampler.slots_for(seqs)
        is_edited, is_late, reads_logits = rows.edited, rows.masks_unknown, bool(rows.asked)
        samples_apart, masks = is_edited or is_late, is_late or rows.masked
        if masks:
            self._masks.allocate()
        step_kind = (
            StepKind(None, keeps_logits=True, shares_prefixes=self._shares_prefixes)
            if samples_apart
            else StepKind(kind, keeps_logits=reads_logits, masks=masks, shares_prefixes=self._shares_prefixes)
        )
        inputs = self._decode_inputs(rows, slots)
        if self.part.states is not None:
            inputs[STATE, : len(seqs)] = [seq.state for seq in seqs]
            inputs[CAPTURED, : len(seqs)] = [_captured_behind(chunk) for chunk in chunks]
        step = Decode(size, step_kind, inputs)
        self._tell(step)
        # Before the inputs are set: what is captured for the first time overwrites them.
        self.part.graphs.get(size, step_kind)
        draw = self._draws.get(size, DrawKind(kind, keeps_logits=reads_logits)) if is_late and not is_edited else None
        if masks and not samples_apart:
            self._masks.send(seqs)
        self.part.decode(step)
        self._drawn.rows = rows.by_id
        logits = self._kept_logits(len(seqs)) if samples_apart or reads_logits else None
        scores = edited(logits, seqs) if is_edited and logits is not None else None

        def sample() -> Wait:
            if is_late:
                self._masks.send(seqs)
            if draw is not None:
                draw()
            elif scores is not None:
                if is_late:
                    self._masks.ban(scores)
                slots = self.part.inputs[SAMPLER, : len(seqs)]
                self._sampler.draw(scores, slots, self._drawn.tokens, self._drawn.errors, kind)
            if samples_apart:
                self._share_tokens(0, len(seqs))
            fetched = self._fetched(len(seqs), rows.asked, logits)
            return lambda: StepOutput(dict(zip(rows.by_id, fetched(), strict=True)))

        return _step(sample, is_late=is_late)

    def _decode_inputs(self, rows: DecodeRows, slots: list[int]) -> Array:
        page_size, seqs, drawn = self._spec.page_size, rows.seqs, self._drawn.rows
        inputs = np.full((FIELDS, self._spec.max_batch_seqs), -1, dtype=np.int32)
        inputs[[TOKEN, POSITION, LENGTH]] = 0
        own = inputs[:, : len(seqs)]
        tokens, positions = own[TOKEN], own[POSITION]
        tokens[:] = [seq.token_ids[seq.num_computed] for seq in seqs]
        positions[:] = [seq.num_computed for seq in seqs]
        own[LENGTH] = positions + 1
        own[SLOT] = [seq.pages[seq.num_computed // page_size] for seq in seqs]
        own[SLOT] = own[SLOT] * page_size + positions % page_size
        own[SAMPLER] = slots
        pending = np.flatnonzero(tokens == PENDING)
        # As a rule, the previous step had the same rows.
        before = pending if drawn is rows.by_id else [drawn[seqs[row].id] for row in pending]
        tokens[pending] = -1 - np.array(before, dtype=np.int32)
        return inputs

    def _finish_decode(self, logits: Tensor, sent: Tensor, kind: StepKind) -> None:
        """Captured at the end of a decode step: writes tokens, logits, or both."""
        if kind.keeps_logits:
            self._keep(logits)
        if kind.masks:
            self._masks.ban(logits)
        if kind.sampler is not None:
            self._sampler.draw(logits, sent[SAMPLER], self._drawn.tokens, self._drawn.errors, kind.sampler)

    @torch.inference_mode()
    def _draw_step(self, size: int, kind: DrawKind) -> None:
        """Sampling captured in a graph: reads the logits that the step kept, and the masks sent since."""
        logits = self._kept_logits(size)
        scores = logits.clone() if kind.keeps_logits else logits
        self._masks.ban(scores)
        slots = self.part.inputs[SAMPLER, :size]
        self._sampler.draw(scores, slots, self._drawn.tokens, self._drawn.errors, kind.sampler)

    def _keep(self, logits: Tensor) -> None:
        """Copies logits to a fixed buffer: a graph's own memory is reused by graphs captured after it."""
        if self._logits is None:
            self._logits = logits.new_empty(self._spec.max_batch_seqs, logits.shape[-1])
        self._logits[: len(logits)].copy_(logits)

    def _kept_logits(self, rows: int) -> Tensor:
        assert self._logits is not None
        return self._logits[:rows]

    # ---- steps with prompts, drafts or adapters

    def _launch_mixed(self, chunks: list[Chunk], *, adapted: bool) -> Step:
        num_single, tiles = self.part.attention.tile(chunks)
        inputs, num_tiles = self._mixed_inputs(chunks), 0 if tiles is None else len(tiles)
        states = None if self.part.states is None else _state_chunks(chunks, num_single)
        num_pieces = 0 if states is None else len(states.pieces)
        padding = None if adapted else self.part.mixed.padding_for(inputs.shape[1], num_single, num_tiles, num_pieces)
        step = Mixed(
            inputs,
            len(chunks),
            num_single,
            tiles,
            adapted,
            padding,
            shares_prefixes=self._shares_prefixes,
            states=states,
        )
        self._tell(step)
        hidden = self.part.forward(step)
        ends = list(accumulate(chunk.num_rows for chunk in chunks))
        waits = [step(chunks, hidden, ends) for step in (self._score, self._pool)]
        draw = self._prepare_draws(chunks, hidden, ends)

        def sample() -> Wait:
            drawn = draw()

            def wait() -> StepOutput:
                output = StepOutput()
                for each in (drawn, *waits):
                    each(output)
                return output

            return wait

        return _step(sample, is_late=masks_unknown([seq for chunk in chunks for seq in chunk.samples]))

    def _mixed_inputs(self, chunks: list[Chunk]) -> Array:
        page_size = self._spec.page_size
        inputs = np.full((FIELDS, sum(chunk.num_rows for chunk in chunks)), -1, dtype=np.int32)
        offset = 0
        for chunk in chunks:
            seq, own = chunk.seq, slice(offset, offset + chunk.num_rows)
            tokens = chunk.token_ids
            if tokens[-1] == PENDING:
                tokens[-1] = -1 - self._drawn.rows[seq.id]
            positions = np.arange(chunk.start, chunk.start + chunk.num_rows)
            inputs[TOKEN, own] = tokens
            inputs[POSITION, own] = positions
            inputs[LENGTH, own] = chunk.end if _is_single(chunk) else 0
            if _is_single(chunk):
                inputs[STATE, own], inputs[CAPTURED, own] = seq.state, _captured_behind(chunk)
            inputs[SLOT, own] = np.array(seq.pages)[positions // page_size] * page_size + positions % page_size
            offset += chunk.num_rows
        return inputs

    def _prepare_draws(
        self, chunks: list[Chunk], hidden: Tensor, ends: Seq[int]
    ) -> Callable[[], Callable[[StepOutput], None]]:
        """Draws for choices that are about to fork, and prepares to draw for the others, which may wait for masks.

        There may be far more forking choices than slots, so they are sampled in blocks and then give up their slots.
        Sequences with drafts come last, once for each row that they sample from.
        """
        last = [(chunk, end - chunk.num_rows + chunk.length - 1) for chunk, end in zip(chunks, ends, strict=True)]
        forking = [(seq, row) for chunk, row in last if len(chunk.samples) > 1 for seq in chunk.samples]
        single = [(chunk.seq, row) for chunk, row in last if len(chunk.samples) == 1 and not chunk.drafts]
        drafted = [(seq, row + at) for chunk, row in last if chunk.drafts for at, (seq,) in enumerate(chunk.samplers)]
        block = max(1, min(self._spec.max_batch_seqs, self._block))
        waits = [self._prepare_draw(forking[at : at + block], (), hidden, at)() for at in range(0, len(forking), block)]
        draw = self._prepare_draw(single, drafted, hidden, len(forking)) if single or drafted else None
        self._drawn.rows = {seq.id: row for row, (seq, _) in enumerate(forking + single)}

        def draw_rest() -> Callable[[StepOutput], None]:
            if draw is not None:
                waits.append(draw())

            def add(output: StepOutput) -> None:
                for seqs, wait in waits:
                    for seq, sampled in zip(seqs, wait(), strict=True):
                        # After the first row, those that follow a sequence's drafts.
                        if output.sampled.setdefault(seq.id, sampled) is not sampled:
                            output.followed.setdefault(seq.id, []).append(sampled)

            return add

        return draw_rest

    def _prepare_draw(
        self, pairs: Seq[tuple[Sequence, int]], supposed: Seq[tuple[Sequence, int]], hidden: Tensor, at: int
    ) -> Callable[[], tuple[list[Sequence], Drawn]]:
        """Prepares sampling for `pairs`, sequences with their rows of `hidden`, then for `supposed`, which assume that
        drafts are accepted. Drawn tokens go to rows from `at` on.
        """
        seqs = [seq for seq, _ in (*pairs, *supposed)]
        rows = np.array([row for _, row in (*pairs, *supposed)])
        self._tell_head(rows)
        logits = self.part.head(hidden[send(rows, self.device)])
        numbers, kind = self._sampler.slots_for(seqs[: len(pairs)], seqs[len(pairs) :])
        slots = send(np.array(numbers, dtype=np.int32), self.device)
        masks = masks_unknown(seqs) or (masked(seqs) and not edits(seqs))
        scores = logits
        if edits(seqs):
            scores = edited(logits, seqs)
        elif masks and any(seq.request.params.logprobs is not None for seq in seqs):
            scores = logits.clone()

        def draw() -> tuple[list[Sequence], Drawn]:
            if masks:
                self._masks.send(seqs)
                self._masks.ban(scores)
            self._sampler.draw(scores, slots, self._drawn.tokens[at:], self._drawn.errors[at:], kind)
            self._share_tokens(at, at + len(seqs))
            return seqs, self._fetched(len(seqs), asked_logprobs(seqs), logits, at)

        return draw

    def _score(self, chunks: list[Chunk], hidden: Tensor, ends: Seq[int]) -> Callable[[StepOutput], None]:
        """Log-probabilities of prompt tokens, in blocks: never a whole prompt times the vocabulary."""
        waits: list[tuple[Chunk, int, Callable[[], list[Tensor]]]] = []
        for chunk, end in zip(chunks, ends, strict=True):
            first = end - chunk.num_rows + chunk.scored.start - chunk.start
            targets = chunk.seq.token_ids[chunk.scored.start + 1 : chunk.scored.stop + 1] if chunk.scored else []
            top = chunk.num_top
            for at in range(0, len(targets), self._block):
                some = send(np.array(targets[at : at + self._block]), self.device)
                self._tell_head(np.arange(first + at, first + at + len(some)))
                logits = self.part.head(hidden[first + at : first + at + len(some)]).float()
                waits.append((chunk, top, fetch(logprob_table(logits, some, top))))

        def add(output: StepOutput) -> None:
            for chunk, top, wait in waits:
                (table,) = wait()
                found = output.scored.setdefault(chunk.seq.id, [])
                found += read_logprobs(table, [top] * len(table))

        return add

    def _pool(self, chunks: list[Chunk], hidden: Tensor, ends: Seq[int]) -> Callable[[StepOutput], None]:
        waits = [
            (chunk, fetch(self._share(chunk, hidden[end - chunk.length : end].float())))
            for chunk, end in zip(chunks, ends, strict=True)
            if chunk.seq.request.task is Task.EMBED
        ]

        def add(output: StepOutput) -> None:
            for chunk, wait in waits:
                output.pooled[chunk.seq.id] = wait()[0].tolist()

        return add

    def _share(self, chunk: Chunk, hidden: Tensor) -> Tensor:
        rows, divisor = pooled_rows(self.pooling, chunk)
        return hidden[rows].sum(0) / divisor

    # ---- the other ranks

    def _watched(self, step: Step, ranks: Peers) -> Step:
        """The step, whose results raise Unavailable if a rank is lost meanwhile: its collectives then end with
        meaningless values.
        """
        late = step.sample

        def results() -> StepOutput:
            with ranks.in_step():
                output = step.results()
                if ranks.failure is not None:
                    raise Unavailable(ranks.failure)
                return output

        def sample() -> None:
            assert late is not None
            with ranks.in_step():
                late()

        return Step(results, None if late is None else sample)

    def _tell(self, message: GpuStep) -> None:
        if self._ranks is not None:
            self._ranks.send(message)

    def _tell_head(self, rows: Array) -> None:
        if self._ranks is not None:
            self._ranks.send(Head(rows))

    def _share_tokens(self, start: int, stop: int) -> None:
        if self._ranks is not None:
            self._ranks.send(Tokens(start, stop))
            self.part.share_tokens(start, stop)

    # ---- shared

    @property
    def _block(self) -> int:
        return max(1, _LOGITS_BLOCK_BYTES // (4 * self._spec.vocab_size))

    def _fetched(self, count: int, asked: Mapping[int, int], logits: Tensor | None, at: int = 0) -> Drawn:
        """The tokens drawn into `count` rows from `at` on, with the log-probabilities `asked` for in some of them (see
        `asked_logprobs`); `logits` may be None if no row asks for any.
        """
        end = at + count
        tensors = [self._drawn.tokens[at:end], self._drawn.errors[at:end]]
        if asked:
            assert logits is not None
            rows = send(np.array(list(asked)), self.device)
            tensors.append(logprob_table(logits[rows].float(), tensors[0][rows].long(), max(asked.values())))
        arrived = fetch(*tensors)

        def wait() -> list[SampledToken]:
            tokens, errors, *tables = arrived()
            sampled = list(map(SampledToken, tokens.tolist()))
            if asked:
                for row, logprob in zip(asked, read_logprobs(tables[0], list(asked.values())), strict=True):
                    sampled[row] = SampledToken(sampled[row].token_id, logprob)
            for row in np.flatnonzero(errors.numpy()).tolist():
                sampled[row] = failure(int(errors[row]))
            return sampled

        return wait


def _precision(model: Model, cells: str) -> str:
    words = in_words(weight_formats(model), cells)
    experts = [module for module in model.modules() if isinstance(module, CpuExperts)]
    return words if not experts else with_cpu_experts(words, len(experts), experts[0].formats)


def _is_single(chunk: Chunk) -> bool:
    """Whether the chunk is one token."""
    return chunk.length == 1 and not chunk.drafts


def _captured_behind(chunk: Chunk) -> int:
    """The slot that takes the state behind a chunk of one token; -1 if none does."""
    return chunk.captures[0][1] if chunk.captures else -1


def _state_chunks(chunks: Seq[Chunk], num_single: int) -> StateChunks:
    """The chunks after the first `num_single`, in the format of the kernels that advance states."""
    firsts = accumulate((chunk.num_rows for chunk in chunks[num_single:]), initial=num_single)
    found = [
        StateChunk(first, chunk.num_rows, chunk.state, chunk.start, chunk.captures)
        for first, chunk in zip(firsts, chunks[num_single:], strict=False)
    ]
    return StateChunks(*chunk_tables(found))


def _is_decode(chunk: Chunk) -> bool:
    """Whether the chunk is one token, and only its own sequence's next token is wanted."""
    return chunk.length == 1 and len(chunk.samples) == 1 and not chunk.drafts and not chunk.scored


def _step(sample: Callable[[], Wait], *, is_late: bool) -> Step:
    """A queued step whose sampling follows at once or, if it `is_late`, when it is asked for."""
    if not is_late:
        return Step(sample())
    waits: list[Wait] = []

    @torch.inference_mode()
    def sample_late() -> None:
        waits.append(sample())

    return Step(lambda: waits[0](), sample_late)


def kv_format(model: Model, config: ResolvedConfig) -> torch.dtype:
    return torch.float8_e4m3fn if config.kv_dtype == "fp8" else next(model.parameters()).dtype


def fitting_room(model: Model, config: ResolvedConfig) -> Room:
    """The pages and states that fit into GPU memory besides the model and one step's work."""
    expert_width = model.described.expert_width if isinstance(model, Decoder) else 0
    packed = [prod(module.shape) for module in model.modules() if isinstance(module, PackedLinear)]
    itemsize = next(model.parameters()).itemsize
    return gpu_room(
        model.shape,
        page_size=config.page_size,
        itemsize=kv_format(model, config).itemsize,
        kv_memory=config.kv_memory,
        utilization=config.gpu_memory_utilization,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_seqs=config.max_batch_seqs,
        limit=config.kv_memory_limit,
        max_tokens=config.max_running_tokens,
        expert_bytes=itemsize * expert_width,
        widened_bytes=itemsize * max(packed, default=0),
        attention_bytes=_recurrent_bytes(model, config),
        state_bytes=state_bytes(ring_states(model.states), itemsize),
    )


def _recurrent_bytes(model: Model, config: ResolvedConfig) -> int:
    if not isinstance(model, Decoder):
        return 0
    return recurrent_rows_bytes(model.described, format_name(next(model.parameters()).dtype), config.max_batch_tokens)


def rank_part(
    model: Model,
    config: ResolvedConfig,
    room: Room,
    *,
    adapters: Adapters | None,
    group: Collective,
    captures: bool,
) -> GpuPart:
    """The part of a rank other than the first: it captures the same graphs and runs the same kernels."""
    device = next(model.parameters()).device
    most = config.cuda_graph_max_bs or config.max_batch_seqs
    return GpuPart(
        model,
        page_size=config.page_size,
        num_pages=room.pages,
        num_states=room.states,
        max_batch_seqs=config.max_batch_seqs,
        tokens=DrawnTokens(config.max_batch_seqs, device).tokens,
        captured=_captured_rows(most, graphs=config.cuda_graphs, captures=captures),
        cascades=config.cascade_attention,
        kv_dtype=kv_format(model, config),
        adapters=adapters,
        group=group,
        kernel_choices=config.kernel_choices,
    )


def _captured_rows(most: int, *, graphs: bool, captures: bool) -> int:
    """The rows of the largest decode step that is a graph; 0 if none is. The same on all ranks, which replay graphs
    together.
    """
    return most if graphs and captures else 0
