import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TypeVar

import pytest
from jumping_loop import in_jumping_time

from ostro.engine.request import Request
from ostro.errors import BadRequest, NotAllowed, QueueFull, RequestTimeout, Unavailable
from ostro.frontend.outputs import Choice, Completion, Delta
from ostro.sampling_params import SamplingParams
from ostro.server.admission.limits import FairClock, Gate, GateLimits, Usage
from ostro.server.telemetry.record import RequestRecord

T = TypeVar("T")


def in_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def a_record(key: str = "anonymous") -> RequestRecord:
    return RequestRecord(id="req", method="POST", path="/v1/completions", key=key)


def a_request(tokens: int = 4, *, priority: int = 0, max_tokens: int | None = 8, choices: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=choices)
    return Request(id=1, prompt_ids=tuple(range(tokens)), params=params, seed=0, priority=priority)


class Visitor:
    """A request that stays inside until it is told to go."""

    def __init__(self, gate: Gate, key: str = "anonymous", *, request: Request | None = None) -> None:
        self.record = a_record(key)
        self.entered = asyncio.Event()
        self.turn: int | None = None
        self.go = asyncio.Event()
        self.task = asyncio.create_task(self._visit(gate, request or a_request()))

    async def _visit(self, gate: Gate, request: Request) -> None:
        async with gate.admit(self.record) as ticket:
            [prepared] = ticket.enlist([request])
            await ticket.turn()
            self.turn = prepared.turn
            self.entered.set()
            await ticket.complete(self._served(prepared))

    async def _served(self, request: Request) -> Completion:
        await self.go.wait()
        return Completion(request.prompt_ids, [Choice(0, "x", [1], "stop")])

    async def leave(self) -> None:
        self.go.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def inside(visitors: list[Visitor]) -> list[int]:
    return [number for number, visitor in enumerate(visitors) if visitor.entered.is_set()]


@in_loop
async def test_no_more_than_the_limit_are_inside_and_the_next_follows_when_one_leaves() -> None:
    gate = Gate(GateLimits(concurrent=2))
    visitors = [Visitor(gate) for _ in range(4)]
    await settle()
    assert (inside(visitors), gate.num_waiting, gate.waiting_tokens) == ([0, 1], 2, 8)
    await visitors[0].leave()
    await settle()
    assert (inside(visitors), gate.num_waiting) == ([0, 1, 2], 1)
    for visitor in visitors:
        await visitor.leave()
    assert (gate.num_inside, gate.num_waiting, gate.waiting_tokens) == (0, 0, 0)


@in_loop
async def test_full_queue_refuses_with_the_time_that_others_have_waited() -> None:
    now = 0.0
    gate = Gate(GateLimits(concurrent=1, waiting=1), clock=lambda: now)
    first, second = Visitor(gate), Visitor(gate)
    await settle()
    with pytest.raises(QueueFull) as refusal:
        async with gate.admit(a_record()):
            pass
    assert (refusal.value.http_status, refusal.value.retry_after) == (429, 1)
    now = 11.0
    await first.leave()
    await second.leave()
    assert gate.retry_after() == 6  # the mean of 0 and 11, rounded up


@in_loop
async def test_waiting_tokens_are_bounded_but_one_long_prompt_may_always_wait() -> None:
    gate = Gate(GateLimits(concurrent=1, waiting_tokens=100))
    visitors = [Visitor(gate), Visitor(gate, request=a_request(500))]
    await settle()
    assert gate.waiting_tokens == 500
    third = Visitor(gate, request=a_request(1))
    await settle()
    with pytest.raises(QueueFull, match="500 prompt tokens are already waiting"):
        await third.task
    for visitor in visitors:
        await visitor.leave()


@in_loop
async def test_queue_is_served_by_priority_then_by_turn() -> None:
    gate = Gate(GateLimits(concurrent=1))
    holder = Visitor(gate)
    await settle()
    late, urgent, later = Visitor(gate), Visitor(gate, request=a_request(priority=-1)), Visitor(gate)
    order: list[Visitor] = []
    await settle()
    leaving = holder
    for _ in range(3):
        await leaving.leave()
        await settle()
        leaving = next(each for each in (late, urgent, later) if each.entered.is_set() and each not in order)
        order.append(leaving)
    await leaving.leave()
    assert order == [urgent, late, later]


