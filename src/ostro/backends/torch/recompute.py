"""Runs models without a KV cache: every position whose output is needed takes a pass over all tokens up to it.
Batch -> passes -> model -> sampler. Knows no schedule and no text.

A pass refines its states in outer steps. With halting, it ends when the model's q-head says so, and the other passes
continue without it:

    step 1   [ a a a | b b | c c c c ]
    step 2   [ a a a | c c c c ]            b has halted
    step 3   [ a a a ]                      c has halted
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from ostro.backends.precision import in_words
from ostro.backends.sampling.sampler import position_logprobs, sample
from ostro.backends.torch.devices import weight_formats
from ostro.backends.torch.profiler import TorchProfiler
from ostro.engine.batch import Batch, Chunk
from ostro.engine.profile import Profiler
from ostro.engine.request import Task
from ostro.engine.runner import RunnerSpec, Solution, Step, StepOutput
from ostro.torch_models.hrm import HrmModel
from ostro.torch_models.ragged import Ragged

# Limits the logits that exist at a time.
_LOGITS_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass over the first `length` tokens of a chunk's sequence, for the positions in `asked`."""

    chunk: Chunk
    length: int
    asked: range


@dataclass(frozen=True, slots=True)
class _End:
    """The result of a pass."""

    states: Tensor
    """States of the requested positions, [asked, hidden]."""
    steps: int
    """Number of outer steps taken."""
    scores: Tensor | None
    """The q-head's scores, [2]; only if requested."""


