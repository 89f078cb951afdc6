"""The store of responses: who finds what, for how long, and that its bytes are counted right."""

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostro.errors import BadRequest, PreviousResponseUnknown, RequestTimeout, TryLater, UnknownResponse, Unsupported
from ostro.schemas.responses import MAX_ITEMS
from ostro.server.admission.shares import Shares
from ostro.server.dialects.responses.event_log import BackgroundRun, EventLog
from ostro.server.dialects.responses.store import Exchange, ResponseStore

Json = dict[str, Any]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def store_of(max_bytes: int = 64 << 20, *, num_keys: int = 1, **timing: Any) -> ResponseStore:
    return ResponseStore(Shares(max_bytes, num_keys=num_keys, is_strict=True), **timing)


def said(id: str, text: str = "") -> Json:
    return {"type": "message", "id": id, "text": text}


def response(id: str, *texts: str) -> Json:
    return {"id": id, "output": [said(f"out_{id}_{number}", text) for number, text in enumerate(texts)]}


def keep(store: ResponseStore, id: str, previous: str | None = None, *, owner: str = "me", text: str = "") -> None:
    before = None if previous is None else store.previous(owner, previous)
    store.keep(owner, response(id, text), [said(f"in_{id}", text)], before)


def conversation(store: ResponseStore, id: str) -> list[str]:
    return [str(item["id"]) for item in store.previous("me", id).items()]


def test_a_chain_is_the_whole_conversation_in_order() -> None:
    store = store_of()
    keep(store, "a")
    keep(store, "b", "a")
    keep(store, "c", "b")
    assert conversation(store, "c") == ["in_a", "out_a_0", "in_b", "out_b_0", "in_c", "out_c_0"]


def test_two_responses_may_continue_one() -> None:
    store = store_of()
    keep(store, "a")
    keep(store, "b", "a")
    keep(store, "c", "a")
    assert conversation(store, "b") == ["in_a", "out_a_0", "in_b", "out_b_0"]
    assert conversation(store, "c") == ["in_a", "out_a_0", "in_c", "out_c_0"]


def test_deleting_a_response_takes_nothing_from_those_that_continue_it() -> None:
    store = store_of()
    keep(store, "a")
    keep(store, "b", "a")
    store.delete("me", "a")
    with pytest.raises(UnknownResponse):
        store.get("me", "a")
    with pytest.raises(PreviousResponseUnknown):
        store.previous("me", "a")
    assert conversation(store, "b") == ["in_a", "out_a_0", "in_b", "out_b_0"]
    store.delete("me", "b")
    assert store.num_bytes == 0


def test_nobody_finds_anothers_responses_and_items() -> None:
    store = store_of()
    keep(store, "a", owner="me")
    for find in (store.get, store.delete, store.previous):
        with pytest.raises((UnknownResponse, PreviousResponseUnknown)):
            find("you", "a")
    assert store.find_items("you", ["out_a_0"]) == {}
    assert store.find_items("me", ["out_a_0", "in_a", "a"]) == {"out_a_0": said("out_a_0"), "in_a": said("in_a")}
    store.delete("me", "a")
    assert store.find_items("me", ["out_a_0", "in_a"]) == {}


def test_newest_of_two_items_with_one_id_is_found() -> None:
    store = store_of()
    for text in ("old", "new"):
        store.keep("me", response(text), [said("same", text)], None)
    assert store.find_items("me", ["same"]) == {"same": said("same", "new")}
    store.delete("me", "old")
    assert store.find_items("me", ["same"]) == {"same": said("same", "new")}


def test_responses_expire() -> None:
    clock = Clock()
    store = store_of(seconds=10, clock=clock)
    keep(store, "a")
    clock.now = 6.0
    keep(store, "b", "a")
    clock.now = 10.0
    assert len(store) == 1
    with pytest.raises(UnknownResponse):
        store.get("me", "a")
    clock.now = 16.0
    assert len(store) == 0
    assert store.num_bytes == 0


def test_the_oldest_make_room_for_the_newest() -> None:
    store = store_of(64 << 10)
    for id in "abcdefgh":
        keep(store, id, text="x" * 4000)
    assert store.num_bytes <= store.max_bytes
    with pytest.raises(UnknownResponse):
        store.get("me", "a")
    assert store.get("me", "h").id == "h"


def test_a_response_that_is_larger_than_the_store_is_not_kept() -> None:
    store = store_of(64 << 10)
    keep(store, "a")
    keep(store, "b", text="x" * (64 << 10))
    assert store.get("me", "a").id == "a"
    with pytest.raises(UnknownResponse):
        store.get("me", "b")


