"""Runs batches with the native core: Batch -> arrays -> one native call -> tokens. Knows no schedule and no text.

Rows whose scores a request changes take a second call, which only draws:

    logits ── bias, penalties, bans, top-n-sigma (numpy, in place) ── mask, temperature, truncation, draw (native)

`backends.sampling.sampler` says what each setting means: both give the same tokens for the same seed. Imports no torch.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from ctypes import Array
from typing import Self

import numpy as np
import numpy.typing as npt

from ostro.backends.draft_lanes import DraftLanes
from ostro.backends.memory import host_room, page_bytes
from ostro.backends.native.lora import NativeAdapters
from ostro.backends.native.profiler import NativeProfiler
from ostro.backends.outcome import outcome
from ostro.backends.pooling import pooled_rows
from ostro.backends.precision import in_words
from ostro.backends.sampling.arrays import Row, edit, is_edited, token_logprob
from ostro.backends.sampling.edits import check_honoured
from ostro.backends.sampling.random_key import stream_key
from ostro.backends.tiers.disk_store import DiskStore, TrialStores, trial_disk
from ostro.backends.tiers.page_disk import PageDisk
from ostro.config import EngineConfig, ResolvedConfig
from ostro.engine.batch import Batch, Chunk
from ostro.engine.drafter import MOST_DRAFTS
from ostro.engine.page_store import PageStore
from ostro.engine.profile import Profiler
from ostro.engine.request import Task
from ostro.engine.runner import RunnerSpec, SampledToken, Step, StepOutput, TokenLogprob
from ostro.kernels.cpu.library import CELLS, PAGE, CDraw, Cells, Op
from ostro.kernels.cpu.packed_file import Floats, PackedFile
from ostro.kernels.cpu.program import Piece, Program, ProgramSpec
from ostro.models.architecture import Heads
from ostro.system.machine import free_memory
from ostro.weights import Pooling

_WORD = 2**64 - 1

DRAWN = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Fields of SamplingParams that the native draw honours."""

check_honoured("the native core", DRAWN)


def draws_of(rows: Seq[Row], vocab: int) -> "Array[CDraw]":
    draws = (CDraw * len(rows))()
    for draw, (row, seq) in zip(draws, rows, strict=True):
        params = seq.request.params
        draw.row = row
        if seq.mask is not None:
            words = np.frombuffer(seq.mask, np.uint32)
            draw.allowed, draw.num_words = words.ctypes.data, len(words)
        if params.greedy:
            continue
        draw.temperature, draw.top_p, draw.min_p = params.temperature, params.top_p, params.min_p
        draw.top_k = params.top_k if 0 < params.top_k < vocab else 0
        draw.key = stream_key(seq.request.seed, seq.choice, seq.num_output) & _WORD
    return draws


# A float multiplication, as in attention, takes as long as this many multiplications of codes.
_FLOAT_PRICE = 4.5

Rows = npt.NDArray[np.int32]


class NativeShape:
    """A program's shape, for sizing memory."""

    def __init__(self, spec: ProgramSpec) -> None:
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self.num_layers, self.num_heads, self.num_kv_heads = spec.num_layers, spec.heads, spec.kv_heads
        self.head_dim, self.max_seq_len = spec.head_dim, spec.max_seq_len
        self.layer_heads: tuple[Heads, ...] = ()


def _context_price(spec: ProgramSpec, packed: PackedFile) -> float:
    """The cost of attending to one token of context, in layers without a window, relative to a token's matmuls."""
    layers = sum(step.op is Op.ATTEND and not step.window for step in spec.steps)
    matrices = [packed.matrices[step.matrix] for step in spec.steps[: spec.head_step] if step.matrix is not None]
    products = sum(each.rows * each.cols for each in matrices)
    return _FLOAT_PRICE * 2 * layers * spec.heads * spec.head_dim / max(1, products)


