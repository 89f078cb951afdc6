"""KV cache bookkeeping: free pages, and the prefix cache. Knows no schedule and no tensors.

A sequence's page table is a path in the tree, then pages of its own:

    seq.pages   [ 4  9  2 | 31 32 ]
                  └ tree ┘  └ its own: not full yet, or not computed yet

A page that fills moves into the tree. So every page is free, in the tree, or owned by exactly one sequence, and no page
needs a reference count.

Where models keep recurrent states too, `engine.states` does the same for their slots, and this module asks it: a hit
then ends at a state, and pages that are cached behind it are computed again, into pages that `commit` swaps for them.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from ostro.engine.page_store import Arrival, StateCopy
from ostro.engine.radix import NOWHERE, Node, PageKey, RadixCache, Salt
from ostro.engine.request import Task
from ostro.engine.sequence import Sequence
from ostro.engine.states import States, deepest
from ostro.engine.tiers import Tiers

_FREE = b"\x01"


class PageAllocator:
    """Which pages are free.

    Any free page will do. But a device may read a run of contiguous pages at once, so the allocator prefers to continue
    a sequence's run, and starts new runs where there is room for them to grow:

        page   0 1 2 3 4 5 6 7 8 9 …
               A A A . . . B B . .       A may become 6 pages long: B starts after the room that A needs
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        # One byte per page, so that a substring search finds a run of free pages.
        self._free = bytearray(_FREE * num_pages)
        self._cursor = 0

    def allocate(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Takes `count` pages; the caller has made sure that many are free.

        `after` is the page that the new ones continue. `room` is how many pages a new run may grow to.
        """
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} free"
        pages = [] if after is None else self._take_run(after + 1, count)
        while len(pages) < count:
            missing = count - len(pages)
            pages += self._take_run(self._find_run(missing, max(room, missing)), missing)
        return pages

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert not self._free[page], f"page {page} was released twice"
            self._free[page] = 1
        self.num_free += len(pages)

    def is_free(self, page: int) -> bool:
        return bool(self._free[page])

    def _find_run(self, count: int, room: int) -> int:
        """Start of a free run: of `room` pages if there is one, else of `count` pages, else of one page."""
        for length in (room, count, 1):
            start = self._free.find(_FREE * length, self._cursor)
            if start < 0:
                start = self._free.find(_FREE * length)
            if start >= 0:
                self._cursor = start + length
                return start
        raise AssertionError("no free page")

    def _take_run(self, start: int, most: int) -> list[int]:
        end = start
        while end < start + most and end < self.num_pages and self._free[end]:
            self._free[end] = 0
            end += 1
        self.num_free -= end - start
        return list(range(start, end))


# Most pages to reserve room for beyond those needed now: a max_tokens of 100,000 should not claim the pool.
_MOST_ROOM = 64

PageName = tuple[Salt, int, PageKey]
"""A page that is not computed yet: its salt, the page it follows (-1 if none), and the tokens it will hold."""


class Admission(Enum):
    GRANTED = auto()
    NO_ROOM = auto()
    """Too few pages, or no slot for a state."""
    SOON_CACHED = auto()
    """Another sequence is computing a page, or a state, that this one can share: wait for it."""
    FETCHING = auto()
    """Pages of the prefix come from a lower tier: wait for them."""


@dataclass(frozen=True, slots=True)
class KVUsage:
    total: int
    free: int
    cached: int
    """Pages in the tree that no sequence uses: kept for prefix hits, evicted when room is needed."""
    in_use: int
    host: int = 0
    """Pages that have a copy in host memory, pages on disk, and pages that are shared with other engines."""
    disk: int = 0
    shared: int = 0
    states: int = 0
    """Slots for recurrent states, how many of them are free, and how many hold snapshots."""
    states_free: int = 0
    snapshots: int = 0


class _Parking(NamedTuple):
    """What a preempted sequence needs to resume where it was, beside its state."""

    node: Node
    """The end of its full pages, which stay in the tree, or go down."""
    end: int
    """How many of its tokens are computed."""
    page: int | None
    """Its partly filled page."""


class KVCache:
    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        prefix_caching: bool = True,
        tiers: Tiers | None = None,
        states: States | None = None,
    ) -> None:
        assert prefix_caching or tiers is None, "lower tiers are part of the prefix cache"
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixCache(page_size, tiers, states)
        self._tiers = tiers
        if tiers is not None:
            tiers.attach(self._tree, states)
        self._states = states
        if states is not None:
            states.attach(self._tree, tiers)
        self._nodes: dict[int, Node] = {}
        self._parked: dict[int, _Parking] = {}
        self.has_resumed = False
        """Whether the last sequence that was admitted resumed where it had been preempted."""
        self._copies: list[tuple[int, int]] = []
        self.num_evicted = 0
        """Cached pages dropped to make room, since the start."""

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def available(self) -> int:
        """Pages that can be allocated without taking any from a sequence."""
        return self._allocator.num_free + self._tree.num_evictable + len(self._parked_pages())

    @property
    def usage(self) -> KVUsage:
        total, free, cached = self.num_pages, self._allocator.num_free, self._tree.num_evictable
        usage = KVUsage(total=total, free=free, cached=cached, in_use=total - free - cached)
        if (states := self._states) is not None:
            usage = replace(
                usage, states=states.num_states, states_free=states.num_free, snapshots=states.num_snapshots
            )
        if (tiers := self._tiers) is None:
            return usage
        return replace(usage, host=tiers.num_slots_used, disk=tiers.store.on_disk, shared=tiers.store.num_shared)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def admit(
        self, seq: Sequence, *, hit_limit: int, spare: int = 0, filling: Container[PageName | None] = ()
    ) -> Admission:
        """Gives the sequence the longest cached prefix within `hit_limit` tokens, and pages for its other tokens.

        Refused, without any change, if fewer than `spare` pages would be left, or if the prefix is about to grow by a
        page that another sequence is `filling`. If it continues in a lower tier, it may have to be fetched first.
        """
        assert not seq.pages, f"{seq} is admitted already"
        node = self._tree.match(seq.token_ids, limit=hit_limit, salt=self._salt(seq))
        if self._states is not None:
            return self._admit_with_state(self._states, seq, node, hit_limit, spare)
        coming = self._next_page(seq, node, hit_limit)
        if coming is not None and coming in filling:
            return Admission.SOON_CACHED
        if not self._has_room(seq, node, hit_limit, spare):
            return Admission.NO_ROOM
        if self._tiers is not None and self._fetches(self._tiers, seq, node, hit_limit, is_turn=True):
            return Admission.FETCHING
        self._start(seq, node)
        return Admission.GRANTED

    def _admit_with_state(self, states: States, seq: Sequence, matched: Node, hit_limit: int, spare: int) -> Admission:
        self.has_resumed = False
        if (parking := self._parked.get(seq.id)) is not None and self._tiers is not None:
            resuming = self._resume(self._tiers, states, seq, parking, spare)
            if resuming is not None:
                return resuming
            self.unpark(seq)
        node = deepest(matched)
        if states.is_coming(seq, node.depth * self.page_size, hit_limit, node.salt):
            return Admission.SOON_CACHED
        if self._tiers is not None:
            fetching = self._fetches_state(self._tiers, states, seq, matched, hit_limit, spare, is_turn=True)
            if fetching is not None:
                return fetching
        if not states.has_room or not self._fits(seq, node, spare):
            return Admission.NO_ROOM
        self._start(seq, node)
        states.begin(seq, node, matched.depth * self.page_size, keeps=self.prefix_caching)
        return Admission.GRANTED

    def _start(self, seq: Sequence, node: Node, own: tuple[int, ...] = ()) -> None:
        """Gives the sequence the pages up to a node, its own if it has any, and others for the rest of its tokens."""
        self._tree.lock(node)
        self._nodes[seq.id] = node
        seq.pages = [*[each.page for each in node.path()][::-1], *own]
        self._grow(seq, self.pages_for(seq.num_tokens) - len(seq.pages), after=None)
        seq.num_computed = node.depth * self.page_size

    def num_lost(self, seq: Sequence) -> int:
        """Tokens of a running sequence whose pages were cached, but not the state behind them."""
        return 0 if self._states is None else self._states.num_lost(seq)

    def capture(self, seq: Sequence, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """`Chunk.captures` for a chunk of these tokens. Only for models with states."""
        assert self._states is not None
        return self._states.capture(seq, start, end)

    def fetch_ahead(self, seq: Sequence, *, hit_limit: int, spare: int) -> bool:
        """Begins to fetch what a waiting sequence will find in lower tiers. False, and no change, if there is no room
        for the sequence and `spare` pages.
        """
        node = self._tree.match(seq.token_ids, limit=hit_limit, salt=self._salt(seq))
        if not self._has_room(seq, node, hit_limit, spare):
            return False
        if self._tiers is None or seq.id in self._parked:
            return True
        if self._states is None:
            self._fetches(self._tiers, seq, node, hit_limit, is_turn=False)
            return True
        found = self._fetches_state(self._tiers, self._states, seq, node, hit_limit, spare, is_turn=False)
        return found is not Admission.NO_ROOM

    @property
    def is_moving(self) -> bool:
        """Whether pages are being fetched from lower tiers, or offered to other engines: they are locked meanwhile."""
        return self._tiers is not None and self._tiers.is_moving

    def num_found(self, token_ids: list[int], salt: Salt) -> int:
        """How many tokens of a prompt are cached, on the device or below."""
        limit = self._usable(token_ids)
        node = self._tree.match(token_ids, limit=limit, salt=salt, arriving=True)
        below = () if self._tiers is None else self._tiers.find(node, token_ids, limit)
        assert below is not None, "arriving pages are part of the match"
        if self._states is None:
            return (node.depth + len(below)) * self.page_size
        arriving = (each for each in node.path() if each.is_state_arriving or each.state != NOWHERE)
        depth = next((each.depth for each in arriving), 0)
        if self._tiers is not None:
            depth = max(depth, next((each.depth for each in self._tiers.restarts(node, below)), 0))
        return depth * self.page_size

    def _usable(self, token_ids: list[int]) -> int:
        """How many tokens of a prompt another request for it can take over: it computes at least the last one, and a
        state behind that is of no use to it.
        """
        return len(token_ids) - (self._states is not None)

    def offer(self, token_ids: list[int], salt: Salt, done: Callable[[int], None]) -> None:
        """Shares a prompt's pages with other engines. `done` is told, now or later, how many tokens of it they find."""
        if self._tiers is None:
            done(0)
        else:
            node = self._tree.match(token_ids, limit=self._usable(token_ids), salt=salt)
            node = node if self._states is None else deepest(node)
            self._tiers.offer(node, lambda num_pages: done(num_pages * self.page_size))

    def take_arrival(self, arrival: Arrival) -> None:
        assert self._tiers is not None
        self._allocator.release(self._tiers.take(arrival))

    def next_page(self, seq: Sequence, end: int) -> PageName | None:
        """The next page that the sequence will share once it has computed `end` tokens; None if they fill no page."""
        return self._next_page(seq, self._nodes[seq.id], end)

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Ensures that there are pages for the first `num_tokens` tokens. False, and no change, if too few are left."""
        needed = self.pages_for(num_tokens) - len(seq.pages)
        if needed <= 0:
            return True
        if needed > self.available:
            return False
        self._grow(seq, needed, after=seq.pages[-1])
        return True

    def commit(self, seq: Sequence) -> None:
        """Moves the pages that have filled with known tokens since the last call into the tree.

        A step in flight may still be filling them, but a sequence that finds them there reads them in a later step.
        """
        node = self._nodes[seq.id]
        end = min(seq.num_computed, seq.num_known)
        while (node.depth + 1) * self.page_size <= end:
            node = self._share_page(seq, node)
            if self._states is not None:
                self._states.note_page(seq, node)
        self._nodes[seq.id] = node

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Lets the child continue from the parent's computed tokens: shares full pages, copies a partly filled one.

        False, and no change, if there is no page, or no slot for its state, for the copy.
        """
        node = self._nodes[parent.id]
        partial = parent.num_computed % self.page_size != 0
        if (partial and not self.available) or not (self._states is None or self._states.has_room):
            return False
        self._tree.lock(node)
        self._nodes[child.id] = node
        child.pages = parent.pages[: node.depth]
        if partial:
            self._grow(child, 1, after=None)
            self._copies.append((parent.pages[node.depth], child.pages[-1]))
        child.num_computed = parent.num_computed
        if self._states is not None:
            self._states.fork(parent, child)
        return True

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Page copies requested by forks since the last call; they must run before the next step computes anything."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def take_state_copies(self) -> tuple[tuple[int, int], ...]:
        """The same for states: those of forks, and those that sequences continue from."""
        return () if self._states is None else self._states.take_copies()

    def release(self, seq: Sequence) -> None:
        """Takes back all pages. Those in the tree stay cached, for later requests with the same prefix."""
        node = self._nodes.pop(seq.id)
        own = seq.pages[node.depth :]
        if self._copies:
            self._copies = [copy for copy in self._copies if copy[1] not in own]
        self._allocator.release(own)
        self._tree.unlock(node)
        if self._states is not None:
            self._states.end(seq)
        seq.pages = []
        seq.num_computed = 0

    def park(self, seq: Sequence) -> None:
        """Takes back the pages of a preempted sequence. Where there are lower tiers, its state and its partly filled
        page are kept until others need them: if its full pages can then be fetched, it resumes at the same token.
        """
        node, states, end = self._nodes[seq.id], self._states, seq.num_computed
        page = seq.pages[node.depth] if end % self.page_size else None
        if (
            self._tiers is None
            or states is None
            or seq.request.task is not Task.GENERATE
            or not 0 < end < seq.num_tokens
            or node.depth != min(end, seq.num_known) // self.page_size
            or end > seq.num_known
            or not states.can_park(seq)
            or any(target == page for _, target in self._copies)
        ):
            self.release(seq)
            return
        del self._nodes[seq.id]
        self._allocator.release([each for each in seq.pages[node.depth :] if each != page])
        node.num_parked += 1
        self._tree.unlock(node)
        states.park(seq)
        self._parked[seq.id] = _Parking(node, end, page)
        seq.pages = []
        seq.num_computed = 0

    def unpark(self, seq: Sequence) -> None:
        """The sequence will not resume where it was, if it could."""
        if (parking := self._parked.get(seq.id)) is None:
            return
        assert self._states is not None
        self._leave_parking(seq.id)
        if parking.page is not None:
            self._allocator.release([parking.page])
        self._states.unpark(seq)

    def _leave_parking(self, id: int) -> None:
        node = self._parked.pop(id).node
        node.num_parked -= 1
        self._tree.note_stateless(node)

    def _parked_pages(self) -> list[int]:
        return [parking.page for parking in self._parked.values() if parking.page is not None]

    def _resume(self, tiers: Tiers, states: States, seq: Sequence, parking: _Parking, spare: int) -> Admission | None:
        """Lets a parked sequence go on where it was, once all of that is on the device. None if some of it is lost."""
        parked = states.parked(seq)
        assert parked is not None
        if parked.is_state_arriving:
            return Admission.FETCHING
        depth = parking.end // self.page_size
        matched = self._tree.match(seq.token_ids, limit=depth * self.page_size, salt=self._salt(seq))
        found = tiers.find(matched, seq.token_ids, depth * self.page_size, spilling=True)
        if found is None:
            return Admission.FETCHING
        if parked.is_lost or matched.depth + len(found) < depth:
            return None
        # Its own page is available to others, and counts as allocated here.
        if not self._fits(seq, matched, spare):
            return Admission.NO_ROOM
        if not found and parked.state != NOWHERE:
            self._leave_parking(seq.id)
            self._start(seq, matched, () if parking.page is None else (parking.page,))
            seq.num_computed = parking.end
            states.resume(seq)
            self.has_resumed = True
            return Admission.GRANTED
        copy = None
        if parked.state == NOWHERE:
            parked.is_state_arriving = True
            if (slot := states.reserve(sparing=NOWHERE, gives_up=True)) is None:
                parked.is_state_arriving = False
                return Admission.NO_ROOM
            copy = StateCopy(parked.state_slot, slot)
        held = tiers.hold(matched, found)
        tiers.fetch(matched, held, found, self._allocate(len(found), sparing=seq.id), copy, parked)
        return Admission.FETCHING

    def clear_cache(self) -> None:
        """Forgets every cached prefix that no sequence uses, except on disk."""
        if self._states is not None:
            self._states.forget_all()
        self._allocator.release(self._tree.evict(self._tree.num_evictable, keep=False))
        if self._tiers is not None:
            self._tiers.forget_all()

    def abandon_moves(self) -> None:
        """After a failed step: forgets the pending copies and every cached prefix that no sequence uses."""
        self._copies = []
        if self._states is not None:
            self._states.abandon()
        if self._tiers is not None:
            self._allocator.release(self._tiers.abandon())
        self.clear_cache()

    def _give_up_parked(self, id: int) -> None:
        assert self._states is not None
        [seq] = [each.held.seq for each in self._states.all_parked if each.held.seq.id == id]
        self.unpark(seq)

    def check_integrity(self, live: list[Sequence]) -> None:
        """Asserts that every page is free, in the tree, or owned by one live sequence, and only one of these; and the
        like of slots for states.
        """
        if self._states is not None:
            self._states.check_integrity(live)
        owners: dict[int, str] = {}

        def claim(page: int, owner: str) -> None:
            assert not self._allocator.is_free(page), f"page {page} of {owner} is on the free list"
            assert page not in owners, f"page {page} belongs to {owners[page]} and to {owner}"
            owners[page] = owner

        for page in self._parked_pages():
            claim(page, "a parked sequence")
        if self._states is not None:
            assert {each.held.seq.id for each in self._states.all_parked} == set(self._parked)
        locks: dict[int, int] = {}
        for seq in live:
            node = self._nodes[seq.id]
            path = list(node.path())[::-1]
            assert [each.page for each in path] == seq.pages[: node.depth], f"{seq} does not follow its path"
            for page in seq.pages[node.depth :]:
                claim(page, repr(seq))
            for each in path:
                locks[id(each)] = locks.get(id(each), 0) + 1
        if self._tiers is not None:
            self._tiers.check_integrity()
            for node in self._tiers.locked():
                locks[id(node)] = locks.get(id(node), 0) + 1
            for page in self._tiers.needless():
                claim(page, "a fetch")
        evictable = 0
        for node in self._tree.nodes():
            assert node.locks == locks.get(id(node), 0), f"page {node.page} has {node.locks} locks"
            assert node.num_resident == sum(child.is_resident for child in node.children.values())
            if node.is_resident:
                claim(node.page, "the tree")
                evictable += not node.locks
        assert set(self._nodes) == {seq.id for seq in live}, "a sequence left without releasing its pages"
        assert evictable == self._tree.num_evictable
        assert len(owners) + self._allocator.num_free == self.num_pages, "pages were lost"

    def _next_page(self, seq: Sequence, node: Node, end: int) -> PageName | None:
        start, stop = node.depth * self.page_size, (node.depth + 1) * self.page_size
        return (node.salt, node.page, tuple(seq.token_ids[start:stop])) if stop <= end else None

    def _share_page(self, seq: Sequence, node: Node) -> Node:
        """Moves the sequence's next full page into the tree, below `node`."""
        start = node.depth * self.page_size
        own = seq.pages[node.depth]
        child = self._tree.insert(node, tuple(seq.token_ids[start : start + self.page_size]), own)
        if child.is_arriving:
            # The page was computed before its fetch ended: the fetched copy is not needed.
            child.page, child.is_arriving = own, False
        if child.page != own:
            # Another sequence has computed the same tokens meanwhile: use its page.
            seq.pages[node.depth] = child.page
            self._allocator.release([own])
        self._tree.relock(node, child)
        return child

    def _has_room(self, seq: Sequence, node: Node, hit_limit: int, spare: int) -> bool:
        """Whether there are pages for the sequence after `node`, and `spare` others. Pages being fetched for it already
        count as its own.
        """
        if self.is_moving:
            node = self._tree.match(seq.token_ids, limit=hit_limit, salt=self._salt(seq), arriving=True)
        return self._fits(seq, node, spare)

    def _fits(self, seq: Sequence, node: Node, spare: int) -> bool:
        newly_locked = sum(not each.locks for each in node.path())
        return self.pages_for(seq.num_tokens) - node.depth + spare <= self.available - newly_locked

    def _fetches(self, tiers: Tiers, seq: Sequence, node: Node, limit: int, *, is_turn: bool) -> bool:
        """Whether the sequence has to wait for pages after `node`: some are arriving, or are worth fetching now."""
        found = tiers.find(node, seq.token_ids, limit)
        if found is None:
            return True
        wanted = tiers.worthwhile(found, is_turn=is_turn)
        if not wanted:
            return False
        held = tiers.hold(node, wanted)
        tiers.fetch(node, held, wanted, self._allocate(len(wanted)))
        return True

    def _fetches_state(
        self, tiers: Tiers, states: States, seq: Sequence, matched: Node, limit: int, spare: int, *, is_turn: bool
    ) -> Admission | None:
        """FETCHING if the sequence has to wait for a state, and the pages that lead to it: they are arriving, or worth
        fetching now. NO_ROOM if they are, but the sequence would not fit then; None if there is nothing to wait for.
        """
        found = tiers.find(matched, seq.token_ids, limit)
        if found is None or tiers.is_state_arriving(matched):
            return Admission.FETCHING
        restart = tiers.restart(matched, found, is_turn=is_turn)
        if restart is None:
            return None
        if not self._fits(seq, matched, spare):
            return Admission.NO_ROOM
        held = tiers.hold_restart(matched, restart)
        slot = states.reserve(sparing=deepest(matched).state, gives_up=is_turn)
        if slot is None:
            tiers.let_go(held, restart)
            return None
        pages = self._allocate(len(restart.pages))
        end = matched if restart.pages or restart.node is None else restart.node
        tiers.fetch(end, held, restart.pages, pages, StateCopy(restart.source, slot))
        return Admission.FETCHING

    def _grow(self, seq: Sequence, count: int, *, after: int | None) -> None:
        """Gives the sequence `count` more pages. The caller checks `available`."""
        room = min(self.pages_for(seq.max_len) - len(seq.pages), count + _MOST_ROOM)
        seq.pages += self._allocate(count, after=after, room=room)

    def _allocate(
        self, count: int, *, after: int | None = None, room: int = 0, sparing: int | None = None
    ) -> list[int]:
        """Takes `count` pages, evicting cached ones if need be, or else those of parked sequences but the one to spare:
        what was preempted last first.
        """
        for id in list(self._parked)[::-1]:
            if count <= self._allocator.num_free + self._tree.num_evictable:
                break
            if id != sparing and self._parked[id].page is not None:
                self._give_up_parked(id)
        short = count - self._allocator.num_free
        if short > 0:
            self.num_evicted += short
            self._allocator.release(self._tree.evict(short))
        return self._allocator.allocate(count, after=after, room=room)

    def _salt(self, seq: Sequence) -> Salt:
        request = seq.request
        # Without prefix caching a request still shares pages among its own choices, so it gets a salt of its own.
        if not self.prefix_caching:
            return f"\0request {request.id}"
        return salt_of(request.adapter, request.cache_salt)


def salt_of(adapter: str | None, cache_salt: str = "") -> Salt:
    """With an adapter the same tokens have different keys and values. A pair cannot collide with a caller's salt."""
    return cache_salt if adapter is None else (adapter, cache_salt)