def test_a_store_that_is_off_says_so() -> None:
    store = store_of(0)
    assert not store.is_on
    with pytest.raises(Unsupported) as refused:
        store.previous("me", "a")
    assert refused.value.param == "previous_response_id"
    assert "--response-store" in refused.value.message


def test_an_exchange_that_was_freed_while_it_was_continued_is_counted_again() -> None:
    store = store_of()
    keep(store, "a")
    before = store.previous("me", "a")
    store.delete("me", "a")
    store.keep("me", response("b", "x"), [said("in_b")], before)
    assert conversation(store, "b") == ["in_a", "out_a_0", "in_b", "out_b_0"]
    store.delete("me", "b")
    assert store.num_bytes == 0


class Stored(RuleBasedStateMachine):
    """Random schedules against a plain model: what is stored, and how large it is."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = store_of(40_000, seconds=100, clock=self.clock)
        self.num_created = 0
        self.held: list[Exchange] = []

    def ids(self) -> list[str]:
        return [str(number) for number in range(self.num_created) if self.has(str(number))]

    def has(self, id: str) -> bool:
        try:
            self.store.get("me", id)
        except UnknownResponse:
            return False
        return True

    @rule(size=st.integers(0, 9000), pick=st.randoms(use_true_random=False))
    def create(self, size: int, pick: Any) -> None:
        ids = self.ids()
        previous = pick.choice([None, *ids])
        keep(self.store, str(self.num_created), previous, text="x" * size)
        self.num_created += 1

    @precondition(lambda self: self.ids())
    @rule(pick=st.randoms(use_true_random=False))
    def hold(self, pick: Any) -> None:
        """A request finds what it continues, and is answered later."""
        self.held.append(self.store.previous("me", pick.choice(self.ids())))

    @precondition(lambda self: self.held)
    @rule()
    def answer(self) -> None:
        self.store.keep("me", response(str(self.num_created)), [], self.held.pop())
        self.num_created += 1

    @precondition(lambda self: self.ids())
    @rule(pick=st.randoms(use_true_random=False))
    def delete(self, pick: Any) -> None:
        self.store.delete("me", pick.choice(self.ids()))

    @rule(seconds=st.integers(0, 60))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def bytes_are_those_of_what_is_stored(self) -> None:
        stored = [self.store.get("me", id) for id in self.ids()]
        exchanges: dict[int, Exchange] = {}
        for each in stored:
            exchange: Exchange | None = each.exchange
            while exchange is not None:
                exchanges[id(exchange)] = exchange
                exchange = exchange.previous
        counted = sum(each.num_bytes for each in stored) + sum(each.num_bytes for each in exchanges.values())
        assert self.store.num_bytes == counted <= self.store.max_bytes


TestStored = Stored.TestCase
TestStored.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


# --- in the background --------------------------------------------------------------------------------------------


def in_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__ = test.__name__
    return run


def run(response: Json, *, logs: bool = True) -> BackgroundRun:
    return BackgroundRun(response, log=EventLog() if logs else None)


@in_loop
async def test_a_response_under_way_is_neither_continued_nor_dropped() -> None:
    store = store_of(20_000)
    each = run(response("a"))
    stored = store.begin("me", "a", 100, None, each)
    store.add_inputs(stored, [said("in_a")])
    with pytest.raises(BadRequest, match="has not ended yet") as refusal:
        store.previous("me", "a")
    assert not isinstance(refusal.value, PreviousResponseUnknown)
    for id in "bcdefgh":
        keep(store, id, text="x" * 2000)
    assert store.get("me", "a") is stored
    store.update(stored, response("a", "done"))
    each.end()
    assert conversation(store, "a") == ["in_a", "out_a_0"]
    assert json.loads(stored.body) == response("a", "done")


@in_loop
async def test_responses_under_way_that_fill_the_store_leave_no_room_for_more() -> None:
    store = store_of(20_000)
    store.begin("me", "a", 10_000, None, run(response("a")))
    keep(store, "b")
    with pytest.raises(TryLater):
        store.begin("me", "c", 10_000, None, run(response("c")))
    assert store.get("me", "b").id == "b"


@in_loop
async def test_a_log_that_outgrows_the_store_is_given_up() -> None:
    store = store_of(20_000)
    each = run(response("a"))
    stored = store.begin("me", "a", 0, None, each)
    each.has_room = lambda num_bytes: store.grow(stored, num_bytes)
    for _ in range(20):
        each.write(b"event: x\ndata: " + b"y" * 2000 + b"\n\n")
    assert each.log is not None
    assert each.log.is_lost
    store.update(stored, response("a", "done"))
    each.end()
    assert store.num_bytes <= store.max_bytes
    store.delete("me", "a")
    assert store.num_bytes == 0


@in_loop
async def test_a_log_that_is_given_up_frees_its_room_and_leaves_others_theirs() -> None:
    store = store_of(60_000)
    for owner in ("me", "you"):
        keep(store, f"of_{owner}", owner=owner, text="x" * 3000)
    before = store.num_bytes
    each = run(response("a"))
    stored = store.begin("me", "a", 0, None, each)
    each.has_room = lambda num_bytes: store.grow(stored, num_bytes)
    begun = store.num_bytes
    for _ in range(20):
        each.write(b"event: x\ndata: " + b"y" * 2000 + b"\n\n")
    assert each.log is not None
    assert each.log.is_lost
    assert store.num_bytes == begun
    assert len(store) == 3
    keep(store, "another", text="x" * 3000)
    assert store.get("me", "another")
    store.delete("me", "a")
    store.delete("me", "another")
    assert store.num_bytes == before


@in_loop
async def test_logs_make_no_room_at_the_cost_of_keys_that_have_stored_less() -> None:
    store = store_of(60_000)
    keep(store, "old", text="x" * 3000)
    keep(store, "of_you", owner="you", text="x" * 3000)
    runs = [run(response(str(number))) for number in range(5)]
    begun = [store.begin("me", str(number), 0, None, each) for number, each in enumerate(runs)]
    for each, stored in zip(runs, begun, strict=True):
        each.has_room = lambda num_bytes, stored=stored: store.grow(stored, num_bytes)  # type: ignore[misc]
        each.write(b"event: x\ndata: " + b"y" * 8000 + b"\n\n")
    assert {each.log is not None and each.log.is_lost for each in runs} == {False, True}
    assert store.get("you", "of_you")
    assert store.num_bytes <= store.max_bytes
    with pytest.raises(UnknownResponse):
        store.get("me", "old")


def test_key_with_the_most_stored_makes_room() -> None:
    store = store_of(64 << 10)
    keep(store, "yours", owner="you", text="x" * 1000)
    for number in range(40):
        keep(store, str(number), text="x" * 4000)
    assert store.get("you", "yours")
    assert store.get("me", "39")
    with pytest.raises(UnknownResponse):
        store.get("me", "0")


def test_key_that_stores_no_more_than_its_part_loses_nothing_to_another() -> None:
    """28 requests of one key emptied another's store."""
    store = store_of(256 << 10, num_keys=2)
    for number in range(10):
        keep(store, f"yours_{number}", owner="you", text="x" * 1000)
    for number in range(50):
        keep(store, str(number), text="x" * 20_000)
    assert all(store.get("you", f"yours_{number}") for number in range(10))
    assert store.get("me", "49")
    assert store.num_bytes <= store.max_bytes


