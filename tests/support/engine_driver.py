"""Drives an engine on the fake runner, and holds every step to the rules that no schedule may break."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fake_tiers import FakePageStore, FixedCosts, Shared
from guessed_drafts import GuessedDrafts
from scripted_grammar import EOS, AutomatonMatcher, ScriptedGrammars

from ostro.backends.fake import FakeRunner
from ostro.engine.batch import Batch
from ostro.engine.constraint import Constraint
from ostro.engine.core import EngineCore
from ostro.engine.radix import Salt
from ostro.engine.request import Request, Task
from ostro.engine.runner import RunnerSpec, Step, StepOutput, TokenLogprob
from ostro.engine.scheduler import Limits, Progress
from ostro.engine.sequence import PENDING, FinishReason
from ostro.engine.sequence import Sequence as EngineSequence
from ostro.engine.states import Spacing
from ostro.engine.tiers import Tiers
from ostro.errors import SequenceFailed
from ostro.sampling_params import SamplingParams


@dataclass
class Outcome:
    """Everything that one choice received."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    pooled: list[float] | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None


class CheckedRunner:
    """The fake runner, behind a check of what a device relies on."""

    strides = 0
    failure = None

    def __init__(self, fake: FakeRunner, limits: Limits) -> None:
        self.fake = fake
        self.limits = limits
        self.batches: list[Batch] = []
        self.while_running: Callable[[], None] | None = None
        """Called once, when the next step has run and before its output is taken in."""

    @property
    def spec(self) -> RunnerSpec:
        return self.fake.spec

    def launch(self, batch: Batch) -> Step:
        self.batches.append(batch)
        self._check_budget(batch)
        assert len({chunk.seq.id for chunk in batch.chunks}) == len(batch.chunks) <= self.limits.max_batch_seqs
        for chunk in batch.chunks:
            assert chunk.start == chunk.seq.num_computed
            assert 0 < chunk.length <= chunk.seq.num_to_compute
            assert PENDING not in chunk.seq.token_ids[chunk.start : chunk.end - 1]
            assert len(chunk.seq.pages) * self.spec.page_size >= chunk.start + chunk.num_rows
            if chunk.drafts:
                assert PENDING not in chunk.seq.token_ids
                assert chunk.seq.num_tokens + len(chunk.drafts) < chunk.seq.max_len
        num_drafts = sum(len(chunk.drafts) for chunk in batch.chunks)
        assert not num_drafts or len(batch.chunks) + num_drafts <= self.spec.max_sampled
        self._check_copies(batch.page_copies)
        self._check_copies(batch.state_copies)
        self._check_states(batch)
        step = self.fake.launch(batch)
        return replace(step, results=partial(self._finish, step))

    def _finish(self, step: Step) -> StepOutput:
        if self.while_running:
            self.while_running()
            self.while_running = None
        return step.results()

    def _check_budget(self, batch: Batch) -> None:
        if self.spec.keeps_kv:
            assert 0 < batch.num_tokens <= self.limits.max_batch_tokens
            return
        # The last of the scored ones and the last of the others may exceed what is theirs.
        passes = sorted(position + 1 for chunk in batch.chunks for position in chunk.asked)
        assert sum(passes[:-2]) < max(2, self.limits.max_batch_tokens)
        assert all(chunk.end == chunk.seq.num_tokens or chunk.scored.stop == chunk.end for chunk in batch.chunks)

    def _check_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        """One after the other, or all read before any is written: both must do the same."""
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        for at, (source, _) in enumerate(copies):
            assert source not in targets[:at]

    def _check_states(self, batch: Batch) -> None:
        """Every slot is written by one chunk at most, and captures are where they may be."""
        if not self.spec.num_states:
            assert not any(chunk.captures for chunk in batch.chunks)
            return
        written = [chunk.state for chunk in batch.chunks]
        for chunk in batch.chunks:
            assert [offset for offset, _ in chunk.captures] == sorted({offset for offset, _ in chunk.captures})
            for offset, slot in chunk.captures:
                assert 0 < offset <= chunk.length
                assert (chunk.start + offset) % math.lcm(self.spec.page_size, self.spec.state_every) == 0
                written.append(slot)
        assert len(set(written)) == len(written)
        assert set(written) <= set(range(self.spec.num_states))


