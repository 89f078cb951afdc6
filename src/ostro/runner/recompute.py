"""Runs models that keep no keys and values: each position that something is asked of takes a pass over all tokens up to
it. Batch -> passes -> model -> sampler. Knows no schedule and no text.

A pass refines its states in outer steps. With halting it ends when the model's own head prefers that, and the others go
on without it:

    step 1   [ a a a | b b | c c c c ]
    step 2   [ a a a | c c c c ]            b has halted
    step 3   [ a a a ]                      c has
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from ostro.engine.batch import Batch, Chunk
from ostro.models.hrm import HrmModel
from ostro.models.ragged import Ragged
from ostro.runner.base import RunnerSpec, StepOutput
from ostro.runner.devices import weight_formats
from ostro.runner.precision import in_words
from ostro.runner.sampler import position_logprobs, sample

# Of the logits that exist at a time.
_LOGITS_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Pass:
    """Over the first `length` tokens of a chunk's sequence, for the positions that are asked of."""

    chunk: Chunk
    length: int
    asked: range


class RecomputeRunner:
    """Owns the model, and no memory of sequences."""

    def __init__(
        self,
        model: HrmModel,
        *,
        steps: int | None = None,
        halting: bool = False,
        max_batch_tokens: int = 2048,
        max_batch_seqs: int = 64,
    ) -> None:
        """`steps` are the outer steps of a pass, with `halting` the most of them; None is the dialect's own number."""
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
            device=self.device.type,
            backend=f"torch ({self.device.type})",
            precision=in_words(weight_formats(model), None),
        )

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def launch(self, batch: Batch) -> Callable[[], StepOutput]:
        output = self.run(batch)
        return lambda: output

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        # Equally long ones beside each other: attention takes them together.
        passes = sorted((each for chunk in batch.chunks for each in _passes(chunk)), key=lambda each: each.length)
        states: list[Tensor] = []
        steps = 0
        for group in _groups(passes, self._spec.max_batch_tokens):
            refined, taken = self._refine(group)
            states += refined
            steps += taken
        output = StepOutput(outer_steps=steps, saved_steps=len(passes) * self.steps - steps)
        self._sample(passes, states, output)
        self._score(passes, states, output)
        return output

    def _refine(self, passes: Seq[_Pass]) -> tuple[list[Tensor], int]:
        """The final states of what each pass asks for, [asked, hidden], and how many outer steps that took in all."""
        model = self.model
        prefix = model.config.puzzle_len
        layout = Ragged([prefix + each.length for each in passes], self.device)
        ids = [token for each in passes for token in each.chunk.seq.token_ids[: each.length]]
        embedded, carry = model.embed(torch.tensor(ids, device=self.device), layout), model.start(layout)
        states: dict[int, Tensor] = {}
        going, taken = list(range(len(passes))), 0
        for step in range(1, self.steps + 1):
            carry = model.advance(carry, embedded, layout)
            self.strides += 1
            taken += len(going)
            done = self._done(
                model.halting(carry, layout) if self.halting else None, len(going), last=step == self.steps
            )
            for place, index in enumerate(going):
                if done[place]:
                    first, asked = layout.starts[place] + prefix, passes[index].asked
                    states[index] = carry.z_h[first + asked.start : first + asked.stop]
            staying = [place for place in range(len(going)) if not done[place]]
            if not staying:
                break
            if len(staying) < len(going):
                layout, rows = layout.take(staying)
                carry, embedded = carry.take(rows), embedded[rows]
                going = [going[place] for place in staying]
        return [states[index] for index in range(len(passes))], taken

    def _done(self, scores: Tensor | None, count: int, *, last: bool) -> list[bool]:
        if last or scores is None:
            return [last] * count
        return (scores[:, 0] > scores[:, 1]).tolist()

    def _sample(self, passes: Seq[_Pass], states: Seq[Tensor], output: StepOutput) -> None:
        """One row of logits for each chunk that samples, drawn from once for each of its samplers."""
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
            if not _is_last(each):
                seq = each.chunk.seq
                targets = seq.token_ids[each.asked.start + 1 : each.asked.stop + 1]
                wanted = rows.setdefault(seq.request.params.prompt_logprobs or 0, [])
                wanted += [(seq.id, target, state) for target, state in zip(targets, own, strict=True)]
        block = max(1, _LOGITS_BLOCK_BYTES // (4 * self._spec.vocab_size))
        for top, wanted in rows.items():
            for at in range(0, len(wanted), block):
                part = wanted[at : at + block]
                logits = self.model.head(torch.stack([state for *_, state in part]))
                scored = position_logprobs(logits, [target for _, target, _ in part], top)
                for (id, *_), logprob in zip(part, scored, strict=True):
                    output.prompt_logprobs.setdefault(id, []).append(logprob)


def _passes(chunk: Chunk) -> Iterator[_Pass]:
    """A chunk's passes in the order of its positions; what it samples from comes last."""
    if chunk.seq.request.one_pass:
        yield _Pass(chunk, chunk.end, chunk.scored)
        return
    for position in chunk.asked:
        yield _Pass(chunk, position + 1, range(position, position + 1))


def _is_last(each: _Pass) -> bool:
    """Whether it is the one that its chunk samples from."""
    return bool(each.chunk.samples) and each.length == each.chunk.end


def _groups(passes: Seq[_Pass], most: int) -> Iterator[list[_Pass]]:
    """As many at a time as hold no more tokens than that, and one at least."""
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
