"""The standing oracles: what else runs, and how the work is cut up, never changes what a request is given."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
from engine_driver import Driver, Outcome, make_request
from examples import IS_FULL, examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scripted_grammar import EOS, ScriptedGrammars, scripted

from ostro.engine.constraint import Constraint
from ostro.engine.request import Request, Task
from ostro.engine.sequence import FinishReason
from ostro.engine.states import Spacing
from ostro.errors import SequenceFailed

VOCABULARY = 13
# Prompts are cut from these, so that many begin alike; one repeats itself within a page.
STEMS = (tuple(i * i % 11 for i in range(64)), (7,) * 64)


@dataclass(frozen=True)
class Abort:
    step: int
    request_id: int
    choice: int | None
    while_running: bool
    """Whether it comes while the step runs, or before it."""


@dataclass(frozen=True)
class Case:
    page_size: int
    num_pages: int
    max_seq_len: int
    max_batch_tokens: int
    max_batch_seqs: int
    prefix_caching: bool
    steps_ahead: int
    masks_late: bool
    keeps_kv: bool
    context_price: float
    max_sampled: int
    num_states: int
    state_every: int
    spacing: Spacing
    accuracy: float
    patience: float
    num_slots: int
    num_state_slots: int
    disk_pages: int
    loss: float
    fetched: float
    arrivals: tuple[tuple[int, Request], ...]
    aborts: tuple[Abort, ...]
    clear_cache_at: int | None

    def driver(self) -> Driver:
        return Driver(
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_seq_len=self.max_seq_len,
            vocab_size=VOCABULARY,
            max_batch_tokens=self.max_batch_tokens,
            max_batch_seqs=self.max_batch_seqs,
            prefix_caching=self.prefix_caching,
            steps_ahead=self.steps_ahead,
            masks_late=self.masks_late,
            keeps_kv=self.keeps_kv,
            context_price=self.context_price,
            max_sampled=self.max_sampled,
            num_states=self.num_states,
            state_every=self.state_every,
            spacing=self.spacing,
            accuracy=self.accuracy,
            patience=self.patience,
            num_slots=self.num_slots,
            num_state_slots=self.num_state_slots,
            disk_pages=self.disk_pages,
            loss=self.loss,
            fetched=self.fetched,
        )


# Rare trouble, which every run should meet: the prompt takes all pages, the second choice finds none.
FORK_WITHOUT_PAGE = Case(
    page_size=4,
    num_pages=3,
    max_seq_len=1000,
    max_batch_tokens=64,
    max_batch_seqs=64,
    prefix_caching=True,
    steps_ahead=0,
    masks_late=False,
    keeps_kv=True,
    context_price=0.0,
    max_sampled=0,
    num_states=0,
    state_every=1,
    spacing=Spacing(),
    accuracy=0.0,
    patience=0.0,
    num_slots=0,
    num_state_slots=0,
    disk_pages=0,
    loss=0.0,
    fetched=1.0,
    arrivals=((0, make_request(0, STEMS[0][:10], n=2, max_tokens=2)),),
    aborts=(),
    clear_cache_at=None,
)
# As rare: the only way leads to where the matcher fails.
FAILING = scripted({0: {5: 1}}, traps=(1,))
STRUCTURE_THAT_FAILS = replace(
    FORK_WITHOUT_PAGE, arrivals=((0, make_request(0, STEMS[0][:4], eos_ids=(EOS,), constraint=FAILING)),)
)


@dataclass
class Seen:
    """What the cases brought about, so that the test cannot pass by never getting into trouble."""

    steps: int = 0
    preemptions: int = 0
    cache_hits: int = 0
    evicted_pages: int = 0
    forks_without_page: int = 0
    page_copies: int = 0
    chunked_prompts: int = 0
    stops: int = 0
    aborted_choices: int = 0
    scored_prompts: int = 0
    recomputed_tokens: int = 0
    structures_completed: int = 0
    structures_failed: int = 0
    forced_tokens: int = 0
    forced_and_scored: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    drafts_of_preempted: int = 0
    drafts_one_step_ahead: int = 0
    drafts_in_structures: int = 0
    stored_pages: int = 0
    fetched_pages: int = 0

    def add(self, driver: Driver, aborted: set[tuple[int, int]]) -> None:
        counters, batches = driver.engine.scheduler.counters, driver.runner.batches
        self.steps += counters.steps
        self.preemptions += counters.preemptions
        self.cache_hits += counters.cache_hits
        self.evicted_pages += driver.engine.scheduler.kv.num_evicted
        self.forks_without_page += driver.forks_without_page
        self.page_copies += sum(len(batch.page_copies) for batch in batches)
        self.chunked_prompts += sum(chunk.end < chunk.seq.num_prompt for batch in batches for chunk in batch.chunks)
        self.stops += sum(outcome.finish_reason is FinishReason.STOP for outcome in driver.outcomes.values())
        self.aborted_choices += len(aborted)
        if not driver.runner.spec.keeps_kv:
            self.recomputed_tokens += counters.computed_tokens
        self.forced_tokens += counters.forced_tokens
        self.accepted_drafts += counters.accepted_tokens
        self.rejected_drafts += counters.drafted_tokens - counters.accepted_tokens
        if driver.runner.spec.steps_ahead:
            self.drafts_one_step_ahead += counters.drafted_tokens
        self.drafts_in_structures += sum(len(chunk.draft_masks) for batch in batches for chunk in batch.chunks)
        self.drafts_of_preempted += counters.drafted_tokens if counters.preemptions else 0
        self.stored_pages += counters.stored_pages
        self.fetched_pages += counters.fetched_pages + counters.fetched_disk_pages
        for request in driver.constrained:
            outcomes = [driver.outcomes[request.id, choice] for choice in range(request.params.n)]
            self.structures_failed += sum(outcome.error is not None for outcome in outcomes)
            self.structures_completed += sum(outcome.finish_reason is FinishReason.STOP for outcome in outcomes)
            self.forced_and_scored += sum(each.logprob != -1.0 for outcome in outcomes for each in outcome.logprobs)
        self.scored_prompts += sum(bool(outcome.prompt_logprobs) for outcome in driver.outcomes.values())


@dataclass
class SeenStates:
    """The same for recurrent states."""

    state_hits: int = 0
    stateless_tokens: int = 0
    state_captures: int = 0
    captures_in_outputs: int = 0
    captures_inside_chunks: int = 0
    state_copies: int = 0
    states_moved: int = 0
    drafts_after_states: int = 0
    hits_after_preemption: int = 0
    stored_states: int = 0
    spilled_states: int = 0
    fetched_states: int = 0
    resumed: int = 0

    def add(self, driver: Driver) -> None:
        counters, batches = driver.engine.scheduler.counters, driver.runner.batches
        self.state_hits += counters.cache_hits
        self.stateless_tokens += counters.stateless_tokens
        self.drafts_after_states += counters.accepted_tokens
        self.stored_states += counters.stored_states
        self.spilled_states += counters.spilled_states
        self.fetched_states += counters.fetched_states
        self.resumed += counters.resumed
        begun: set[int] = set()
        last: dict[int, int] = {}
        for batch in batches:
            self.state_copies += len(batch.state_copies)
            targets = {target for _, target in batch.state_copies}
            for chunk in batch.chunks:
                self.state_captures += len(chunk.captures)
                self.captures_inside_chunks += any(offset < chunk.length for offset, _ in chunk.captures)
                self.captures_in_outputs += bool(chunk.captures) and chunk.end > chunk.seq.num_prompt
                comes = chunk.seq.id not in begun or chunk.start < last[chunk.seq.id]
                self.hits_after_preemption += chunk.seq.id in begun and comes and chunk.start > 0
                self.states_moved += comes and chunk.start > 0 and chunk.state not in targets
                begun.add(chunk.seq.id)
                last[chunk.seq.id] = chunk.end


# Strategies take longer to build than to draw from: each is built once.
STEM = st.sampled_from(STEMS)
TAIL = st.lists(st.integers(0, VOCABULARY - 1), max_size=6).map(tuple)
TOKEN = st.sampled_from([token for token in range(VOCABULARY) if token != EOS])
NUM_CHOICES = st.sampled_from([1, 1, 2, 3, 4])
TEMPERATURE = st.sampled_from([0.0, 1.0])
STOPS = st.sampled_from([(), (), (5,), (5, 6)])
EOS_IDS = st.sampled_from([(), (), (3,)])
SALT = st.sampled_from(["", "", "pepper"])
PRIORITY = st.sampled_from([0, 0, 0, -1, 1])
TENANT = st.sampled_from(["", "", "another", "a third"])
SOMETIMES_ZERO = st.none() | st.just(0)
CHOICE = st.none() | st.integers(0, 3)
ARRIVAL = st.just(0) | st.integers(0, 30)
CLEARING = st.none() | st.integers(0, 40)
PAGE_SIZE = st.sampled_from([1, 2, 3, 4, 8])
MAX_SEQ_LEN = st.sampled_from([24, 40, 1000])
MAX_BATCH_TOKENS = st.sampled_from([1, 3, 7, 16, 64, 64])
MAX_BATCH_SEQS = st.sampled_from([1, 2, 5, 64, 64])
MOSTLY = st.sampled_from([True, True, True, False])
ALMOST_ALWAYS = st.sampled_from([True, True, True, True, False])
MAX_SAMPLED = st.sampled_from([0, 4, 16, 64, 64])
ACCURACY = st.sampled_from([0.0, 0.5, 0.9, 1.0])
PATIENCE = st.sampled_from((0.0, 0.5, 1.0))
NUM_SLOTS = st.sampled_from([0, 1, 3, 8, 40])
NUM_STATES = st.sampled_from([1, 2, 3, 5, 8, 20])
STATE_EVERY = st.sampled_from([1, 1, 1, 2, 3, 8])
SPACING = st.builds(Spacing, prompt=st.sampled_from([1, 5, 12, 2048]), output=st.sampled_from([1, 4, 256]))
LOSS = st.sampled_from([0.0, 0.0, 0.1, 0.5])
FETCHED = st.sampled_from([0.3, 0.8, 1.0, 1.0])
CONTEXT_PRICE = st.sampled_from([0.0, 0.0, 0.1])


@cache
def lengths(page_size: int, longest: int) -> st.SearchStrategy[int]:
    on_a_boundary = st.integers(0, longest // page_size).map(lambda pages: pages * page_size)
    return st.integers(0, longest) | on_a_boundary


@cache
def outputs(room: int) -> st.SearchStrategy[int | None]:
    return st.integers(min(room, 4), min(room, 24)) | st.just(0) | (st.none() if room else st.just(0))


@cache
def ways_between(states: int) -> st.SearchStrategy[dict[int, int]]:
    """The last state is the end of every way that leads there."""
    state = st.integers(0, states)
    return st.dictionaries(TOKEN, state, min_size=1, max_size=1) | st.dictionaries(TOKEN, state, min_size=2, max_size=5)


@cache
def some_of(states: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, states - 1), max_size=2).map(tuple)


@cache
def few_of(states: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.just(()) | some_of(states)


@cache
def positions(length: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, length)


@st.composite
def constraints(draw: st.DrawFn) -> Constraint:
    """Automata of a few states, many with one way out of them: there tokens are forced."""
    states = draw(st.integers(1, 7))
    edges = {at: draw(ways_between(states)) for at in range(states)}
    traps = draw(few_of(states)) if draw(st.booleans()) else ()
    made = partial(
        scripted, edges, ends=draw(some_of(states)), free=draw(few_of(states)), jump_forward=draw(st.booleans())
    )
    return made(traps=traps if can_begin(made(traps=traps)) else ())


@cache
def anchors(length: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.just(()) | st.lists(st.integers(0, length), max_size=6).map(lambda ends: tuple(sorted(ends)))


CONSTRAINT = st.none() | st.none() | constraints()


def can_begin(constraint: Constraint) -> bool:
    """Whether a first token can be sampled: else the request is refused."""
    matcher = ScriptedGrammars(VOCABULARY).prepare(constraint).start()
    for token in matcher.forced():
        matcher.take(token)
    try:
        matcher.mask()
    except SequenceFailed:
        return False
    return True


@cache
@st.composite
def requests(draw: st.DrawFn, id: int, *, page_size: int, max_len: int) -> Request:
    prompt = (draw(STEM)[: draw(lengths(page_size, max_len))] + draw(TAIL))[:max_len] or (0,)
    room = max_len - len(prompt)
    output = draw(outputs(room))
    if draw(st.integers(0, 9)) == 0:
        return make_request(id, prompt, max_tokens=0, task=Task.EMBED)
    constraint = draw(CONSTRAINT)
    if constraint is not None:
        return make_request(
            id,
            prompt,
            max_tokens=output,
            n=draw(NUM_CHOICES),
            temperature=draw(TEMPERATURE),
            stop_token_ids=draw(STOPS),
            eos_ids=(EOS,),
            logprobs=draw(SOMETIMES_ZERO),
            prompt_logprobs_from=draw(positions(len(prompt))) if draw(st.booleans()) else None,
            tenant=draw(TENANT),
            constraint=constraint,
        )
    return make_request(
        id,
        prompt,
        max_tokens=output,
        n=draw(NUM_CHOICES),
        temperature=draw(TEMPERATURE),
        min_tokens=draw(st.integers(0, room if output is None else output)),
        stop_token_ids=draw(STOPS),
        eos_ids=draw(EOS_IDS),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(SOMETIMES_ZERO),
        prompt_logprobs_from=draw(positions(len(prompt))),
        cache_salt=draw(SALT),
        priority=draw(PRIORITY),
        tenant=draw(TENANT),
        anchors=draw(anchors(len(prompt))),
    )


@st.composite
def aborts(draw: st.DrawFn, ids: Sequence[int]) -> Abort:
    return Abort(draw(st.integers(0, 40)), ids[draw(st.integers(0, len(ids) - 1))], draw(CHOICE), draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn, keeps_states: bool = False) -> Case:
    page_size = draw(PAGE_SIZE)
    # Few pages, for much of what can go wrong needs them to run out.
    num_pages = draw(st.integers(math.ceil(16 / page_size), math.ceil(64 / page_size)))
    max_seq_len = draw(MAX_SEQ_LEN)
    max_len = min(num_pages * page_size, max_seq_len, 48)
    arrivals = []
    for id in range(draw(st.integers(3, 10))):
        request = draw(requests(id, page_size=page_size, max_len=max_len))
        arrivals.append((draw(ARRIVAL), request))
        if draw(st.integers(0, 4)) == 0:
            arrivals.append((arrivals[-1][0], _twin(request, id + 100)))
    prefix_caching, keeps_kv = draw(MOSTLY), draw(ALMOST_ALWAYS)
    has_tiers = prefix_caching and keeps_kv and draw(MOSTLY)
    return Case(
        page_size=page_size,
        num_pages=num_pages,
        max_seq_len=max_seq_len,
        max_batch_tokens=draw(MAX_BATCH_TOKENS),
        max_batch_seqs=draw(MAX_BATCH_SEQS),
        prefix_caching=prefix_caching,
        steps_ahead=draw(st.integers(0, 1)),
        masks_late=draw(st.booleans()),
        keeps_kv=keeps_kv,
        context_price=draw(CONTEXT_PRICE),
        max_sampled=draw(MAX_SAMPLED),
        num_states=draw(NUM_STATES) if keeps_kv and keeps_states else 0,
        state_every=draw(STATE_EVERY),
        spacing=draw(SPACING),
        accuracy=draw(ACCURACY),
        patience=draw(PATIENCE),
        num_slots=draw(NUM_SLOTS) if has_tiers else 0,
        num_state_slots=draw(NUM_SLOTS) if has_tiers and keeps_states else 0,
        disk_pages=draw(NUM_SLOTS) if has_tiers else 0,
        loss=draw(LOSS),
        fetched=draw(FETCHED),
        arrivals=tuple(arrivals),
        aborts=tuple(draw(st.lists(aborts([request.id for _, request in arrivals]), max_size=3))),
        clear_cache_at=draw(CLEARING),
    )


def _twin(request: Request, id: int) -> Request:
    """The same prompt and settings under another id and seed."""
    return Request(
        id=id,
        prompt_ids=request.prompt_ids,
        params=request.params,
        seed=id,
        eos_ids=request.eos_ids,
        cache_salt=request.cache_salt,
        task=request.task,
        constraint=request.constraint,
    )


def play(case: Case) -> tuple[Driver, set[tuple[int, int]]]:
    """Runs a case to its end; the driver, and the choices that an abort may have cut short."""
    driver, aborted = case.driver(), set()
    requests = {request.id: request for _, request in case.arrivals}
    last = max([at for at, _ in case.arrivals] + [abort.step for abort in case.aborts])
    for step in range(last + 1):
        for at, request in case.arrivals:
            if at == step:
                driver.add(request)
        for abort in case.aborts:
            if abort.step != step or (abort.request_id, 0) not in driver.outcomes:
                continue
            choices = range(requests[abort.request_id].params.n) if abort.choice is None else [abort.choice]
            aborted |= {(abort.request_id, choice) for choice in choices} & driver.outcomes.keys()
            if abort.while_running:
                driver.runner.while_running = partial(driver.abort, abort.request_id, abort.choice)
            else:
                driver.abort(abort.request_id, abort.choice)
        if case.clear_cache_at == step:
            driver.engine.scheduler.kv.clear_cache()
        driver.step()
    driver.finish()
    return driver, aborted


def check(case: Case, driver: Driver, aborted: set[tuple[int, int]]) -> None:
    for _, request in case.arrivals:
        choices = range(request.params.n)
        whole = [choice for choice in choices if (request.id, choice) not in aborted]
        if len(whole) == request.params.n:
            driver.check_outcomes(request)
            continue
        logprobs = driver.expected(request).prompt_logprobs
        for choice in choices:
            given, expected = driver.outcomes[request.id, choice], driver.expected(request, choice)
            if choice in whole:
                assert (given.token_ids, given.finish_reason) == (expected.token_ids, expected.finish_reason)
            assert is_prefix(given, expected)
        if whole:
            # The choice that led was perhaps aborted; then the next one delivers them, from the first on, or only the
            # last of them, if the step that brings them was under way.
            delivered = [driver.outcomes[request.id, choice].prompt_logprobs for choice in choices]
            assert logprobs in delivered or logprobs == [each for part in delivered for each in part]


def is_prefix(given: Outcome, expected: Outcome) -> bool:
    return given.token_ids == expected.token_ids[: len(given.token_ids)]


@pytest.mark.full
@pytest.mark.examples
def test_random_schedules_give_every_choice_what_it_gets_without_an_engine() -> None:
    """Random arrivals, lengths, page pressure, forks and aborts; pages whole after each case."""
    seen = Seen()

    @settings(max_examples=examples(220), suppress_health_check=[HealthCheck.too_slow])
    @given(cases())
    @example(FORK_WITHOUT_PAGE)
    @example(STRUCTURE_THAT_FAILS)
    def each_case_holds(case: Case) -> None:
        driver, aborted = play(case)
        check(case, driver, aborted)
        seen.add(driver, aborted)

    each_case_holds()
    if IS_FULL:
        assert seen.steps >= 10_000, seen
        assert all(vars(seen).values()), f"some trouble was never met: {seen}"


@pytest.mark.full
@pytest.mark.examples
def test_random_schedules_with_recurrent_states_give_every_choice_the_same() -> None:
    """The same where a model keeps states too: from one slot for all, to more than sequences and snapshots take."""
    seen = SeenStates()

    @settings(max_examples=examples(220), suppress_health_check=[HealthCheck.too_slow])
    @given(cases(keeps_states=True))
    def each_case_holds(case: Case) -> None:
        driver, aborted = play(case)
        check(case, driver, aborted)
        seen.add(driver)

    each_case_holds()
    if IS_FULL:
        assert all(vars(seen).values()), f"some trouble was never met: {seen}"


def mixed_requests() -> list[Request]:
    """Twelve requests of several kinds; neighbours share the beginnings of their prompts."""
    made = []
    for id in range(12):
        prompt = STEMS[0][: 9 + 3 * (id // 3)] + (id % VOCABULARY,) * (id % 3)
        made.append(
            make_request(
                id,
                prompt,
                max_tokens=(0, 7, 20)[id % 3],
                n=1 + id % 4,
                stop_token_ids=(5,) if id % 2 else (),
                prompt_logprobs_from=id if id % 4 == 0 else None,
            )
        )
    return [*made, make_request(12, STEMS[0][:30], max_tokens=0, task=Task.EMBED)]


Outcomes = dict[tuple[int, int], Outcome]


@pytest.fixture
def alone() -> Outcomes:
    """What each of the mixed requests is given by an engine of its own that has room for everything."""
    outcomes: Outcomes = {}
    for request in mixed_requests():
        driver = Driver(vocab_size=VOCABULARY)
        driver.run(request)
        outcomes |= driver.outcomes
    return outcomes


def test_alone_equals_batched(alone: Outcomes) -> None:
    driver = Driver(vocab_size=VOCABULARY, num_pages=500, prefix_caching=False)
    driver.run(*mixed_requests())
    assert driver.outcomes == alone
    assert max(len(batch.chunks) for batch in driver.runner.batches) > 12


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3, 5, 8])
def test_whole_equals_chunked(alone: Outcomes, max_batch_tokens: int) -> None:
    outcomes: Outcomes = {}
    for request in mixed_requests():
        driver = Driver(vocab_size=VOCABULARY, max_batch_tokens=max_batch_tokens)
        driver.run(request)
        outcomes |= driver.outcomes
        assert driver.runner.batches[0].chunks[0].end < len(request.prompt_ids)
    assert outcomes == alone


def test_cold_equals_prefix_hit(alone: Outcomes) -> None:
    outcomes: Outcomes = {}
    hits = 0
    for request in mixed_requests():
        driver = Driver(vocab_size=VOCABULARY)
        driver.run(make_request(request.id, STEMS[0][:40]))
        driver.run(request)
        outcomes |= driver.outcomes
        hits += driver.engine.scheduler.counters.cache_hits
    assert outcomes == alone
    assert hits > 0


@pytest.mark.parametrize("num_pages", [13, 14, 17, 20])
def test_unpreempted_equals_preempted(alone: Outcomes, num_pages: int) -> None:
    driver = Driver(vocab_size=VOCABULARY, num_pages=num_pages)
    driver.run(*mixed_requests())
    assert driver.outcomes == alone
    assert driver.engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("max_batch_tokens", [1, 30, 1000])
def test_cached_equals_recomputed(alone: Outcomes, max_batch_tokens: int) -> None:
    driver = Driver(vocab_size=VOCABULARY, keeps_kv=False, max_seq_len=100, max_batch_tokens=max_batch_tokens)
    driver.run(*mixed_requests())
    assert driver.outcomes == alone


def test_recomputing_is_paid_for_by_whole_sequences_and_a_long_one_gets_its_turn() -> None:
    driver = Driver(keeps_kv=False, max_seq_len=300, max_batch_tokens=60)
    driver.add(make_request(0, (1,) * 10, max_tokens=3))
    driver.add(make_request(1, (2,) * 200, max_tokens=3))
    for id in range(2, 40):
        driver.add(make_request(id, (3,) * 5, max_tokens=3))
    driver.step()
    assert [chunk.seq.request.id for chunk in driver.runner.batches[0].chunks] == [0, 1]
    assert driver.computed_tokens == 210
    driver.finish()
    assert all(len(outcome.token_ids) == 3 for outcome in driver.outcomes.values())


@pytest.mark.parametrize("scores", [1, 5])
def test_a_newcomer_does_not_wait_for_prompts_that_are_scored(scores: int) -> None:
    driver = Driver(keeps_kv=False, max_seq_len=300, max_batch_tokens=60)
    for id in range(scores):
        driver.add(make_request(id, (1,) * 250, max_tokens=0, prompt_logprobs_from=1))
    driver.step()
    driver.add(make_request(9, (2,) * 5, max_tokens=3))
    for _ in range(3):
        driver.step()
    assert len(driver.outcomes[9, 0].token_ids) == 3
    before = len(driver.outcomes[0, 0].prompt_logprobs)
    assert before > 3
    driver.finish()
    assert len(driver.outcomes[0, 0].prompt_logprobs) == 249