@in_loop
async def test_greedy_key_does_not_starve_another() -> None:
    """One key asks for fifty at once, then another for two: those two are next, and the rest follows."""
    gate = Gate(GateLimits(concurrent=2))
    greedy = [Visitor(gate, "greedy") for _ in range(50)]
    await settle()
    await greedy[0].leave()
    await settle()
    modest = [Visitor(gate, "modest") for _ in range(2)]
    await settle()
    assert inside(modest) == []
    served_before = len(inside(greedy))
    running = [each for each in greedy if each.entered.is_set() and not each.task.done()]
    for _ in range(4):
        await running.pop(0).leave()
        await settle()
        running = [each for each in (*greedy, *modest) if each.entered.is_set() and not each.task.done()]
    assert inside(modest) == [0, 1]
    assert len(inside(greedy)) <= served_before + 3
    for visitor in (*modest, *greedy):
        await visitor.leave()


@in_loop
async def test_turns_that_the_engine_sees_interleave_two_keys() -> None:
    gate = Gate(GateLimits(concurrent=100))
    visitors = [Visitor(gate, key) for key in ("a", "a", "a", "b", "b", "b")]
    await settle()
    turns = [visitor.turn for visitor in visitors]
    assert turns[:3] == turns[3:] == [0, 5, 10]
    for visitor in visitors:
        await visitor.leave()


@in_loop
async def test_key_that_floods_leaves_others_their_places() -> None:
    """It could take every place, and another key's first request got a 429."""
    gate = Gate(GateLimits(concurrent=2, waiting=6), num_keys=2)
    flood = [Visitor(gate, "hostile") for _ in range(20)]
    await settle()
    refused = [each for each in flood if each.task.done()]
    assert len(refused) == 14
    with pytest.raises(QueueFull, match="6 requests of this key are already running or waiting"):
        await refused[0].task
    polite = [Visitor(gate, "polite") for _ in range(2)]
    await settle()
    assert not any(each.task.done() for each in polite)
    for visitor in (*(each for each in flood if each not in refused), *polite):
        await visitor.leave()
    await asyncio.gather(*(each.task for each in refused), return_exceptions=True)


@in_loop
async def test_operators_get_in_though_every_place_is_taken() -> None:
    """A server's only key could fill every place, and /admin/profile answered 429."""
    gate = Gate(GateLimits(concurrent=2, waiting=6))
    flood = [Visitor(gate, "hostile") for _ in range(8)]
    await settle()
    operator = a_record("admin-1")
    operator.is_operator = True
    gate.check(operator)
    with pytest.raises(QueueFull):
        gate.check(a_record("other"))
    async with AsyncExitStack() as inside:
        for _ in range(4):
            await inside.enter_async_context(gate.admit(operator))
        with pytest.raises(QueueFull):
            gate.check(operator)
    for visitor in flood:
        await visitor.leave()


@in_loop
async def test_key_that_holds_every_slot_it_can_get_leaves_others_one_at_least() -> None:
    gate = Gate(GateLimits(concurrent=4), num_keys=2)
    flood = [Visitor(gate, "hostile") for _ in range(10)]
    await settle()
    assert len(inside(flood)) == 3
    polite = [Visitor(gate, "polite") for _ in range(2)]
    await settle()
    assert inside(polite) == [0]
    for visitor in (*polite, *flood):
        await visitor.leave()


@in_loop
async def test_request_takes_as_many_slots_as_it_has_sequences() -> None:
    """One of 2,048 prompts counted as one."""
    gate = Gate(GateLimits(concurrent=8))
    single = Visitor(gate)
    many = Visitor(gate, request=a_request(choices=3))
    more = Visitor(gate, request=a_request(choices=100))
    await settle()
    late = Visitor(gate)
    await settle()
    assert inside([single, many, more, late]) == [0, 1, 2]  # 1 + 3 + half of all at most
    await many.leave()
    await settle()
    assert late.entered.is_set()
    for visitor in (single, more, late):
        await visitor.leave()


