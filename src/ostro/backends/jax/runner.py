"""Runs batches with JAX: Batch -> one array of integers -> programs on a mesh -> tokens. Knows no schedule and no text.

    step      tokens -> keys and values into pages, hidden states, logits of the rows that sample
    draw      logits -> tokens, on the device; the next step reads them there, before the host has seen them
    generate  both at once, for few rows whose logits nobody else reads
    logprobs  logits -> log-probabilities
    logits    hidden states -> logits of further rows, for prompt log-probabilities

Draws also apply the requests' changes of scores. Only for top-n-sigma, or for more changes than a program has room for,
do logits travel to the host and back, so that `launch` waits for the device.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ostro.backends.jax.compiling import COPIES, Compiler
from ostro.backends.jax.draw_inputs import Draws, DrawWriter
from ostro.backends.jax.edit_inputs import packed_edits
from ostro.backends.jax.hosts import LeadingPrograms, follow, lead, leads_others
from ostro.backends.jax.inputs import InputWriter
from ostro.backends.jax.logprobs import Logprobs
from ostro.backends.jax.placed import PlacedModel
from ostro.backends.jax.program import Generated, StepResult
from ostro.backends.jax.programs import Key, Programs, compilations
from ostro.backends.jax.sampling import DrawKind, Drawn
from ostro.backends.jax.shapes import Sizes, StepShape, smallest_shape
from ostro.backends.jax.weights import COPIED
from ostro.backends.outcome import outcome
from ostro.backends.pooling import pooled_rows
from ostro.backends.precision import in_words
from ostro.backends.sampling.arrays import Floats, edit, is_edited, mask
from ostro.engine.batch import Batch, Chunk
from ostro.engine.profile import Profiler
from ostro.engine.request import Task
from ostro.engine.runner import RunnerSpec, SampledToken, Step, StepOutput, TokenLogprob
from ostro.engine.sequence import Sequence
from ostro.weights import Pooling


class JaxRunner:
    """Owns the pages, the states and the programs of one model on a mesh."""

    def __init__(
        self,
        placed: PlacedModel,
        sizes: Sizes,
        *,
        pooling: Pooling | None = None,
        steps_ahead: int = 1,
        keeps_programs: bool = False,
    ) -> None:
        """Compiles all programs; those of earlier starts are read from the cache with `keeps_programs`."""
        self._model, self._cut, self._mesh, self._weights = placed.described, placed.cut, placed.mesh, placed.weights
        self._sizes, self._pooling, self._vocab = sizes, pooling, placed.described.shape.vocab_size
        compiler = Compiler(placed, sizes)
        self._shapes, self._mask_words = compiler.shapes, compiler.mask_words
        self._inputs = InputWriter(sizes, self._shapes, _numbering(placed))
        self._adapters = () if placed.adapters is None else (placed.adapters.tables,)
        self.strides = 0
        programs = Programs(placed.mesh, compiler.kept() if keeps_programs else None)
        programs.add(*compiler.recipes())
        self._cache = compiler.cache()
        self._tokens = jax.device_put(np.zeros(self._shapes[-1].rows, np.int32), NamedSharding(self._mesh, COPIED))
        self._last, self._draws = _LastDrawn(), DrawWriter(self._vocab)
        self._spec = _describe(compiler, programs, steps_ahead)
        self.programs = lead(programs, self._arrays) if leads_others() else programs
        self._known_compilations = compilations().number

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def profiler(self) -> Profiler:
        return JaxProfiler()

    @property
    def failure(self) -> str | None:
        return self.programs.failure if isinstance(self.programs, LeadingPrograms) else None

    def launch(self, batch: Batch) -> Step:
        if batch.page_copies:
            pages = self._copied(("copy",), self._cache.pages, batch.page_copies, self._sizes.num_pages)
            self._cache = self._cache._replace(pages=pages)
        if batch.state_copies:
            states = self._copied(("copy states",), self._cache.states, batch.state_copies, self._sizes.num_states)
            self._cache = self._cache._replace(states=states)
        shape = self._shape_of(batch)
        adapted = any(chunk.seq.request.adapter is not None for chunk in batch.chunks)
        step_shape, adapters = shape._replace(adapted=adapted), self._adapters if adapted else ()
        integers = self._inputs.write(batch.chunks, step_shape, self._last.reference)
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        draws = [(row, seq) for row, chunk in enumerate(sampling) for seq in chunk.samples]
        reads_hidden = any(map(_reads_hidden, batch.chunks))
        plain = not reads_hidden and not any(_needs_logits(seq) for _, seq in draws)
        if shape.draws and plain and 0 < len(draws) <= shape.rows:
            launched = _Launched(batch, shape, None)
            self._generate(launched, step_shape, integers, adapters, draws)
            return Step(partial(self._results, launched))
        program = self.programs["step", step_shape]
        result = StepResult(*program(self._weights, self._cache, self._tokens, integers, *adapters))
        self._cache = result.cache
        # Freed now if no result needs it: a large batch's takes 100 MB.
        hidden = result.hidden if reads_hidden else None
        launched = _Launched(batch, shape, hidden)
        if any(_is_mask_unknown(seq) for _, seq in draws):
            # By then, the engine will have reserved the place of the drawn token.
            kept = [(row, _as_it_is(seq)) for row, seq in draws]
            return Step(
                partial(self._results, launched), partial(self._draw_late, launched, result.logits, draws, kept)
            )
        self._draw(launched, result.logits, draws)
        return Step(partial(self._results, launched))

    def _results(self, launched: "_Launched") -> StepOutput:
        output = StepOutput(recompiles=self._recompiles())
        for block in launched.drawn:
            output.sampled.update(_sampled(block))
        for chunk, offset in _offsets(launched.batch.chunks):
            if chunk.scored:
                output.scored[chunk.seq.id] = self._score(chunk, offset, launched)
            if chunk.seq.request.task is Task.EMBED:
                output.pooled[chunk.seq.id] = self._pool(chunk, offset, launched.hidden)
        return output

    def follow(self, connected: Callable[[], None] = lambda: None) -> None:
        """For all processes of a mesh but the first: repeats the leader's steps until it is gone. Calls `connected`
        once it follows.
        """
        assert isinstance(self.programs, Programs)
        follow(self.programs, self._arrays, connected)

    @property
    def _arrays(self) -> tuple[Any, ...]:
        """All arrays on the devices that programs read before the first step."""
        return self._weights, self._cache, self._tokens, self._adapters

    def _shape_of(self, batch: Batch) -> StepShape:
        """The smallest shape that holds the batch."""
        if any(chunk.scored for chunk in batch.chunks):
            # The only shape with a program for scoring.
            return self._shapes[-1]
        longest = max(chunk.length for chunk in batch.chunks)
        return smallest_shape(self._shapes, tokens=batch.num_tokens, sequences=len(batch.chunks), longest=longest)

    # Sampling

    def _generate(
        self, launched: "_Launched", shape: StepShape, integers: Any, adapters: tuple[Any, ...], draws: Draws
    ) -> None:
        """A step and its draws by one program."""
        packed, kind = self._draws.write(draws, shape.rows)
        program, both = self.programs["generate", shape, kind], np.concatenate((integers, packed.reshape(-1)))
        self._cache, drawn = Generated(*program(self._weights, self._cache, self._tokens, both, *adapters))
        self._tokens = drawn.last
        launched.drawn.append(_DrawnBlock([seq for _, seq in draws], drawn))
        self._remember(launched.drawn)

    def _draw_late(self, launched: "_Launched", logits: Any, draws: Draws, kept: Draws) -> None:
        """Draws with the masks that sequences have now; all else is as it was when the step was launched."""
        for (_, seq), (_, view) in zip(draws, kept, strict=True):
            view.mask = seq.mask
        self._draw(launched, logits, kept)

    def _draw(self, launched: "_Launched", logits: Any, draws: Draws) -> None:
        """Draws in blocks of `rows`: one prompt may have more choices than there are rows."""
        if not draws:
            self._last = _LastDrawn()
            return
        rows = launched.shape.rows
        if len(draws) > rows:
            # Blocks after the first could not look up pending tokens: the first one's have replaced them.
            draws = [(row, self._known(seq)) for row, seq in draws]
        for at in range(0, len(draws), rows):
            launched.drawn.append(self._draw_block(logits, draws[at : at + rows], rows))
        self._remember(launched.drawn)

    def _draw_block(self, logits: Any, draws: Draws, rows: int) -> "_DrawnBlock":
        seqs = [seq for _, seq in draws]
        packed, kind = self._draws.write(draws, rows)
        scores, sources, edits = logits, packed[0].copy(), tuple[Any, ...]()
        if any(map(_changes_scores, seqs)):
            words = self._mask_words
            changes = packed_edits(seqs, self._last.reference, rows=rows, vocab=self._vocab, words=words)
            if changes is not None:
                kind, edits = DrawKind.EDITED, changes
            else:
                scores, packed[0] = self._edited(self._on_host(logits), draws, rows), np.arange(rows)
        drawn = Drawn(*self.programs["draw", rows, kind](scores, self._tokens, packed, *edits))
        self._tokens = drawn.last
        if all(seq.request.params.logprobs is None for seq in seqs):
            return _DrawnBlock(seqs, drawn)
        return _DrawnBlock(seqs, drawn, self.programs["logprobs", rows](logits, sources, drawn.results))

    def _edited(self, whole: Floats, draws: Draws, rows: int) -> Floats:
        """The scores of each draw, after its request's changes. Padding to the device's vocabulary stays as it is."""
        scores = np.zeros((rows, whole.shape[1]), np.float32)
        scores[: len(draws)] = whole[[row for row, _ in draws]]
        known = [(number, self._known(seq)) for number, (_, seq) in enumerate(draws)]
        edit(scores[:, : self._vocab], known)
        with np.errstate(invalid="ignore"):
            for number, seq in known:
                mask(scores[number, : self._vocab], seq.mask)
        return scores

    def _known(self, seq: Sequence) -> Sequence:
        """The sequence with the token that is still pending in the engine, but is known here."""
        if not seq.num_pending:
            return seq
        view = copy(seq)
        view.token_ids = [*seq.token_ids[:-1], self._last.token(seq.id)]
        view.num_pending = 0
        return view

    def _remember(self, blocks: Seq["_DrawnBlock"]) -> None:
        if len(blocks) == 1:
            blocks[0].copy_to_host()
            self._last = _LastDrawn(blocks[0].drawn, {seq.id: number for number, seq in enumerate(blocks[0].seqs)})
            return
        # The next step cannot look up tokens in several arrays, so it gets their values.
        known: dict[int, int] = {}
        for block in blocks:
            known |= {seq.id: int(token) for seq, token in zip(block.seqs, block.drawn.on_host()[0], strict=False)}
        self._last = _LastDrawn(known=known)

    def _on_host(self, logits: Any) -> Floats:
        """All ranks' logits. Those of other processes have to be copied to this one's devices first."""
        return np.asarray(logits if logits.is_fully_addressable else self.programs["gather", len(logits)](logits))

    # Scoring, embedding, copying

    def _score(self, chunk: Chunk, offset: int, launched: "_Launched") -> list[TokenLogprob]:
        found: list[TokenLogprob] = []
        head, shape = self._weights.head_matrix, launched.shape
        each = np.arange(shape.rows, dtype=np.int32)
        for at in range(chunk.scored.start, chunk.scored.stop, shape.rows):
            positions = range(at, min(at + shape.rows, chunk.scored.stop))
            asked, targets = np.zeros(shape.rows, np.int32), np.zeros((2, shape.rows), np.int32)
            asked[: len(positions)] = np.array(positions) - chunk.start + offset
            targets[0, : len(positions)] = chunk.seq.token_ids[positions.start + 1 : positions.stop + 1]
            logits = self.programs["logits", shape](head, launched.hidden, asked)
            logprobs = Logprobs.of(self.programs["logprobs", shape.rows](logits, each, targets))
            found += [logprobs.entry(number, chunk.num_top) for number in range(len(positions))]
        return found

    def _pool(self, chunk: Chunk, offset: int, hidden: Any) -> list[float]:
        rows, divisor = pooled_rows(self._pooling, chunk)
        own = np.asarray(hidden)[offset : offset + chunk.length].astype(np.float32)
        pooled: list[float] = (own[rows].sum(0) / np.float32(divisor)).tolist()
        return pooled

    def _copied(self, program: Key, kept: Any, copies: Seq[tuple[int, int]], number: int) -> Any:
        """What is kept, `number` pages or states, with the copies made."""
        for at in range(0, len(copies), COPIES):
            # A copy to a page or slot beyond the last one is dropped.
            pairs = np.full((2, COPIES), number, np.int32)
            own = np.array(copies[at : at + COPIES], np.int32).T
            pairs[:, : own.shape[1]] = own
            kept = self.programs[program](kept, pairs)
        return kept

    # Counting

    def _recompiles(self) -> int:
        """Programs compiled since the last call. There should be none."""
        before, self._known_compilations = self._known_compilations, compilations().number
        return self._known_compilations - before


def _numbering(placed: PlacedModel) -> Callable[[str | None], int]:
    """The numbers of adapters in a step's input."""
    return (lambda adapter: 0) if placed.adapters is None else placed.adapters.layout.number