def public_root(salt: Salt) -> bytes | None:
    """Pages of requests without a salt may go to disk."""
    return b"public" if salt == "" else None


class Driver:
    """Steps an engine, checks it after every step, and collects what each choice was given."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        max_seq_len: int = 4096,
        vocab_size: int = 1000,
        max_batch_tokens: int = 512,
        max_batch_seqs: int = 64,
        prefix_caching: bool = True,
        steps_ahead: int = 0,
        masks_late: bool = False,
        keeps_kv: bool = True,
        context_price: float = 0.0,
        max_sampled: int = 0,
        num_states: int = 0,
        state_every: int = 1,
        spacing: Spacing | None = None,
        accuracy: float = 0.0,
        patience: float = 0.0,
        num_slots: int = 0,
        num_state_slots: int = 0,
        disk_pages: int = 0,
        loss: float = 0.0,
        fetched: float = 1.0,
        shared: Shared | None = None,
    ) -> None:
        """With `max_sampled` sequences draft, and each draft is right with a probability of `accuracy`; with one of
        `patience` a step waits for results so that it can have drafts. With `num_slots` or `disk_pages` evicted pages
        go there; `fetched` is the share of prefixes that are fetched from there, and `loss` that of damaged pages.
        `shared` is what engines leave to one another.
        """
        limits = Limits(max_batch_tokens=max_batch_tokens, max_batch_seqs=max_batch_seqs)
        if not keeps_kv:
            page_size, num_pages, steps_ahead = max_seq_len, 2 * max_batch_seqs, 0
        fake = FakeRunner(
            page_size=page_size,
            num_pages=num_pages,
            max_seq_len=max_seq_len,
            vocab_size=vocab_size,
            steps_ahead=steps_ahead,
            masks_late=masks_late,
            keeps_kv=keeps_kv,
            context_price=context_price,
            max_sampled=max_sampled,
            num_states=num_states,
            state_every=state_every,
        )
        self.runner = CheckedRunner(fake, limits)
        self.speculation = GuessedDrafts(fake, accuracy, patience=patience) if max_sampled else None
        self.store = FakePageStore(
            fake,
            num_slots=num_slots,
            num_state_slots=num_state_slots,
            disk_pages=disk_pages,
            loss=loss,
            shared=shared,
        )
        has_tiers = bool(num_slots or disk_pages or shared is not None)
        self.engine = EngineCore(
            self.runner,
            limits,
            prefix_caching=prefix_caching,
            speculation=self.speculation,
            tiers=Tiers(self.store, costs=FixedCosts(fetched), root=public_root) if has_tiers else None,
            spacing=spacing,
        )
        self.grammars = ScriptedGrammars(vocab_size)
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.forks_without_page = 0
        self.needless_fetches = 0
        self.constrained: list[Request] = []
        self._num_sequences = 0
        self._num_aborts = 0

    @property
    def computed_tokens(self) -> int:
        return self.engine.scheduler.counters.computed_tokens

    def add(self, request: Request) -> None:
        constraint = request.constraint
        self.engine.add(request, None if constraint is None else self.grammars.prepare(constraint))
        if constraint is not None:
            self.constrained.append(request)
        self._num_sequences += request.params.n
        for choice in range(request.params.n):
            self.outcomes[request.id, choice] = Outcome()

    def abort(self, request_id: int, choice: int | None = None) -> None:
        self._num_aborts += 1
        self.engine.abort(request_id, choice)

    def step(self) -> list[Progress]:
        scheduler = self.engine.scheduler
        running, preemptions = list(scheduler.running), scheduler.counters.preemptions
        progress = self.engine.step()
        self.engine.check_integrity()
        if self.engine.tiers is not None:
            self.needless_fetches += any(True for _ in self.engine.tiers.needless())
        if running:
            assert running[0] in scheduler.running or running[0].finish_reason is not None, "the first was preempted"
        if scheduler.counters.preemptions > preemptions:
            came = [chunk.seq for chunk in self.runner.batches[-1].chunks if chunk.seq not in running]
            # A tenant makes way for another, never for itself.
            shared = {seq.request.tenant for seq in (*running, *came)}
            assert not came or len(shared) > 1, "one came in as another left"
        assert len(scheduler.running) <= scheduler.limits.max_batch_seqs
        for gain in progress:
            self._collect(gain)
        return progress

    def finish(self) -> None:
        """Steps until nothing is left to do; every page must be free or cached then."""
        while self.engine.has_work:
            self.step()
            self._check_pace()
        usage = self.engine.scheduler.kv.usage
        assert usage.in_use == 0
        assert usage.free + usage.cached == usage.total
        assert usage.states_free + usage.snapshots == usage.states
        self.engine.check_integrity()
        assert self.engine.step() == []

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.add(request)
        self.finish()

    def expected(self, request: Request, choice: int = 0) -> Outcome:
        """The choice's expected outcome, computed without an engine and without pages."""
        params, prompt = request.params, len(request.prompt_ids)
        count = self.engine.scheduler.max_len - prompt if params.max_tokens is None else params.max_tokens
        if request.constraint is not None:
            return self._expected_constrained(request, choice, count)
        seq = EngineSequence(0, request, choice=choice, max_len=prompt + count)
        outcome = Outcome(self.runner.fake.expected_tokens(seq, count), FinishReason.LENGTH)
        for at, token in enumerate(outcome.token_ids):
            if token in seq.stop_ids and at >= params.min_tokens:
                outcome = Outcome(outcome.token_ids[: at + 1], FinishReason.STOP)
                break
        if choice == 0:
            outcome.prompt_logprobs = self.runner.fake.expected_prompt_logprobs(request)
        if request.task is Task.EMBED:
            outcome.pooled = self.runner.fake.expected_pooled(request)
        if params.logprobs is not None:
            outcome.logprobs = [TokenLogprob(token, -1.0, 1) for token in outcome.token_ids]
        return outcome

    def _expected_constrained(self, request: Request, choice: int, count: int) -> Outcome:
        """The same for a constrained request: token by token, with a matcher and no engine."""
        assert request.constraint is not None
        fake, matcher = self.runner.fake, self.grammars.prepare(request.constraint).start()
        # It has no matcher: what it may sample is set here.
        twin = EngineSequence(0, replace(request, constraint=None), choice=choice, max_len=10**6)
        given = Outcome(prompt_logprobs=fake.expected_prompt_logprobs(request) if choice == 0 else [])
        logprobs: list[TokenLogprob] = []
        while given.finish_reason is None:
            tokens = matcher.forced()[: count - twin.num_output]
            whole, first = [*twin.token_ids, *tokens], twin.num_tokens
            logprobs += [fake.expected_logprob(whole, at) for at in range(first, len(whole))]
            try:
                given.finish_reason = _taken(twin, matcher, tokens)
                if given.finish_reason is None and matcher.is_done:
                    given.finish_reason = FinishReason.STOP
                elif given.finish_reason is None and twin.num_output >= count:
                    given.finish_reason = FinishReason.LENGTH
                elif given.finish_reason is None:
                    twin.mask = _with_stops(matcher.mask(), twin.stop_ids)
                    sampled = fake.expected_next(twin).token_id
                    logprobs.append(TokenLogprob(sampled, -1.0, 1))
                    given.finish_reason = _taken(twin, matcher, [sampled])
            except SequenceFailed as error:
                # Forced tokens come with what follows them, and nothing does.
                given.finish_reason, given.error = FinishReason.ERROR, error.message
            else:
                given.token_ids = twin.output_ids
        if request.params.logprobs is not None:
            given.logprobs = logprobs[: len(given.token_ids)]
        return given

    def check_outcomes(self, *requests: Request) -> None:
        for request in requests:
            for choice in range(request.params.n):
                assert self.outcomes[request.id, choice] == self.expected(request, choice), f"{request} choice {choice}"

    def _collect(self, gain: Progress) -> None:
        outcome = self.outcomes[gain.request_id, gain.choice]
        assert outcome.finish_reason is None, "an ended choice was given something"
        self._count_fork(gain, outcome)
        outcome.token_ids += gain.token_ids
        outcome.prompt_logprobs += gain.prompt_logprobs
        outcome.logprobs += gain.logprobs
        outcome.error = gain.error
        outcome.finish_reason = gain.finish_reason
        outcome.pooled = gain.pooled

    def _count_fork(self, gain: Progress, outcome: Outcome) -> None:
        """A choice that waits just after its first token was not forked; with seats to spare, for want of a page."""
        scheduler = self.engine.scheduler
        if gain.token_ids and not outcome.token_ids and self._num_sequences <= scheduler.limits.max_batch_seqs:
            self.forks_without_page += any(
                (seq.request.id, seq.choice) == (gain.request_id, gain.choice) for seq in scheduler.waiting
            )

    def _check_pace(self) -> None:
        """No deadlock and no livelock: there is a bound on the steps that some work can take.

        The sequence that ranks first is never preempted and takes what the single tokens leave of the budget, in every
        second step at least. So in every few steps a sequence reaches its end: it gains a token, or is complete.
        """
        scheduler = self.engine.scheduler
        at_the_end = 1 + self.runner.spec.context_price * scheduler.max_len
        tokens_a_step = max(1, int(scheduler.limits.max_batch_tokens / at_the_end))
        longest_wait = 2 * math.ceil(scheduler.max_len / tokens_a_step) + 1
        gains = scheduler.counters.generated_tokens + self._num_sequences + self._num_aborts
        if not self.runner.spec.keeps_kv:
            gains += sum(len(outcome.prompt_logprobs) for outcome in self.outcomes.values())
        assert scheduler.counters.steps <= gains * longest_wait