class NativeRunner:
    """Owns the program, and with it the KV cache."""

    strides = 0
    failure = None

    def __init__(
        self,
        packed: PackedFile,
        *,
        isa: str,
        num_pages: int,
        num_states: int = 0,
        max_batch_tokens: int = 512,
        max_batch_seqs: int = 64,
        cells: Cells = Cells.FLOAT32,
        threads: int = 1,
        pooling: Pooling | None = None,
        adapters: NativeAdapters | None = None,
    ) -> None:
        self.pooling = pooling
        self._adapters = adapters
        self.isa = isa
        # The rows of one step whose logits can be asked for.
        most_asked = max(max_batch_seqs, MOST_DRAFTS + 1)
        self.program = Program(
            packed,
            isa=isa,
            num_pages=num_pages,
            num_states=num_states,
            num_lanes=num_states,
            most_drafts=MOST_DRAFTS,
            max_tokens=max_batch_tokens,
            max_asked=most_asked,
            cells=cells,
            threads=threads,
            adapted=adapters.adapted(ProgramSpec.from_json(packed.program), packed.panel) if adapters else None,
        )
        self._lanes = DraftLanes(num_states)
        spec = self.program.spec
        self._sample_step = next((at for at, step in enumerate(spec.steps) if step.op is Op.SAMPLE), len(spec.steps))
        self._spec = RunnerSpec(
            page_size=PAGE,
            num_pages=num_pages,
            max_seq_len=spec.max_seq_len,
            vocab_size=spec.vocab_size,
            max_batch_tokens=max_batch_tokens,
            max_batch_seqs=max_batch_seqs,
            context_price=_context_price(spec, packed),
            generates=spec.logits is not None,
            constrains=True,
            max_sampled=most_asked,
            num_states=num_states,
            state_bytes=spec.state_bytes,
            is_invariant=True,
            pages_bytes=page_bytes(NativeShape(spec), PAGE, cells.bytes, cells.slot_bytes) * num_pages
            + num_states * spec.state_bytes,
            backend=f"native ({isa})",
            precision=in_words(spec.precision.split(", "), cells.name.lower()),
        )

    @classmethod
    def sized(
        cls,
        packed: PackedFile,
        config: ResolvedConfig,
        *,
        isa: str,
        threads: int,
        pooling: Pooling | None = None,
        adapters: NativeAdapters | None = None,
    ) -> Self:
        """A runner with as many pages as memory holds."""
        cells, spec = CELLS[config.kv_dtype], ProgramSpec.from_json(packed.program)
        room = host_room(
            NativeShape(spec),
            page_size=PAGE,
            itemsize=cells.bytes,
            kv_memory=config.kv_memory,
            max_batch_seqs=config.max_batch_seqs,
            limit=config.kv_memory_limit,
            # A mapped file's weights look free.
            free=max(0, free_memory() - (0 if packed.is_copied else packed.nbytes)),
            slot_bytes=cells.slot_bytes,
            max_tokens=config.max_running_tokens,
            state_bytes=spec.state_bytes,
        )
        return cls(
            packed,
            isa=isa,
            num_pages=room.pages,
            num_states=room.states,
            max_batch_tokens=config.max_batch_tokens,
            max_batch_seqs=config.max_batch_seqs,
            cells=cells,
            threads=threads,
            pooling=pooling,
            adapters=adapters,
        )

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def computes_with(self) -> list[str]:
        """What its results depend on besides the model."""
        return [self.isa]

    @property
    def page_bytes(self) -> int:
        return self.program.page_bytes

    stores_states = True

    def check_tiers(self, config: EngineConfig) -> None:
        """Accepts any size."""

    def page_store(self, config: EngineConfig, disk: PageDisk | None) -> PageStore | None:
        if disk is None:
            return None
        return DiskStore(self.program, disk, outlives=config.kv_persist, states=self if self._spec.num_states else None)

    @property
    def state_bytes(self) -> int:
        return self._spec.state_bytes

    def state(self, slot: int) -> npt.NDArray[np.uint8]:
        """A view of a recurrent state's memory."""
        return self.program.state(slot)

    def note_overwritten(self, slot: int) -> None:
        """A state is about to be written to the slot, by no step's doing."""
        self._lanes.forget(slot)

    @contextmanager
    def trial_stores(self) -> Iterator[TrialStores]:
        with trial_disk(self.program, self.page_bytes) as (store, disk):
            yield TrialStores(self.page_bytes, None, 0, store, disk.most_waiting if disk is not None else 0)

    def profiler(self) -> Profiler:
        return NativeProfiler(self.program)

    def launch(self, batch: Batch) -> Step:
        output = self.run(batch)
        return Step(lambda: output)

    def run(self, batch: Batch) -> StepOutput:
        for source, target in batch.page_copies:
            self.program.copy_page(source, target)
        for source, target in batch.state_copies:
            self.program.copy_state(source, target)
        tokens = np.array([token for chunk in batch.chunks for token in chunk.token_ids], np.int32)
        pieces = self._pieces(batch)
        asking = [(chunk, piece, chunk.samplers) for chunk, piece in zip(batch.chunks, pieces, strict=True)]
        asked = np.array([p.row + p.length - len(s) + at for _, p, s in asking for at in range(len(s))], np.int32)
        by_row = [seqs for *_, samplers in asking for seqs in samplers]
        rows = [(row, seq) for row, seqs in enumerate(by_row) for seq in seqs]
        plain = [each for each in rows if not is_edited(each[1])]
        draws = draws_of(plain, self._spec.vocab_size)
        last = None if rows else self.program.spec.head_step
        self.program.run(tokens, pieces, asked, draws, adapters=self._adapters_of(batch.chunks), last=last)
        output = StepOutput()
        drawn = self._drawn(plain, draws)
        if len(plain) < len(rows):
            changed = [each for each in rows if is_edited(each[1])]
            drawn |= self._sample_changed(tokens, pieces, asked, changed)
        row = 0
        for chunk, _, samplers in asking:
            output.sampled.update({seq.id: drawn[row, seq.id] for seq in chunk.samples})
            if chunk.drafts:
                output.followed[chunk.seq.id] = [drawn[row + at, chunk.seq.id] for at in range(1, len(samplers))]
            row += len(samplers)
        for chunk, piece in zip(batch.chunks, pieces, strict=True):
            if chunk.scored:
                output.scored[chunk.seq.id] = self._score(tokens, pieces, chunk, piece)
            if chunk.seq.request.task is Task.EMBED:
                output.pooled[chunk.seq.id] = self._pool(tokens, pieces, chunk, piece)
        return output

    def _pieces(self, batch: Batch) -> list[Piece]:
        pieces: list[Piece] = []
        lanes = self._lanes.begin(batch) if self._spec.num_states else None
        row = 0
        for number, chunk in enumerate(batch.chunks):
            piece = Piece(row, chunk.start, chunk.num_rows, np.array(chunk.seq.pages, np.int32))
            if lanes is not None:
                lane, applied = lanes[number]
                piece = piece._replace(state=chunk.state, captures=chunk.captures)
                piece = piece._replace(drafts=len(chunk.drafts), applied=applied, lane=lane)
            pieces.append(piece)
            row += chunk.num_rows
        return pieces

    def _adapters_of(self, chunks: Seq[Chunk]) -> Rows | None:
        """Each row's adapter number; None if no row has an adapter."""
        if self._adapters is None or all(chunk.seq.request.adapter is None for chunk in chunks):
            return None
        numbers = [self._adapters.number(chunk.seq.request.adapter) for chunk in chunks]
        return np.repeat(np.array(numbers, np.int32), [chunk.num_rows for chunk in chunks])

    def _drawn(
        self, rows: Seq[Row], draws: "Array[CDraw]", logits: Mapping[int, Floats] | None = None
    ) -> dict[tuple[int, int], SampledToken]:
        """The drawn tokens, by row and sequence id. `logits` has the model's own logits, by row, where those in the
        buffer were changed.
        """
        found = {}
        for (row, seq), draw in zip(rows, draws, strict=True):
            logprob = None
            if (top := seq.request.params.logprobs) is not None:
                logprob = token_logprob(logits[row] if logits else self._logits()[row], draw.token, top)
            found[row, seq.id] = outcome(draw.token, draw.best, logprob)
        return found

    def _sample_changed(
        self, tokens: Rows, pieces: Seq[Piece], asked: Rows, rows: Seq[Row]
    ) -> dict[tuple[int, int], SampledToken]:
        """Draws from rows of logits after changing them where they lie."""
        logits = self._logits()
        own = {row: logits[row].copy() for row, seq in rows if seq.request.params.logprobs is not None}
        edit(logits, rows)
        draws = draws_of(rows, self._spec.vocab_size)
        self.program.run(tokens, pieces, asked, draws, first=self._sample_step)
        return self._drawn(rows, draws, own)

    def _logits(self) -> Floats:
        """The last run's logits: a row for each requested one."""
        number = self.program.spec.logits
        assert number is not None, "the model has no head"
        return self.program.buffer(number)[:, : self._spec.vocab_size]

    def _score(self, tokens: Rows, pieces: Seq[Piece], chunk: Chunk, piece: Piece) -> list[TokenLogprob]:
        top = chunk.num_top
        first = piece.row - chunk.start
        found: list[TokenLogprob] = []
        for at in range(chunk.scored.start, chunk.scored.stop, self.program.max_asked):
            positions = range(at, min(at + self.program.max_asked, chunk.scored.stop))
            asked = np.arange(first + positions.start, first + positions.stop, dtype=np.int32)
            self.program.run(tokens, pieces, asked, first=self.program.spec.head_step)
            targets = chunk.seq.token_ids[positions.start + 1 : positions.stop + 1]
            found += [token_logprob(row, target, top) for row, target in zip(self._logits(), targets, strict=False)]
        return found

    def _pool(self, tokens: Rows, pieces: Seq[Piece], chunk: Chunk, piece: Piece) -> list[float]:
        spec, blocks = self.program.spec, []
        for at in range(piece.row, piece.row + piece.length, self.program.max_asked):
            asked = np.arange(at, min(at + self.program.max_asked, piece.row + piece.length), dtype=np.int32)
            self.program.run(tokens, pieces, asked, first=spec.head_step, last=spec.logits_step)
            blocks.append(self.program.buffer(spec.hidden)[: len(asked), : spec.hidden_size].copy())
        rows, divisor = pooled_rows(self.pooling, chunk)
        pooled: list[float] = (np.concatenate(blocks)[rows].sum(0) / np.float32(divisor)).tolist()
        return pooled