def _describe(compiler: Compiler, programs: Programs, steps_ahead: int) -> RunnerSpec:
    placed, sizes = compiler.placed, compiler.sizes
    shape, ranks, dtype = placed.described.shape, placed.cut.ranks, np.dtype(placed.dtype)
    cache = compiler.cache_bytes // ranks
    return RunnerSpec(
        page_size=sizes.page_size,
        num_pages=sizes.num_pages,
        max_seq_len=shape.max_seq_len,
        vocab_size=shape.vocab_size,
        max_batch_tokens=sizes.max_batch_tokens,
        max_batch_seqs=sizes.max_batch_seqs,
        steps_ahead=steps_ahead,
        generates=placed.described.head is not None,
        constrains=True,
        masks_late=True,
        num_states=sizes.num_states,
        state_bytes=compiler.state_bytes,
        # On a CPU all of it is the process's own memory, and pages are filled with zeros from the start.
        device_bytes=0 if placed.platform == "cpu" else placed.rank_bytes + cache + programs.step_bytes(),
        device=placed.platform,
        devices=ranks,
        backend=f"jax ({placed.platform}, {ranks} devices)" if ranks > 1 else f"jax ({placed.platform})",
        precision=in_words([dtype.name], dtype.name),
        num_programs=len(programs),
        compile_seconds=programs.seconds,
    )