@in_loop
async def test_key_that_queues_long_prompts_leaves_others_room_to_queue() -> None:
    gate = Gate(GateLimits(concurrent=1, waiting_tokens=100), num_keys=2)
    holders = [Visitor(gate, "hostile"), Visitor(gate, "polite")]
    await settle()
    hostile = [Visitor(gate, "hostile", request=a_request(70)) for _ in range(2)]
    await settle()
    with pytest.raises(QueueFull, match="70 prompt tokens of this key are already waiting"):
        await hostile[1].task
    polite = Visitor(gate, "polite", request=a_request(25))
    await settle()
    assert not polite.task.done()
    for visitor in (*holders, hostile[0], polite):
        await visitor.leave()


@in_loop
async def test_texts_of_one_key_are_prepared_one_at_a_time_beside_those_of_others() -> None:
    """Requests with texts of a megabyte kept both threads busy, and another key's text waited for all of them."""
    gate = Gate(GateLimits(), num_keys=2)
    release, at_work = asyncio.Event(), list[str]()

    async def prepare(key: str) -> None:
        at_work.append(key)
        await release.wait()

    async def visit(key: str) -> None:
        async with gate.admit(a_record(key)) as ticket:
            await ticket.prepare(lambda: prepare(key))

    tasks = [asyncio.create_task(visit(key)) for key in ("hostile", "hostile", "hostile", "polite")]
    for _ in range(20):
        await asyncio.sleep(0)
    assert at_work == ["hostile", "polite"]
    release.set()
    await asyncio.gather(*tasks)
    assert at_work == ["hostile", "polite", "hostile", "hostile"]


@in_loop
async def test_negative_priority_is_for_keys_that_may() -> None:
    """Anybody's overtook everybody."""
    gate = Gate(GateLimits(), num_keys=2)
    record = a_record("key-1")
    record.may_raise_priority = False
    async with gate.admit(record) as ticket:
        with pytest.raises(NotAllowed, match="--priority-key") as refusal:
            ticket.enlist([a_request(), a_request(priority=-1)])
        assert (refusal.value.http_status, refusal.value.param) == (403, "priority")
        assert ticket.enlist([a_request(priority=1)])[0].priority == 1


@pytest.mark.parametrize(("num_keys", "share", "salts"), [(1, False, {""}), (2, True, {""}), (2, False, {"a ", "b "})])
def test_keys_share_cached_prefixes_only_if_configured(num_keys: int, share: bool, salts: set[str]) -> None:
    @in_loop
    async def run() -> None:
        gate = Gate(GateLimits(), num_keys=num_keys, share_prefixes=share)
        found = set()
        for key in "ab":
            async with gate.admit(a_record(key)) as ticket:
                [request] = ticket.enlist([a_request()])
                found.add(request.cache_salt)
                assert request.tenant == key
        assert found == salts

    run()


def test_key_that_was_idle_has_saved_up_nothing() -> None:
    clock = FairClock()
    for _ in range(10):
        clock.serve(clock.turn("busy", 100))
    assert clock.turn("idle", 100) == 900
    assert clock.turn("idle", 100) == clock.turn("busy", 100) == 1000


def test_generated_tokens_count_against_the_key() -> None:
    clock = FairClock()
    clock.serve(clock.turn("a", 10))
    clock.charge("a", 90)
    clock.turn("b", 10)
    assert (clock.turn("a", 10), clock.turn("b", 10)) == (100, 10)


def test_all_keys_are_equal_after_an_idle_period() -> None:
    clock = FairClock()
    clock.turn("a", 1000)
    clock.rest()
    assert clock.turn("a", 10) == clock.turn("b", 10)


@in_loop
async def test_request_cancelled_in_the_queue_leaves_no_trace() -> None:
    gate = Gate(GateLimits(concurrent=1))
    holder, gone, patient = Visitor(gate), Visitor(gate), Visitor(gate)
    await settle()
    gone.task.cancel()
    with suppress(asyncio.CancelledError):
        await gone.task
    assert (gate.num_waiting, gate.waiting_tokens, gate.num_inside) == (1, 4, 2)
    await holder.leave()
    await settle()
    assert patient.entered.is_set()
    await patient.leave()


