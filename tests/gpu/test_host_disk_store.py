"""Disk below host memory below pages: what comes back is what went, whichever way it took."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from engine_driver import Driver, make_request, public_root
from fake_tiers import FixedCosts
from torch import Tensor
from triton_device import DEVICE

from ostro.backends.cuda.host_disk_store import HostDiskStore
from ostro.backends.cuda.host_store import HostStore
from ostro.backends.tiers.page_bundles import PageBundles
from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import open_page_file
from ostro.engine.core import EngineCore
from ostro.engine.page_store import Arrival, Fetch, Offer, Spill, Store
from ostro.engine.request import Request
from ostro.engine.tiers import Tiers

SIZE, PAGES, VOCABULARY = 4, 14, 13
IDENTITY = b"a model".ljust(32, b"\0")
_MASK = (1 << 64) - 1


class Slots:
    """The fake runner's memory as a tensor, so that a store for tensors can copy its pages."""

    def __init__(self, num_pages: int) -> None:
        self.memory = torch.zeros(1, 1, num_pages + 1, 1, SIZE, 1, dtype=torch.int64)
        self._flat = self.memory.view(-1)

    def __getitem__(self, at: slice | int) -> list[int] | int:
        found = self._flat[at].tolist()
        return [each & _MASK for each in found] if isinstance(found, list) else int(found) & _MASK

    def __setitem__(self, at: slice | int, values: list[int] | int) -> None:
        given = values if isinstance(values, list) else [values]
        self._flat[at] = torch.tensor([(each & _MASK) - (1 << 64) * (each >> 63 & 1) for each in given])


@contextmanager
def store_of(
    memory: Tensor,
    directory: Path,
    *,
    num_slots: int,
    spare: int = 64,
    incoming: int = 3,
    outlives: bool = False,
    shared: Path | None = None,
) -> Iterator[HostDiskStore]:
    host = HostStore(memory, num_slots + spare + incoming)
    bundles = None
    if shared is not None:
        bundles = PageBundles(shared, identity=IDENTITY, page_bytes=host.page_bytes, limit=1 << 20)
    name = "model.pages" if outlives else None
    file = open_page_file(directory, name, identity=IDENTITY, page_bytes=host.page_bytes, limit=1 << 20)
    disk = PageDisk(file, bundles)
    yield HostDiskStore(host, disk, num_slots=num_slots, num_incoming=incoming, outlives=outlives)
    if not disk._thread.is_alive():
        return
    disk.close()


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def await_disk(store: HostDiskStore, *numbers: int) -> None:
    """Until the disk has pages that were spilled: on a GPU they are on their way first."""
    while not all(store.holds(digest(number)) for number in numbers):
        store.arrivals(timeout=0.01)


def fetched(store: HostDiskStore, fetch: Fetch) -> int:
    """How many pages have arrived."""
    store.carry_out([fetch])
    while not (arrived := store.arrivals(timeout=0.05)):
        pass
    [arrival] = arrived
    assert arrival.ticket == fetch.ticket
    return arrival.num_good


def test_pages_come_back_from_host_and_disk_in_one_fetch(tmp_path: Path) -> None:
    memory = torch.randn(2, 2, 21, 2, 4, 8, device=DEVICE)
    before = memory.clone()
    with store_of(memory, tmp_path, num_slots=4) as store:
        store.carry_out([*(Store(page, page) for page in range(4)), *(Spill(digest(at), slot=at) for at in range(4))])
        store.carry_out([*(Store(4 + at, at) for at in range(4)), Spill(digest(9), page=8)])
        await_disk(store, 0, 1, 2, 3, 9)
        memory.zero_()
        sources = (0, 1, 2, 3, digest(0), digest(1), digest(2), digest(3), digest(9))
        assert fetched(store, Fetch(1, sources, tuple(range(10, 19)))) == 9
        assert torch.equal(memory[:, :, 10:19], before[:, :, [4, 5, 6, 7, 0, 1, 2, 3, 8]])


def test_an_arrival_reports_the_time_its_disk_pages_took(tmp_path: Path) -> None:
    memory = torch.randn(2, 2, 21, 2, 4, 8, device=DEVICE)
    with store_of(memory, tmp_path, num_slots=2) as store:
        store.carry_out([Store(0, 0), Spill(digest(1), page=1)])
        await_disk(store, 1)
        store.carry_out([Fetch(1, (0,), (10,)), Fetch(2, (0, digest(1)), (11, 12))])
        arrived: dict[int, Arrival] = {}
        while len(arrived) < 2:
            arrived |= {each.ticket: each for each in store.arrivals(timeout=0.05)}
        assert arrived[1].disk_seconds == 0.0
        assert 0.0 < arrived[2].disk_seconds <= arrived[2].seconds