@dataclass(frozen=True, slots=True)
class _DrawnBlock:
    """Tokens that one program drew, on the device; one for each sequence, then padding."""

    seqs: Seq[Sequence]
    drawn: Drawn
    logprobs: Any = None
    """As `Logprobs` reads them; None if nobody asked for any."""

    def copy_to_host(self) -> None:
        """Starts the copy before anybody waits for it."""
        self.drawn.results.copy_to_host_async()
        if self.logprobs is not None:
            self.logprobs.copy_to_host_async()


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launched step's arrays on the device, until its results are read."""

    batch: Batch
    shape: StepShape
    hidden: Any
    """None if no result needs it."""
    drawn: list[_DrawnBlock] = field(default_factory=list)


def _sampled(block: _DrawnBlock) -> Iterator[tuple[int, SampledToken]]:
    tokens, peaks = block.drawn.on_host()
    logprobs = None if block.logprobs is None else Logprobs.of(block.logprobs)
    for number, seq in enumerate(block.seqs):
        top = seq.request.params.logprobs
        logprob = None if logprobs is None or top is None else logprobs.entry(number, top)
        yield seq.id, outcome(int(tokens[number]), float(peaks[number]), logprob)


def _changes_scores(seq: Sequence) -> bool:
    return is_edited(seq) or seq.mask is not None