@in_loop
async def test_running_responses_of_one_key_leave_another_its_part() -> None:
    store = store_of(256 << 10, num_keys=2)
    keep(store, "yours", owner="you", text="x" * 10_000)

    def fill() -> None:
        for number in range(28):
            store.begin("me", str(number), 20_000, None, run(response(str(number))))

    with pytest.raises(TryLater):
        fill()
    assert store.get("you", "yours")
    store.begin("you", "another", 20_000, None, run(response("another")))


def test_what_is_dropped_of_a_key_with_more_than_its_part_makes_room_for_one_with_less() -> None:
    store = store_of(256 << 10, num_keys=2)
    for number in range(30):
        keep(store, str(number), text="x" * 20_000)
    for number in range(5):
        keep(store, f"yours_{number}", owner="you", text="x" * 1000)
    assert all(store.get("you", f"yours_{number}") for number in range(5))
    assert store.num_bytes <= store.max_bytes


def test_conversation_can_be_continued_until_it_has_as_many_items_as_a_request_may_have() -> None:
    """Sixteen links of 4,090 items each: eight requests of 120 bytes took 20 seconds each."""
    store = store_of()
    items = [said(f"in_{number}") for number in range(MAX_ITEMS - 1)]
    store.keep("me", response("a", ""), items, None)
    keep(store, "b", "a")
    with pytest.raises(BadRequest, match=f"at most {MAX_ITEMS}") as refusal:
        store.previous("me", "b")
    assert refusal.value.param == "previous_response_id"
    assert store.previous("me", "a").chain_items == MAX_ITEMS


def test_conversation_can_be_continued_until_it_has_too_many_bytes() -> None:
    store = store_of()
    for previous, id in ((None, "a"), ("a", "b")):
        keep(store, id, previous, text="x" * (5 << 20))
    with pytest.raises(BadRequest, match="bytes"):
        store.previous("me", "b")