class RecomputeRunner:
    """Owns the model; keeps no state per sequence."""

    failure = None

    def __init__(
        self,
        model: HrmModel,
        *,
        steps: int | None = None,
        halting: bool = False,
        max_batch_tokens: int = 2048,
        max_batch_seqs: int = 64,
    ) -> None:
        """`steps` is the number of outer steps per pass (the maximum with `halting`); None is the dialect's default."""
        config = model.config
        self.model = model
        self.steps = steps or config.decoding_steps
        self.halting = halting
        self.device = model.inner.H_init.device
        self.strides = 0
        self._spec = RunnerSpec(
            page_size=config.seq_len,
            num_pages=2 * max_batch_seqs,
            max_seq_len=config.seq_len,
            vocab_size=config.vocab_size,
            max_batch_tokens=max_batch_tokens,
            max_batch_seqs=max_batch_seqs,
            keeps_kv=False,
            constrains=True,
            num_puzzles=0 if config.dialect == "aios" else max(1, config.num_puzzles),
            device=self.device.type,
            backend=f"torch ({self.device.type})",
            precision=in_words(weight_formats(model), None),
        )

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def profiler(self) -> Profiler:
        return TorchProfiler(self.device)

    @property
    def _rows_at_a_time(self) -> int:
        """How many rows of logits may exist at once."""
        return max(1, _LOGITS_BLOCK_BYTES // (4 * self._spec.vocab_size))

    def launch(self, batch: Batch) -> Step:
        output = self.run(batch)
        return Step(lambda: output)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        # Sorted by length, because attention batches passes of equal length.
        passes = sorted((each for chunk in batch.chunks for each in _passes(chunk)), key=lambda each: each.length)
        ends = [end for group in _groups(passes, self._spec.max_batch_tokens) for end in self._refine(group)]
        steps = sum(end.steps for end in ends)
        output = StepOutput(outer_steps=steps, saved_steps=len(passes) * self.steps - steps)
        states = [end.states for end in ends]
        self._sample(passes, states, output)
        self._score(passes, states, output)
        self._solve(passes, ends, output)
        return output

    def _refine(self, passes: Seq[_Pass]) -> list[_End]:
        model = self.model
        prefix = model.config.puzzle_len
        layout = Ragged([prefix + each.length for each in passes], self.device)
        ids = [token for each in passes for token in each.chunk.seq.token_ids[: each.length]]
        puzzles = [each.chunk.seq.request.puzzle for each in passes]
        embedded, carry = model.embed(torch.tensor(ids, device=self.device), layout, puzzles), model.start(layout)
        ends: dict[int, _End] = {}
        going = list(range(len(passes)))
        for step in range(1, self.steps + 1):
            carry = model.advance(carry, embedded, layout)
            self.strides += 1
            last = step == self.steps
            asked_for = self.halting or (last and any(_solves(passes[index]) for index in going))
            scores = model.halting(carry, layout) if asked_for else None
            done = self._done(scores, len(going), last=last)
            for place, index in enumerate(going):
                if done[place]:
                    first, asked = layout.starts[place] + prefix, passes[index].asked
                    states = carry.z_h[first + asked.start : first + asked.stop]
                    ends[index] = _End(states, step, None if scores is None else scores[place])
            staying = [place for place in range(len(going)) if not done[place]]
            if not staying:
                break
            if len(staying) < len(going):
                layout, rows = layout.take(staying)
                carry, embedded = carry.take(rows), embedded[rows]
                going = [going[place] for place in staying]
        return [ends[index] for index in range(len(passes))]

    def _done(self, scores: Tensor | None, count: int, *, last: bool) -> list[bool]:
        if last or scores is None:
            return [last] * count
        return (scores[:, 0] > scores[:, 1]).tolist()

    def _sample(self, passes: Seq[_Pass], states: Seq[Tensor], output: StepOutput) -> None:
        """One row of logits per sampling chunk, drawn from once for each of its samplers."""
        pairs = [(each.chunk, own[-1:]) for each, own in zip(passes, states, strict=True) if _is_last(each)]
        if not pairs:
            return
        seqs = [seq for chunk, _ in pairs for seq in chunk.samples]
        logits = self.model.head(torch.cat([state for _, state in pairs]))
        if len(seqs) > len(pairs):
            counts = torch.tensor([len(chunk.samples) for chunk, _ in pairs], device=self.device)
            logits = logits.repeat_interleave(counts, 0)
        output.sampled.update(zip((seq.id for seq in seqs), sample(logits, seqs), strict=True))

    def _score(self, passes: Seq[_Pass], states: Seq[Tensor], output: StepOutput) -> None:
        """Log-probabilities of the tokens that follow, in blocks: never all positions times the vocabulary."""
        rows: dict[int, list[tuple[int, int, Tensor]]] = {}
        for each, own in zip(passes, states, strict=True):
            if not _is_last(each) and not _solves(each):
                seq = each.chunk.seq
                targets = seq.token_ids[each.asked.start + 1 : each.asked.stop + 1]
                wanted = rows.setdefault(each.chunk.num_top, [])
                wanted += [(seq.id, target, state) for target, state in zip(targets, own, strict=True)]
        block = self._rows_at_a_time
        for top, wanted in rows.items():
            for at in range(0, len(wanted), block):
                part = wanted[at : at + block]
                logits = self.model.head(torch.stack([state for *_, state in part]))
                scored = position_logprobs(logits, [target for _, target, _ in part], top)
                for (id, *_), logprob in zip(part, scored, strict=True):
                    output.scored.setdefault(id, []).append(logprob)

    def _solve(self, passes: Seq[_Pass], ends: Seq[_End], output: StepOutput) -> None:
        """The most likely token at each position, also in blocks."""
        for each, end in zip(passes, ends, strict=True):
            if _solves(each):
                assert end.scores is not None
                blocks = torch.split(end.states, self._rows_at_a_time)
                best = torch.cat([self.model.head(block).argmax(-1) for block in blocks])
                q_halt, q_continue = end.scores.tolist()
                output.solved[each.chunk.seq.id] = Solution(best.tolist(), end.steps, q_halt, q_continue)


def _passes(chunk: Chunk) -> Iterator[_Pass]:
    """A chunk's passes in order of position; the one it samples from comes last."""
    if chunk.seq.request.task is Task.SOLVE:
        yield _Pass(chunk, chunk.end, range(chunk.end))
        return
    if chunk.seq.request.one_pass:
        yield _Pass(chunk, chunk.end, chunk.scored)
        return
    for position in chunk.asked:
        yield _Pass(chunk, position + 1, range(position, position + 1))


def _solves(each: _Pass) -> bool:
    return each.chunk.seq.request.task is Task.SOLVE


def _is_last(each: _Pass) -> bool:
    """Whether the chunk samples from this pass."""
    return bool(each.chunk.samples) and each.length == each.chunk.end


def _groups(passes: Seq[_Pass], most: int) -> Iterator[list[_Pass]]:
    """Groups of at most `most` tokens, with at least one pass each."""
    group: list[_Pass] = []
    size = 0
    for each in passes:
        if group and size + each.length > most:
            yield group
            group, size = [], 0
        group.append(each)
        size += each.length
    if group:
        yield group


__all__ = ["RecomputeRunner"]