def test_page_lost_on_disk_ends_the_fetch_there(tmp_path: Path) -> None:
    memory = torch.randn(2, 2, 21, 2, 4, 8, device=DEVICE)
    with store_of(memory, tmp_path, num_slots=2) as store:
        store.carry_out([Store(0, 0), Store(1, 1), *(Spill(digest(page), page=page) for page in range(2, 7))])
        await_disk(store, 2, 3, 4, 5, 6)
        sources = (0, 1, digest(2), digest(3), digest(99), digest(5))
        assert fetched(store, Fetch(1, sources, tuple(range(10, 16)))) == 4
        assert fetched(store, Fetch(2, (digest(98), digest(2)), (10, 11))) == 0


def test_fetches_wait_for_one_another_at_the_disk(tmp_path: Path) -> None:
    memory = torch.randn(2, 2, 41, 2, 4, 8, device=DEVICE)
    before = memory.clone()
    with store_of(memory, tmp_path, num_slots=2) as store:
        store.carry_out([Store(0, 0), *(Spill(digest(page), page=page) for page in range(1, 9))])
        await_disk(store, *range(1, 9))
        memory.zero_()
        sources = tuple(digest(page) for page in range(1, 9))
        store.carry_out([Fetch(at, sources, tuple(range(9 * at, 9 * at + 8))) for at in (1, 2)])
        store.carry_out([Fetch(3, (0, digest(1)), (30, 31))])
        good: dict[int, int] = {}
        while len(good) < 3:
            good |= {each.ticket: each.num_good for each in store.arrivals(timeout=0.05)}
        assert good == {1: 8, 2: 8, 3: 2}
        assert torch.equal(memory[:, :, 9:17], before[:, :, 1:9])
        assert torch.equal(memory[:, :, 18:26], before[:, :, 1:9])
        assert torch.equal(memory[:, :, 30:32], before[:, :, :2])


def test_without_spare_memory_a_page_is_not_kept(tmp_path: Path) -> None:
    memory = torch.randn(2, 2, 21, 2, 4, 8, device=DEVICE)
    with store_of(memory, tmp_path, num_slots=1, spare=1) as store:
        store._spare.clear()
        store.carry_out([Store(0, 0), Spill(digest(1), slot=0), Store(1, 0)])
        assert not store.holds(digest(1))
        assert fetched(store, Fetch(1, (0,), (2,))) == 1
        assert torch.equal(memory[:, :, 2], memory[:, :, 1])


def test_pages_that_are_offered_come_to_another_store_whatever_room_there_is(tmp_path: Path) -> None:
    memory, other = torch.randn(2, 2, 21, 2, 4, 8, device=DEVICE), torch.zeros(2, 2, 21, 2, 4, 8, device=DEVICE)
    digests = tuple(digest(number) for number in range(7))
    with store_of(memory, tmp_path, num_slots=2, spare=3, shared=tmp_path) as store:
        store.carry_out([Offer(1, digests[:5], (4, 3, 2, 1, 0)), Offer(2, digests[5:], (5, 6))])
        assert set(store.under_way) == {1, 2}
        good: dict[int, int] = {}
        while len(good) < 2:
            good |= {each.ticket: each.num_good for each in store.arrivals(timeout=0.05)}
        assert good == {1: 5, 2: 2}
        assert all(store.is_shared(each) for each in digests)
        assert len(store._spare) == 3
    with store_of(other, tmp_path, num_slots=2, shared=tmp_path) as store:
        assert fetched(store, Fetch(1, digests, tuple(range(10, 17)))) == 7
    assert torch.equal(other[:, :, 10:17], memory[:, :, [4, 3, 2, 1, 0, 5, 6]])


def test_an_offer_and_a_fetch_may_end_at_the_same_time(tmp_path: Path) -> None:
    """The second of them was once taken for one of no offers at all."""
    memory = torch.randn(2, 2, 21, 2, 4, 8, device=DEVICE)
    with store_of(memory, tmp_path, num_slots=0, shared=tmp_path) as store:
        store.carry_out([Spill(digest(1), page=1)])
        await_disk(store, 1)
        store.carry_out([Offer(1, (digest(2),), (2,)), Fetch(2, (digest(1),), (10,))])
        good: dict[int, int] = {}
        # What has ended is taken only now and then, as between two long steps.
        taken, store._disk.ended = store._disk.ended, lambda timeout=0.0: []  # type: ignore[method-assign]
        while store._disk._ended.qsize() < 2:
            store.arrivals()
        store._disk.ended = taken  # type: ignore[method-assign]
        while len(good) < 2:
            good |= {each.ticket: each.num_good for each in store.arrivals(timeout=0.05)}
        assert good == {1: 1, 2: 1}
        assert torch.equal(memory[:, :, 10], memory[:, :, 1])


