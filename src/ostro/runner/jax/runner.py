"""Runs batches with JAX: Batch -> one array of integers -> programs on a mesh -> tokens. Knows no schedule and no text.

    step      tokens -> keys and values into pages, hidden states, logits of the rows that sample
    draw      logits -> tokens, on the device; the next step reads them there, before the host has seen them
    logits    hidden states -> logits of further rows, for prompt log-probabilities

If a request changes its scores (penalties, biases, bans, masks, top-n-sigma), the step's logits are changed on the host
and sent back, so `launch` waits for the device.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from ostro.engine.batch import Batch, Chunk
from ostro.engine.profile import Profiler
from ostro.engine.request import Task
from ostro.engine.runner import RunnerSpec, SampledToken, Step, StepOutput, TokenLogprob
from ostro.engine.sequence import Sequence
from ostro.runner.array_edits import Floats, edit, is_edited, mask
from ostro.runner.array_logprobs import token_logprob
from ostro.runner.honoured import check_honoured
from ostro.runner.jax.compiling import COPIES, Compiler
from ostro.runner.jax.hosts import LeadingPrograms, follow, lead, leads_others
from ostro.runner.jax.inputs import InputWriter
from ostro.runner.jax.placed import PlacedModel
from ostro.runner.jax.profiler import JaxProfiler
from ostro.runner.jax.program import StepResult
from ostro.runner.jax.programs import Programs, compilations
from ostro.runner.jax.sampling import Drawn
from ostro.runner.jax.shapes import Sizes, StepShape, smallest_shape
from ostro.runner.jax.weights import COPIED
from ostro.runner.outcome import outcome
from ostro.runner.pooling import pooled_rows
from ostro.runner.precision import in_words
from ostro.runner.random_key import stream_keys
from ostro.weights import Pooling

_TINY = float(np.finfo(np.float32).tiny)
"""Stands for temperatures and shares that float32 would round to zero, which mean something else."""

DRAWN = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Fields of SamplingParams that `draw_settings` passes on."""

check_honoured("the JAX runner", DRAWN)

Draws = Seq[tuple[int, Sequence]]
"""Rows of logits, and the sequences that want a token from them."""


