"""A runner without a model: deterministic, and as strict about pages as a device is.

Each slot of a page holds a hash of its token and of every slot before it, read through the page table as attention
would. So one wrong, stale or never written page changes every token after it, and a test that compares outputs sees it.
With slots for recurrent states, each value also depends on a hash of all tokens so far, in order, that only the
sequence's slot holds.
Used by the tests of the engine and by load tests of everything above it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ostro.engine.batch import Batch, Chunk
from ostro.engine.request import Request, Task
from ostro.engine.runner import RunnerSpec, SampledToken, Step, StepOutput, TokenLogprob
from ostro.engine.sequence import PENDING, Sequence

_MASK = (1 << 64) - 1
_UNWRITTEN = 0xDEAD


def _mix(state: int, value: int) -> int:
    state = (state ^ value) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ state >> 29


def _slot_value(attended: int, token: int) -> int:
    """The value in the slot of `token`, given the sum of all slots before it."""
    return _mix(attended & _MASK, token + 1)


@dataclass(frozen=True, slots=True)
class FakeState:
    """A slot's content: the state after some tokens, and the drafts that were computed after them."""

    end: int
    value: int
    drafts: tuple[int, ...] = ()

    def at(self, position: int) -> int:
        """The state there, if that is within the drafts; anywhere else this slot knows nothing."""
        if not 0 <= position - self.end <= len(self.drafts):
            return _UNWRITTEN
        return _folded(self.value, self.drafts[: position - self.end])


_NO_STATE = FakeState(-1, _UNWRITTEN)


def _folded(state: int, token_ids: Iterable[int]) -> int:
    """The state after further tokens."""
    for token in token_ids:
        state = _mix(state, token + 1)
    return state


class Script(NamedTuple):
    """Answers to prompts that contain the key. If a prompt contains several keys, the last one counts."""

    key: list[int]
    answers: list[list[int]]
    """One per choice, in turn. The end-of-sequence token follows each."""