def test_offers_to_a_disk_that_takes_nothing_end_and_give_their_memory_back(tmp_path: Path) -> None:
    memory = torch.randn(2, 2, 21, 2, 4, 8, device=DEVICE)
    with store_of(memory, tmp_path, num_slots=0, spare=3, shared=tmp_path / "shared") as store:
        [directory] = (tmp_path / "shared").iterdir()
        # Others could write there now, so that it is not used.
        directory.chmod(0o777)
        store.carry_out([Offer(1, (digest(1), digest(2)), (1, 2))])
        while not (arrived := store.arrivals(timeout=0.05)):
            pass
        assert [each.num_good for each in arrived] == [0]
        assert len(store._spare) == 3
        assert not store.under_way


def a_driver(store: HostDiskStore, slots: Slots) -> Driver:
    made = Driver(page_size=SIZE, num_pages=PAGES, vocab_size=VOCABULARY, steps_ahead=1)
    made.runner.fake._slots = slots  # type: ignore[assignment]
    made.engine = EngineCore(
        made.runner, made.engine.scheduler.limits, tiers=Tiers(store, costs=FixedCosts(1.0), root=public_root)
    )
    return made


def requests(seed: int) -> list[Request]:
    draw = Random(seed)
    made = []
    for id in range(14):
        prompt = [(at * at + 5 * (id % 4)) % 11 for at in range(draw.randrange(5, 34))]
        made.append(make_request(id, prompt, max_tokens=draw.randrange(1, 6), cache_salt=draw.choice(["", "", "salt"])))
    return made


@pytest.mark.parametrize("num_slots", [0, 6])
def test_an_engine_over_all_tiers_gives_what_is_computed_without_pages(tmp_path: Path, num_slots: int) -> None:
    found = 0
    for seed in range(6):
        slots = Slots(PAGES)
        with store_of(slots.memory, tmp_path, num_slots=num_slots) as store:
            made, asked = a_driver(store, slots), requests(seed)
            for at in range(0, len(asked), 3):
                made.run(*asked[at : at + 3])
            made.check_outcomes(*asked)
            counters = made.engine.scheduler.counters
            found += counters.fetched_disk_pages
            assert not counters.lost_pages
    assert found > 0


@pytest.mark.full
@pytest.mark.parametrize("num_slots", [0, 6])
def test_engines_that_offer_to_one_another_give_what_is_computed_without_pages(tmp_path: Path, num_slots: int) -> None:
    offered = found = 0
    for seed in range(4):
        slots, others = Slots(PAGES), Slots(PAGES)
        with (
            store_of(slots.memory, tmp_path, num_slots=num_slots, spare=2, shared=tmp_path / str(seed)) as store,
            store_of(others.memory, tmp_path, num_slots=num_slots, spare=2, shared=tmp_path / str(seed)) as other,
        ):
            made, second, asked = a_driver(store, slots), a_driver(other, others), requests(seed)
            for at in range(0, len(asked), 2):
                made.run(*asked[at : at + 2])
                for request in asked[at : at + 2]:
                    made.engine.offer(request.prompt_ids, None, lambda _: None)
                made.add(asked[at])
                made.finish()
            made.engine.offer_all(lambda: None)
            made.finish()
            looked = threading.Event()
            second.engine.look(looked.set)
            assert looked.wait(30)
            for request in asked:
                second.run(request)
            second.check_outcomes(*asked)
            offered += made.engine.scheduler.counters.offered_pages
            found += second.engine.scheduler.counters.fetched_disk_pages
    assert offered > 0
    assert found > 0


def test_the_next_engine_finds_what_was_on_the_device_and_in_host_memory(tmp_path: Path) -> None:
    prompts = [make_request(id, [(id + at * at) % VOCABULARY for at in range(33)], max_tokens=1) for id in range(2)]
    slots = Slots(PAGES)
    with store_of(slots.memory, tmp_path, num_slots=16, outlives=True) as store:
        made = a_driver(store, slots)
        for request in prompts:
            made.run(request)
        assert made.engine.scheduler.counters.stored_pages > 0
        made.engine.close()
    slots = Slots(PAGES)
    with store_of(slots.memory, tmp_path, num_slots=16, outlives=True) as store:
        made = a_driver(store, slots)
        for request in prompts:
            made.run(request)
            made.check_outcomes(request)
        assert made.engine.scheduler.counters.cache_hits == 64
        made.engine.close()
