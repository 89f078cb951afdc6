"""A runner without a model: deterministic, and as strict about pages as a device is.

Each slot of a page holds a hash of all tokens up to its position, made from the slot before it. So a token that was
computed from a wrong, stale or never written page changes every token after it, and a test that compares outputs sees
it. Used by the tests of the engine and by load tests of everything above it.
"""

from ostro.engine.batch import Batch, Chunk
from ostro.engine.sequence import Sequence
from ostro.runner.base import RunnerSpec, SampledToken, StepOutput, TokenLogprob

_MASK = (1 << 64) - 1
_UNWRITTEN = 0xDEAD
_START = 0x9E3779B97F4A7C15


def _mix(state: int, value: int) -> int:
    state = (state ^ value) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ state >> 29


class FakeRunner:
    def __init__(
        self, *, page_size: int = 4, num_pages: int = 64, max_seq_len: int = 256, vocab_size: int = 1000
    ) -> None:
        self._spec = RunnerSpec(
            page_size=page_size, num_pages=num_pages, max_seq_len=max_seq_len, vocab_size=vocab_size
        )
        self._slots = [_UNWRITTEN] * (num_pages * page_size)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def run(self, batch: Batch) -> StepOutput:
        size = self._spec.page_size
        for source, target in batch.page_copies:
            self._slots[target * size : (target + 1) * size] = self._slots[source * size : (source + 1) * size]
        output = StepOutput()
        for chunk in batch.chunks:
            self._compute(chunk)
            for seq in chunk.samples:
                output.sampled[seq.id] = self._sample(self._state(chunk.seq, chunk.end - 1), seq)
            if chunk.scored:
                output.prompt_logprobs[chunk.seq.id] = [self._score(chunk.seq, position) for position in chunk.scored]
        return output

    def expected_tokens(self, seq: Sequence, count: int) -> list[int]:
        """What the sequence must generate, computed without pages: the oracle."""
        state, tokens = _START, []
        for token in seq.request.prompt_ids:
            state = _mix(state, token)
        for _ in range(count):
            tokens.append(self._sample(state, seq).token_id)
            state = _mix(state, tokens[-1])
        return tokens

    def _compute(self, chunk: Chunk) -> None:
        state = self._state(chunk.seq, chunk.start - 1)
        for position in range(chunk.start, chunk.end):
            state = _mix(state, chunk.seq.token_ids[position])
            self._slots[self._slot(chunk.seq, position)] = state

    def _state(self, seq: Sequence, position: int) -> int:
        return self._slots[self._slot(seq, position)] if position >= 0 else _START

    def _slot(self, seq: Sequence, position: int) -> int:
        page, offset = divmod(position, self._spec.page_size)
        return seq.pages[page] * self._spec.page_size + offset

    def _sample(self, state: int, seq: Sequence) -> SampledToken:
        request = seq.request
        draw = state if request.params.greedy else _mix(_mix(state, request.seed & _MASK), seq.choice)
        token = draw % self._spec.vocab_size
        if seq.stops_banned and token in seq.stop_ids:
            token = (token + 1) % self._spec.vocab_size
        wants = request.params.logprobs is not None
        return SampledToken(token, TokenLogprob(token, -1.0, 1) if wants else None)

    def _score(self, seq: Sequence, position: int) -> TokenLogprob:
        state = _mix(self._state(seq, position), seq.token_ids[position + 1])
        return TokenLogprob(seq.token_ids[position + 1], -(state % 10_000) / 1000, 1 + state % 7)