@in_loop
async def test_dropping_a_response_under_way_ends_it() -> None:
    store = store_of()
    each = run(response("a"))
    store.begin("me", "a", 0, None, each)
    store.delete("me", "a")
    assert await asyncio.wait_for(each.receive(), 10) == {"type": "http.disconnect"}
    assert each.was_cancelled


@in_loop
async def test_log_of_a_dropped_response_is_dropped_though_somebody_reads_it() -> None:
    """It lived as long as its slowest reader, and nobody counted it."""
    store = store_of()
    each = run(response("a"))
    stored = store.begin("me", "a", 0, None, each)
    assert each.log is not None
    each.write(b"event: x\ndata: " + b"y" * (1 << 20) + b"\n\nevent: y\ndata: 1\n\n")
    reader = each.log.after(-1)
    read = await anext(reader)
    store.update(stored, response("a", "done"))
    each.end()
    store.delete("me", "a")
    await asyncio.sleep(0)
    async for data in reader:
        assert len(data) < 100_000
        read += data
    assert each.log.is_lost
    assert each.log.longest == 0
    assert read.endswith(b"yyy\n\n"), "never within an event"
    assert store.num_bytes == 0


@in_loop
async def test_room_that_is_set_aside_for_input_counts_once_the_input_is_stored() -> None:
    """It was counted twice: the request itself is in the ledger until its run ends."""
    store = store_of(200_000)
    each = run(response("a"))
    stored = store.begin("me", "a", 100_000, None, each)
    assert store.num_bytes < 10_000
    with pytest.raises(TryLater):
        store.begin("me", "b", 100_000, None, run(response("b")))
    store.add_inputs(stored, [said("in_a", "x" * 90_000)])
    assert 90_000 < store.num_bytes < 100_000
    store.begin("me", "b", 90_000, None, run(response("b")))
    store.delete("me", "b")
    store.update(stored, response("a", "done"))
    each.end()
    store.begin("me", "c", 190_000, None, run(response("c")))


@in_loop
async def test_beginning_costs_the_same_however_many_are_stored() -> None:
    """All that was stored was scanned, under the lock that every request to the store takes."""

    def calls(number: int) -> int:
        store = store_of()
        for each in range(number):
            keep(store, f"stored_{each}")
        found = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        begun = run(response("a"))
        # What a collection of garbage calls would be counted.
        gc.disable()
        sys.setprofile(count)
        try:
            store.begin("me", "a", 0, None, begun)
        finally:
            sys.setprofile(None)
            gc.enable()
        return found

    assert calls(500) < 2 * calls(1)


@in_loop
async def test_what_cannot_be_dropped_is_counted_until_it_ends() -> None:
    store = store_of(100_000)
    keep(store, "a", text="x" * 1000)
    runs = [run(response(f"run_{number}")) for number in range(3)]
    previous = store.previous("me", "a")
    begun = [store.begin("me", f"run_{number}", 5000, previous, each) for number, each in enumerate(runs)]
    store.add_inputs(begun[0], [said("in_0", "x" * 100)])
    store.delete("me", "run_1")
    store.update(begun[0], response("run_0", "done"))
    runs[0].end()
    # The last one is the only one that still runs: nothing else is in the way of others.
    store.begin("me", "more", 80_000, None, run(response("more")))
    with pytest.raises(TryLater):
        store.begin("me", "too much", 10_000, None, run(response("too much")))
    store.delete("me", "run_2")
    store.begin("me", "fits", 5_000, None, run(response("fits")))


@in_loop
async def test_waiting_for_a_run_that_does_not_end_times_out() -> None:
    each = run(response("a"))
    with pytest.raises(RequestTimeout, match="has not ended yet"):
        await each.ended(0.01)
    each.end()
    await each.ended(0.01)


@in_loop
async def test_readers_of_a_log_get_what_is_there_and_what_comes() -> None:
    log = EventLog()
    log.add(b"event: a\ndata: 0\n\nevent: b\ndata: 1\n\n")

    async def read(after: int) -> bytes:
        return b"".join([data async for data in log.after(after)])

    readers = [asyncio.create_task(read(after)) for after in (-1, 0, 1, 5)]
    await asyncio.sleep(0)
    log.add(b"event: c\ndata: 2\n\n")
    await asyncio.sleep(0)
    log.close()
    assert [data.count(b"event:") for data in await asyncio.gather(*readers)] == [3, 2, 1, 0]
    assert await read(1) == b"event: c\ndata: 2\n\n"