class FakeRunner:
    strides = 0
    failure = None

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        max_seq_len: int = 256,
        vocab_size: int = 1000,
        max_batch_tokens: int = 512,
        max_batch_seqs: int = 64,
        strict: bool = True,
        steps_ahead: int = 0,
        masks_late: bool = False,
        keeps_kv: bool = True,
        context_price: float = 0.0,
        max_sampled: int = 0,
        num_states: int = 0,
        state_every: int = 1,
        scripts: Iterable[Script] = (),
    ) -> None:
        """Without `strict` a slot holds the sum up to it, so that a step reads one slot, not all before it: the same
        tokens at a cost that does not grow with the context, for load tests.
        """
        self._scripts = list(scripts)
        self._scripted: dict[int, list[int] | None] = {}
        """Scripted answers by sequence id; None for a sequence without one."""
        self._spec = RunnerSpec(
            page_size=page_size,
            num_pages=num_pages,
            max_seq_len=max_seq_len,
            vocab_size=vocab_size,
            max_batch_tokens=max_batch_tokens,
            max_batch_seqs=max_batch_seqs,
            context_price=context_price,
            steps_ahead=steps_ahead,
            keeps_kv=keeps_kv,
            constrains=True,
            masks_late=masks_late,
            max_sampled=max_sampled,
            num_states=num_states,
            state_bytes=8 if num_states else 0,
            state_every=state_every,
            is_invariant=True,
            backend="fake",
            precision="no weights",
        )
        self._strict = strict
        self._slots = [_UNWRITTEN] * (num_pages * page_size)
        self._states = [_NO_STATE] * num_states
        # The last step's tokens, for sequences whose next step begins before the engine has read them.
        self._sampled: dict[int, SampledToken] = {}

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def launch(self, batch: Batch) -> Step:
        unmasked: list[tuple[Sequence, int, int]] = []
        output = self.run(batch, unmasked)
        self._sampled = output.sampled

        def sample() -> None:
            for seq, attended, at in unmasked:
                output.sampled[seq.id] = self._sample(attended, seq, at)

        return Step(lambda: output, sample if unmasked else None)

    def run(self, batch: Batch, unmasked: list[tuple[Sequence, int, int]] | None = None) -> StepOutput:
        """Adds to `unmasked` the sequences whose masks are not known yet, with the arguments to sample them later."""
        for source, target in batch.page_copies:
            self.write_page(target, self.read_page(source))
        for source, target in batch.state_copies:
            self._states[target] = self._states[source]
        output = StepOutput()
        for chunk in batch.chunks:
            attended = list(self._compute(chunk))
            for seq in chunk.samples:
                at = chunk.end - seq.num_prompt
                last = attended[chunk.length - 1]
                if unmasked is not None and seq.matcher is not None and seq.num_pending:
                    unmasked.append((seq, last, at))
                else:
                    output.sampled[seq.id] = self._sample(last, seq, at)
            if chunk.drafts:
                output.followed[chunk.seq.id] = [
                    self._sample(each, supposed, supposed.num_output)
                    for each, [supposed] in zip(attended[chunk.length :], chunk.samplers[1:], strict=True)
                ]
            if chunk.scored:
                output.scored[chunk.seq.id] = [
                    self._score(attended[position - chunk.start], chunk.seq.token_ids[position + 1])
                    for position in chunk.scored
                ]
            if chunk.seq.request.task is Task.EMBED:
                output.pooled[chunk.seq.id] = [self._pool(attended)]
        return output

    def read_page(self, page: int) -> list[int]:
        size = self._spec.page_size
        return self._slots[page * size : (page + 1) * size]

    def write_page(self, page: int, slots: list[int] | None = None) -> None:
        """Without `slots`, marks the page as never written."""
        size = self._spec.page_size
        self._slots[page * size : (page + 1) * size] = [_UNWRITTEN] * size if slots is None else slots

    def read_state(self, slot: int) -> FakeState:
        return self._states[slot]

    def write_state(self, slot: int, state: FakeState | None = None) -> None:
        """Without `state`, marks the slot as never written."""
        self._states[slot] = state or _NO_STATE

    def expected_tokens(self, seq: Sequence, count: int) -> list[int]:
        """The oracle: the tokens that the sequence must generate, ignoring stops, computed without pages."""
        twin = Sequence(seq.id, seq.request, choice=seq.choice, max_len=seq.max_len)
        attended = state = 0
        for token in twin.token_ids:
            attended, state = self._follow(attended, state, token)
        for at in range(count):
            token = self._sample(attended, twin, at).token_id
            twin.token_ids.append(token)
            attended, state = self._follow(attended, state, token)
        return twin.output_ids

    def expected_next(self, seq: Sequence) -> SampledToken:
        """The token that the sequence must sample next, under its mask."""
        *_, attended = self._attended(seq.token_ids)
        return self._sample(attended, seq, seq.num_output)

    def expected_logprob(self, token_ids: list[int], at: int) -> TokenLogprob:
        """The log-probability of the token at that position, had it been scored."""
        *_, attended = self._attended(token_ids[:at])
        return self._score(attended, token_ids[at])

    def expected_prompt_logprobs(self, request: Request) -> list[TokenLogprob]:
        """The log-probabilities that the request asks for, from its first wanted position on."""
        first = max(request.prompt_logprobs_from or 0, 1)
        if request.prompt_logprobs_from is None or first >= len(request.prompt_ids):
            return []
        sums = list(self._attended(request.prompt_ids))
        return [self._score(sums[at - 1], request.prompt_ids[at]) for at in range(first, len(request.prompt_ids))]

    def expected_pooled(self, request: Request) -> list[float]:
        return [self._pool(list(self._attended(request.prompt_ids)))]

    def _attended(self, token_ids: Iterable[int]) -> Iterator[int]:
        """For each position, the sum of the values that all slots up to it must hold."""
        attended = state = 0
        for token in token_ids:
            attended, state = self._follow(attended, state, token)
            yield attended

    def _follow(self, attended: int, state: int, token: int) -> tuple[int, int]:
        """The sum of all slots' values, and the state, after one more token."""
        if self._states:
            state = _mix(state, token + 1)
        return attended + _slot_value(attended + state, token), state

    def _compute(self, chunk: Chunk) -> Iterator[int]:
        """Fills the chunk's slots; yields, for each of its positions, the sum of all slots up to it."""
        if not self._spec.keeps_kv:
            yield from list(self._attended(chunk.seq.token_ids[: chunk.end]))[chunk.start :]
            return
        size, pages = self._spec.page_size, chunk.seq.pages
        attended = self._attend(pages, chunk.start)
        state = self._states[chunk.state].at(chunk.start) if self._states and chunk.start else 0
        for position, token in enumerate(chunk.token_ids, chunk.start):
            before, known = attended, self._sampled[chunk.seq.id].token_id if token == PENDING else token
            attended, state = self._follow(attended, state, known)
            self._slots[pages[position // size] * size + position % size] = (
                attended - before if self._strict else attended
            )
            if self._states:
                self._keep_state(chunk, FakeState(position + 1, state))
            yield attended

    def _keep_state(self, chunk: Chunk, state: FakeState) -> None:
        """Keeps the state after one of the chunk's tokens where it is wanted."""
        for offset, slot in chunk.captures:
            if chunk.start + offset == state.end:
                self._states[slot] = state
        if state.end == chunk.end:
            self._states[chunk.state] = replace(state, drafts=chunk.drafts)

    def _attend(self, pages: list[int], end: int) -> int:
        """The sum over the slots of the first `end` positions."""
        size = self._spec.page_size
        if not self._strict:
            return self._slots[pages[(end - 1) // size] * size + (end - 1) % size] if end else 0
        full, rest = divmod(end, size)
        attended = sum(sum(self._slots[page * size : (page + 1) * size]) for page in pages[:full])
        return attended + (sum(self._slots[pages[full] * size : pages[full] * size + rest]) if rest else 0)

    def _sample(self, attended: int, seq: Sequence, at: int) -> SampledToken:
        """Token `at` of the output."""
        request = seq.request
        state = _mix(attended & _MASK, 0)
        draw = state if request.params.greedy else _mix(_mix(state, request.seed & _MASK), seq.choice)
        token = self._scripted_token(seq, at)
        if token is None:
            token = draw % self._spec.vocab_size
        if seq.mask is not None and not seq.mask.cast("B")[token >> 3] >> (token & 7) & 1:
            token = _allowed(seq.mask, draw, self._spec.vocab_size)
        if at < request.params.min_tokens and token in seq.stop_ids:
            token = (token + 1) % self._spec.vocab_size
        wants = request.params.logprobs is not None
        return SampledToken(token, TokenLogprob(token, -1.0, 1) if wants else None)

    def _scripted_token(self, seq: Sequence, at: int) -> int | None:
        """The script's token, or the end of the sequence after its last; None without a script."""
        if not self._scripts:
            return None
        if seq.id not in self._scripted:
            self._scripted[seq.id] = _answer(self._scripts, list(seq.request.prompt_ids), seq.choice)
        answer = self._scripted[seq.id]
        if answer is None:
            return None
        return answer[at] if at < len(answer) else min(seq.request.eos_ids, default=None)

    def _score(self, attended: int, next_token: int) -> TokenLogprob:
        state = _slot_value(attended, next_token)
        return TokenLogprob(next_token, -(state % 10_000) / 1000, 1 + state % 7)

    def _pool(self, attended: list[int]) -> float:
        """A sum over positions, so that the chunks of a prompt add up to the whole."""
        return float(sum(each % 1000 for each in attended))


def _answer(scripts: Iterable[Script], prompt: list[int], choice: int) -> list[int] | None:
    found = max(((_last(prompt, script.key), script.answers) for script in scripts), key=lambda each: each[0])
    place, answers = found
    return answers[choice % len(answers)] if place >= 0 else None


def _last(prompt: list[int], key: list[int]) -> int:
    """The last position at which the key begins in the prompt; -1 if it is not there."""
    starts = range(len(prompt) - len(key), -1, -1)
    return next((start for start in starts if prompt[start : start + len(key)] == key), -1)


def _allowed(mask: memoryview, draw: int, vocab: int) -> int:
    """One of the tokens that the mask allows."""
    bits = int.from_bytes(mask, "little") & ((1 << vocab) - 1)
    rank, token = draw % bits.bit_count(), 0
    for width in (1 << exponent for exponent in reversed(range(vocab.bit_length()))):
        if rank >= (below := (bits & ((1 << width) - 1)).bit_count()):
            rank -= below
            bits >>= width
            token += width
    return token