class JaxRunner:
    """Owns the pages and the programs of one model on a mesh."""

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
        self._sizes, self._pooling = sizes, pooling
        compiler = Compiler(placed, sizes)
        self._shapes = compiler.shapes
        self._inputs = InputWriter(sizes, self._shapes)
        self.strides = 0
        programs = Programs(placed.mesh, compiler.kept() if keeps_programs else None)
        programs.add(*compiler.recipes(), done=self._count_stride)
        self._pages = compiler.pages()
        self._tokens = jax.device_put(np.zeros(self._shapes[-1].rows, np.int32), NamedSharding(self._mesh, COPIED))
        self._last = _LastDrawn()
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
        self._copy_pages(batch.page_copies)
        shape = self._shape_of(batch)
        program = self.programs["step", shape]
        integers = self._inputs.write(batch.chunks, shape, self._last.reference)
        result = StepResult(*program(self._weights, self._pages, self._tokens, integers))
        self._pages = result.pages
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        draws = [(row, seq) for row, chunk in enumerate(sampling) for seq in chunk.samples]
        drawn = self._draw(result.logits, draws, shape.rows)
        # What no result is made from is freed now: the logits of a large batch take 150 MB.
        hidden = result.hidden if any(map(_reads_hidden, batch.chunks)) else None
        logits = result.logits if any(seq.request.params.logprobs is not None for _, seq in draws) else None
        return Step(partial(self._results, _Launched(batch, shape, hidden, logits, draws, drawn)))

    def _results(self, launched: "_Launched") -> StepOutput:
        output = StepOutput(recompiles=self._recompiles())
        if launched.draws:
            output.sampled.update(self._sampled(launched))
        for chunk, offset in _offsets(launched.batch.chunks):
            if chunk.scored:
                output.scored[chunk.seq.id] = self._score(chunk, offset, launched)
            if chunk.seq.request.task is Task.EMBED:
                output.pooled[chunk.seq.id] = self._pool(chunk, offset, launched.hidden)
        return output

    def _sampled(self, launched: "_Launched") -> Iterator[tuple[int, SampledToken]]:
        tokens = np.concatenate([np.asarray(block.tokens) for block in launched.drawn])
        peaks = np.concatenate([np.asarray(block.peaks) for block in launched.drawn])
        logprobs = self._logprobs(launched.logits, launched.draws, tokens)
        for number, (_, seq) in enumerate(launched.draws):
            yield seq.id, outcome(int(tokens[number]), float(peaks[number]), logprobs.get(number))

    def follow(self) -> None:
        """Repeats the steps of the leader's runner until it is gone. For all processes of a mesh but the first."""
        assert isinstance(self.programs, Programs)
        follow(self.programs, self._arrays, self._count_stride)

    @property
    def _arrays(self) -> tuple[Any, ...]:
        """All that programs take from the devices before the first step."""
        return self._weights, self._pages, self._tokens

    def _shape_of(self, batch: Batch) -> StepShape:
        """The smallest shape that holds the batch."""
        if any(chunk.scored for chunk in batch.chunks):
            # The only one with a program for scoring.
            return self._shapes[-1]
        longest = max(chunk.length for chunk in batch.chunks)
        return smallest_shape(self._shapes, tokens=batch.num_tokens, sequences=len(batch.chunks), longest=longest)

    # Sampling

    def _draw(self, logits: Any, draws: Draws, rows: int) -> list[Drawn]:
        """Draws in blocks of `rows`: the choices of one prompt may be more than there are rows."""
        if not draws:
            self._last = _LastDrawn()
            return []
        changed = any(is_edited(seq) or seq.mask is not None for _, seq in draws)
        whole = self._on_host(logits) if changed else None
        blocks = [draws[at : at + rows] for at in range(0, len(draws), rows)]
        drawn = [self._draw_block(logits, whole, block, rows) for block in blocks]
        self._remember(blocks, drawn)
        return drawn

    def _draw_block(self, logits: Any, whole: Floats | None, draws: Draws, rows: int) -> Drawn:
        scores = logits
        if whole is not None:
            scores = self._edited(whole, draws, rows)
            draws = [(number, seq) for number, (_, seq) in enumerate(draws)]
        integers, floats, truncates = draw_settings(draws, rows, self._model.shape.vocab_size)
        drawn = Drawn(*self.programs["draw", rows, truncates](scores, self._tokens, integers, floats))
        self._tokens = drawn.last
        return drawn

    def _edited(self, whole: Floats, draws: Draws, rows: int) -> Floats:
        """The scores of each draw, after its request's changes. Padding to the device's vocabulary stays as it is."""
        vocab = self._model.shape.vocab_size
        scores = np.zeros((rows, whole.shape[1]), np.float32)
        scores[: len(draws)] = whole[[row for row, _ in draws]]
        known = [(number, self._known(seq)) for number, (_, seq) in enumerate(draws)]
        edit(scores[:, :vocab], known)
        with np.errstate(invalid="ignore"):
            for number, seq in known:
                mask(scores[number, :vocab], seq.mask)
        return scores

    def _known(self, seq: Sequence) -> Sequence:
        """The sequence with the token that is still pending in the engine, but is known here."""
        if not seq.num_pending:
            return seq
        view = copy(seq)
        view.token_ids = [*seq.token_ids[:-1], self._last.token(seq.id)]
        view.num_pending = 0
        return view

    def _remember(self, blocks: Seq[Draws], drawn: Seq[Drawn]) -> None:
        if len(blocks) == 1:
            drawn[0].tokens.copy_to_host_async()
            drawn[0].peaks.copy_to_host_async()
            rows = {seq.id: number for number, (_, seq) in enumerate(blocks[0])}
            self._last = _LastDrawn(drawn[0].tokens, rows)
            return
        # The next step could not look tokens up in several arrays: it gets their values.
        known: dict[int, int] = {}
        for block, own in zip(blocks, drawn, strict=True):
            known |= {seq.id: int(token) for (_, seq), token in zip(block, np.asarray(own.tokens), strict=False)}
        self._last = _LastDrawn(known=known)

    def _logprobs(self, logits: Any, draws: Draws, tokens: npt.NDArray[np.int32]) -> dict[int, TokenLogprob]:
        tops = {number: seq.request.params.logprobs for number, (_, seq) in enumerate(draws)}
        if all(top is None for top in tops.values()):
            return {}
        whole = self._on_host(logits)[:, : self._model.shape.vocab_size]
        return {
            number: token_logprob(whole[draws[number][0]], int(tokens[number]), top)
            for number, top in tops.items()
            if top is not None
        }

    def _on_host(self, logits: Any) -> Floats:
        """All ranks' logits. Those of other processes have to be copied to this one's devices first."""
        return np.asarray(logits if logits.is_fully_addressable else self.programs["gather", len(logits)](logits))

    # Scoring, embedding, copying

    def _score(self, chunk: Chunk, offset: int, launched: "_Launched") -> list[TokenLogprob]:
        found: list[TokenLogprob] = []
        head, shape = self._weights.head_matrix, launched.shape
        for at in range(chunk.scored.start, chunk.scored.stop, shape.rows):
            positions = range(at, min(at + shape.rows, chunk.scored.stop))
            asked = np.zeros(shape.rows, np.int32)
            asked[: len(positions)] = np.array(positions) - chunk.start + offset
            logits = self._on_host(self.programs["logits", shape](head, launched.hidden, asked))
            targets = chunk.seq.token_ids[positions.start + 1 : positions.stop + 1]
            for row, target in zip(logits[:, : self._model.shape.vocab_size], targets, strict=False):
                found.append(token_logprob(row, target, chunk.num_top))
        return found

    def _pool(self, chunk: Chunk, offset: int, hidden: Any) -> list[float]:
        rows, divisor = pooled_rows(self._pooling, chunk)
        own = np.asarray(hidden)[offset : offset + chunk.length].astype(np.float32)
        pooled: list[float] = (own[rows].sum(0) / np.float32(divisor)).tolist()
        return pooled

    def _copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        for at in range(0, len(copies), COPIES):
            # A page beyond the last one is written nowhere.
            pairs = np.full((2, COPIES), self._sizes.num_pages, np.int32)
            own = np.array(copies[at : at + COPIES], np.int32).T
            pairs[:, : own.shape[1]] = own
            self._pages = self.programs[("copy",)](self._pages, pairs)

    # Counting

    def _count_stride(self) -> None:
        self.strides += 1

    def _recompiles(self) -> int:
        """Programs compiled since the last call. There should be none."""
        before, self._known_compilations = self._known_compilations, compilations().number
        return self._known_compilations - before