@in_loop
async def test_slot_given_to_a_request_that_goes_in_the_same_moment_is_not_lost() -> None:
    gate = Gate(GateLimits(concurrent=1))
    holder, gone, patient = Visitor(gate), Visitor(gate), Visitor(gate)
    await settle()
    holder.go.set()
    while gate.num_inside == 3:
        await asyncio.sleep(0)
    # The slot is on its way, and `gone` has not woken yet.
    assert not gone.entered.is_set()
    gone.task.cancel()
    await settle()
    assert patient.entered.is_set()
    await patient.leave()
    later = Visitor(gate)
    await settle()
    assert later.entered.is_set()
    await later.leave()


@in_jumping_time
async def test_timed_out_request_ends_whether_queued_or_running() -> None:
    gate = Gate(GateLimits(concurrent=1, seconds=0.05))
    at_work, in_line = Visitor(gate), Visitor(gate)
    for visitor in (at_work, in_line):
        with pytest.raises(RequestTimeout, match=r"longer than the allowed 0\.05 seconds"):
            await visitor.task
    assert (gate.num_inside, gate.num_waiting) == (0, 0)


class Stream:
    def __init__(self, *items: list[Delta], stuck: bool = False) -> None:
        self.items = list(items)
        self.stuck = stuck
        self.closed = False

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        if self.items:
            return self.items.pop(0)
        if self.stuck:
            await asyncio.Event().wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


@in_loop
async def test_watched_stream_passes_all_and_the_record_has_what_it_brought() -> None:
    gate, record = Gate(GateLimits()), a_record()
    record.stream = True
    stream = Stream([Delta(0, "a", None, [1, 2])], [Delta(0, "b", "stop", [3])])
    async with gate.admit(record) as ticket:
        ticket.enlist([a_request(7)])
        await ticket.turn()
        texts = [delta.text async for deltas in ticket.watch(stream) for delta in deltas]
    assert (texts, stream.closed) == (["a", "b"], True)
    assert (record.prompt_tokens, record.completion_tokens, record.finish_reasons) == (7, 3, ["stop"])
    assert record.ttft_seconds is not None


@in_jumping_time
async def test_watched_stream_that_takes_too_long_is_closed() -> None:
    gate, stream = Gate(GateLimits(seconds=1.0)), Stream([Delta(0, "a", None, [1])], stuck=True)
    async with gate.admit(a_record()) as ticket:
        ticket.enlist([a_request()])
        await ticket.turn()
        watched = ticket.watch(stream)
        assert [delta.text for delta in await anext(watched)] == ["a"]
        with pytest.raises(RequestTimeout):
            await anext(watched)
    assert stream.closed


@in_jumping_time
async def test_time_that_runs_out_while_the_reader_is_busy_ends_the_stream_at_its_next_look() -> None:
    gate = Gate(GateLimits(seconds=1.0))
    stream = Stream([Delta(0, "a", None, [1])], [Delta(0, "b", None, [2])])
    async with gate.admit(a_record()) as ticket:
        ticket.enlist([a_request()])
        await ticket.turn()
        watched = ticket.watch(stream)
        await anext(watched)
        await asyncio.sleep(1.1)
        with pytest.raises(RequestTimeout):
            await anext(watched)
    assert stream.closed


@in_loop
async def test_cancellation_from_outside_is_not_taken_for_a_timeout() -> None:
    gate = Gate(GateLimits())
    visitor = Visitor(gate)
    await settle()
    visitor.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await visitor.task
    assert gate.num_inside == 0


@in_loop
async def test_draining_gate_admits_nobody_and_reports_when_it_is_empty() -> None:
    gate = Gate(GateLimits(concurrent=1))
    visitors = [Visitor(gate), Visitor(gate)]
    await settle()
    gate.drain()
    with pytest.raises(Unavailable) as refusal:
        async with gate.admit(a_record()):
            pass
    assert refusal.value.retry_after > 0
    emptied = asyncio.create_task(_awaited(gate.emptied()))
    for visitor in visitors:
        assert not emptied.done()
        await visitor.leave()
    await emptied


async def _awaited(work: Awaitable[T]) -> T:
    return await work


@in_loop
async def test_cap_on_new_tokens_is_reported_and_is_the_default() -> None:
    gate = Gate(GateLimits(new_tokens=32))
    async with gate.admit(a_record()) as ticket:
        with pytest.raises(BadRequest, match="this server allows at most 32"):
            ticket.enlist([a_request(max_tokens=33)])
        [request] = ticket.enlist([a_request(max_tokens=None)])
    # It still has no limit of its own, which decides whether a loop ends it.
    assert (request.params.max_tokens, request.params.default_max_tokens) == (None, 32)