def _needs_logits(seq: Sequence) -> bool:
    """Whether the logits of its next token serve for more than a draw."""
    return _changes_scores(seq) or _is_mask_unknown(seq) or seq.request.params.logprobs is not None


def _is_mask_unknown(seq: Sequence) -> bool:
    return seq.matcher is not None and seq.num_pending > 0


def _as_it_is(seq: Sequence) -> Sequence:
    """A snapshot that does not change with the sequence."""
    view = copy(seq)
    view.token_ids = list(seq.token_ids)
    return view


@dataclass(frozen=True, slots=True)
class _LastDrawn:
    """The tokens of the last step, by sequence id: most are still on the device."""

    drawn: Drawn | None = None
    rows: Mapping[int, int] = field(default_factory=dict)
    """Where a sequence's token is in `drawn`."""
    known: Mapping[int, int] = field(default_factory=dict)

    def reference(self, seq_id: int) -> int:
        """The token itself, or -1 - its row."""
        return self.known[seq_id] if seq_id in self.known else -1 - self.rows[seq_id]

    def token(self, seq_id: int) -> int:
        """Waits for the device."""
        if seq_id in self.known:
            return self.known[seq_id]
        assert self.drawn is not None
        return int(self.drawn.on_host()[0][self.rows[seq_id]])


def _reads_hidden(chunk: Chunk) -> bool:
    """Whether its results are computed from hidden states."""
    return bool(chunk.scored) or chunk.seq.request.task is Task.EMBED


def _offsets(chunks: Seq[Chunk]) -> Iterator[tuple[Chunk, int]]:
    """Each chunk, and the number of its first token in the step."""
    offset = 0
    for chunk in chunks:
        yield chunk, offset
        offset += chunk.length


class JaxProfiler(Profiler):
    def __init__(self) -> None:
        self._directory = TemporaryDirectory(prefix="ostro-profile-")
        options = jax.profiler.ProfileOptions()
        # Otherwise every Python call would be an event, which slows it down.
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._directory.name, create_perfetto_trace=True, profiler_options=options)

    def span(self, name: str, **counts: int) -> AbstractContextManager[object]:
        return jax.profiler.TraceAnnotation(name, **counts)

    def write(self, path: Path) -> None:
        with self._directory as directory:
            jax.profiler.stop_trace()
            [trace] = Path(directory).glob("plugins/profile/*/perfetto_trace.json.gz")
            shutil.move(trace, path)