def _with_stops(mask: memoryview | None, stop_ids: frozenset[int]) -> memoryview | None:
    if mask is None or not mask[EOS >> 3] >> (EOS & 7) & 1:
        return mask
    words = bytearray(mask)
    for token in stop_ids:
        words[token >> 3] |= 1 << (token & 7)
    return memoryview(words)


def _taken(twin: EngineSequence, matcher: AutomatonMatcher, tokens: list[int]) -> FinishReason | None:
    """Appends tokens up to the first that ends the sequence."""
    for token in tokens:
        twin.token_ids.append(token)
        if token in twin.stop_ids:
            return FinishReason.STOP
        matcher.take(token)
    return None


def make_request(
    id: int,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int | None = 4,
    n: int = 1,
    temperature: float = 1.0,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    eos_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    prompt_logprobs_from: int | None = None,
    cache_salt: str = "",
    priority: int = 0,
    task: Task = Task.GENERATE,
    tenant: str = "",
    logprobs: int | None = None,
    constraint: Constraint | None = None,
    anchors: Sequence[int] = (),
    shares_prompt: bool = False,
) -> Request:
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        min_tokens=min_tokens,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    return Request(
        id=id,
        prompt_ids=tuple(prompt_ids),
        params=params,
        seed=id,
        eos_ids=frozenset(eos_ids),
        prompt_logprobs_from=prompt_logprobs_from,
        cache_salt=cache_salt,
        priority=priority,
        task=task,
        tenant=tenant,
        constraint=constraint,
        anchors=tuple(anchors),
        shares_prompt=shares_prompt,
    )