def _describe(compiler: Compiler, programs: Programs, steps_ahead: int) -> RunnerSpec:
    placed, sizes = compiler.placed, compiler.sizes
    shape, ranks, dtype = placed.described.shape, placed.cut.ranks, np.dtype(placed.dtype)
    pages = compiler.page_bytes // ranks
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
        # On a CPU all of it is the process's own memory, and pages are filled with zeros from the start.
        device_bytes=0 if placed.platform == "cpu" else placed.rank_bytes + pages + programs.step_bytes(),
        device=placed.platform,
        devices=ranks,
        backend=f"jax ({placed.platform}, {ranks} devices)" if ranks > 1 else f"jax ({placed.platform})",
        precision=in_words([dtype.name], dtype.name),
        num_programs=len(programs),
        compile_seconds=programs.seconds,
    )


class _Launched(NamedTuple):
    """What is left of a step on the device until its results are wanted. Of `hidden` and `logits`, only what they are
    made from.
    """

    batch: Batch
    shape: StepShape
    hidden: Any
    logits: Any
    draws: Draws
    drawn: Seq[Drawn]


@dataclass(frozen=True, slots=True)
class _LastDrawn:
    """The tokens of the last step, by sequence id: most are still on the device."""

    tokens: Any = None
    rows: Mapping[int, int] = field(default_factory=dict)
    """Where a sequence's token is in `tokens`."""
    known: Mapping[int, int] = field(default_factory=dict)

    def reference(self, seq_id: int) -> int:
        """The token itself, or -1 - its row."""
        return self.known[seq_id] if seq_id in self.known else -1 - self.rows[seq_id]

    def token(self, seq_id: int) -> int:
        """Waits for the device."""
        return self.known[seq_id] if seq_id in self.known else int(np.asarray(self.tokens)[self.rows[seq_id]])


def _reads_hidden(chunk: Chunk) -> bool:
    """Whether the step's results for it are made from hidden states."""
    return bool(chunk.scored) or chunk.seq.request.task is Task.EMBED


def _offsets(chunks: Seq[Chunk]) -> Iterator[tuple[Chunk, int]]:
    """Each chunk, and the number of its first token in the step."""
    offset = 0
    for chunk in chunks:
        yield chunk, offset
        offset += chunk.length


def draw_settings(draws: Draws, rows: int, vocab: int) -> tuple[npt.NDArray[np.int32], Floats, bool]:
    """The arrays that `DrawSettings` is made of, and whether any row has a top-k or top-p."""
    integers, floats = np.zeros((4, rows), np.int32), np.zeros((3, rows), np.float32)
    floats[1] = 1.0
    integers[0, : len(draws)] = [row for row, _ in draws]
    own = [number for number, (_, seq) in enumerate(draws) if not seq.request.params.greedy]
    if not own:
        return integers, floats, False
    seqs = [draws[number][1] for number in own]
    params = [seq.request.params for seq in seqs]
    integers[1, own] = [each.top_k if 0 < each.top_k < vocab else 0 for each in params]
    keys = stream_keys([(seq.request.seed, seq.choice, seq.num_output) for seq in seqs])
    integers[2, own], integers[3, own] = keys >> 32, keys.astype(np.uint32).view(np.int32)
    floats[0, own] = np.maximum([each.temperature for each in params], _TINY)
    floats[1, own] = np.maximum([each.top_p for each in params], _TINY)
    floats[2, own] = [each.min_p for each in params]
    truncates = bool((integers[1] > 0).any() or (floats[1] < 1.0).any())
    return integers, floats, truncates