@in_loop
async def test_slot_of_a_request_waiting_for_its_model_is_lent_to_the_next() -> None:
    gate = Gate(GateLimits(concurrent=1))
    holder = Visitor(gate)
    await settle()
    loaded = asyncio.Event()
    async with gate.admit(a_record()) as ticket:
        ticket.enlist([a_request()])
        assert not ticket.enter()
        turn = asyncio.create_task(ticket.turn())
        await settle()
        behind, last = Visitor(gate), Visitor(gate)
        await settle()
        await holder.leave()
        await turn
        with ticket.lend_slot_unless_immediate():
            await _awaited(_nothing())
        assert ticket.holds_slot, "what takes no time costs no slot"
        with ticket.lend_slot_unless_immediate():
            loading = asyncio.create_task(_awaited(loaded.wait()))
            await settle()
            assert (ticket.holds_slot, ticket.record.admitted_at, inside([behind, last])) == (False, None, [0])
            loaded.set()
            await loading
        assert not ticket.enter()
        turn = asyncio.create_task(ticket.turn())
        await settle()
        await behind.leave()
        await turn
        assert (ticket.holds_slot, inside([last])) == (True, []), "it comes before those who came after it"
    await settle()
    assert inside([last]) == [0]
    await last.leave()


async def _nothing() -> None:
    pass


@in_loop
async def test_requests_prepared_again_keep_their_turn_and_cost_nothing_more() -> None:
    gate = Gate(GateLimits())
    async with gate.admit(a_record()) as ticket:
        assert ticket.enlist([a_request(4)]) == ticket.enlist([a_request(4)])
        assert gate.clock.turn("anonymous", 1) == 5


class Loading:
    """A request that waits for its model, gets it, and leaves."""

    def __init__(self, gate: Gate, name: str, loaded: asyncio.Event) -> None:
        self.holds_model = False
        self.task = asyncio.create_task(self._visit(gate, name, loaded))

    async def _visit(self, gate: Gate, name: str, loaded: asyncio.Event) -> None:
        async with gate.admit(a_record()) as ticket:
            await ticket.take(self._model(loaded), name)
            assert self.holds_model
        assert not self.holds_model

    @asynccontextmanager
    async def _model(self, loaded: asyncio.Event) -> AsyncIterator[None]:
        await loaded.wait()
        self.holds_model = True
        try:
            yield
        finally:
            self.holds_model = False

    @property
    def refused(self) -> bool:
        return self.task.done() and isinstance(self.task.exception(), QueueFull)


@pytest.mark.parametrize(("many_models", "most"), [(True, 4), (False, 8)])
def test_waiters_for_one_model_leave_room_for_other_models(many_models: bool, most: int) -> None:
    """A flood for a model that loaded filled the gate, and models that were ready answered nobody."""

    async def scenario() -> None:
        gate = Gate(GateLimits(concurrent=1, waiting=7), many_models=many_models)
        loaded = asyncio.Event()
        flood = [Loading(gate, "slow", loaded) for _ in range(20)]
        await settle()
        assert [each.refused for each in flood] == [False] * most + [True] * (20 - most)
        ready = asyncio.Event()
        ready.set()
        others = [Loading(gate, name, ready) for name in ("a", "a", "b")]
        await settle()
        assert [each.refused for each in others] == [not many_models] * 3
        loaded.set()
        await asyncio.gather(*(each.task for each in (*flood, *others)), return_exceptions=True)
        await Loading(gate, "slow", loaded).task
        assert gate.num_inside == 0

    asyncio.run(scenario())


@in_loop
async def test_what_requests_have_used_is_kept_by_model() -> None:
    gate = Gate(GateLimits())
    for model, tokens in (("a", 3), ("b", 4), ("a", 5)):
        visitor = Visitor(gate, request=a_request(tokens))
        visitor.record.model, visitor.record.cached_tokens = model, 2
        await visitor.leave()
    async with gate.admit(a_record()) as ticket:
        ticket.record.model = "a"
    assert gate.used == {"a": Usage(2, 8, 2, 4), "b": Usage(1, 4, 1, 2)}
