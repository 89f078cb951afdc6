"""The tiers below the device's pages: slots of host memory in the tree, and pages on disk by their digests. Decides
what is stored, spilled and fetched; `engine.page_store` carries it out. Knows no tensors and no files.

    page ──evicted──> slot ──oldest──> disk          demote: copies are made when room is needed, never before
    page <──────────fetched──────────┘               fetch: while its request waits; the copies below stay

A page that was fetched keeps its slot, so that it can be evicted again without a copy. Slots are given up oldest first,
leaves before their parents, because nobody finds a page whose ancestors are gone. On disk there is no tree: a page is
found by a digest of the model and of every token up to its end, also after a restart.

Where engines share pages, a prefix is offered to the others, who then find it as if it were on their own disk. Its path
is locked meanwhile, so that its pages stay what they are.

Where models keep recurrent states, pages are of use up to a state only. A snapshot is stored too when its page is
evicted or its slot is given up, if that is worth its room (`engine.state_slots`), pages are stored if they lead to one,
and what is fetched or offered ends at one. Its digest is that of its page with a prefix.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice, takewhile
from typing import NamedTuple

from ostro.engine.costs import FetchCosts
from ostro.engine.counters import Counters
from ostro.engine.page_store import (
    Arrival,
    Fetch,
    Move,
    Offer,
    PageStore,
    Source,
    Spill,
    SpillState,
    StateCopy,
    StateOffer,
    Store,
    StoreState,
)
from ostro.engine.radix import NOWHERE, Node, PageKey, RadixCache, Salt
from ostro.engine.state_slots import HITS_FOR_DISK, HITS_FOR_HOST, Kept, StateSlots, is_worth_room
from ostro.engine.states import Parked, States, deepest

DIGEST_BYTES = 32
# The digest of a node whose tokens must not be written to disk.
_NOT_ON_DISK = b""
# Distinguishes the digest of a state from that of the page that it follows, which no page's tokens begin with.
_STATE = b"state after "


class Below(NamedTuple):
    """The next page of a prefix, in a lower tier."""

    key: PageKey
    source: Source


class Restart(NamedTuple):
    """A state in a lower tier that a sequence can continue from."""

    pages: Sequence[Below]
    """The pages that lead there and are in lower tiers too."""
    source: Source
    node: Node | None
    """Its node, if that is in the tree."""

    depth: int
    """Pages up to it, from the first on."""

    @property
    def num_slots(self) -> int:
        """How many of the pages are in slots."""
        return sum(isinstance(source, int) for _, source in self.pages)


class _Fetching(NamedTuple):
    end: Node
    """The last node, which is locked, and with it the others."""
    nodes: tuple[Node, ...]
    """Nodes whose pages are fetched, topmost first."""
    pages: tuple[int, ...]
    """Where they arrive: in the nodes' pages, unless a sequence computes one sooner and gives its node another."""
    num_slots: int
    """How many of the pages come from slots."""
    state: StateCopy | None = None
    """The state of the last node, or of a parked sequence, if that is fetched."""
    parked: Parked | None = None


class _Offering(NamedTuple):
    node: Node
    """The end of the offered path, which is locked."""
    nodes: tuple[Node, ...]
    """Nodes on the path whose pages are being written, topmost first."""
    has_state: bool
    """Whether the end's state is being written behind them."""
    done: Callable[[int], None]


class Tiers:
    def __init__(
        self,
        store: PageStore,
        *,
        costs: FetchCosts | None = None,
        root: Callable[[Salt], bytes | None] = lambda salt: None,
        pages_per_state: int = 1,
    ) -> None:
        """`root` gives the digest from which a salt's pages on disk are derived; None if they must not get there.
        `pages_per_state` is how many pages take as much room as a recurrent state.
        """
        self.store = store
        self._states: States | None = None
        self._state_slots = StateSlots(store.num_state_slots)
        self._pages_per_state = pages_per_state
        self.costs = costs or FetchCosts()
        self.counters = Counters()
        self._root = root
        self._free = list(range(store.num_slots))[::-1]
        # (last used, tie-breaker, node) of nodes that may lose their slot; checked when one is needed.
        self._oldest: list[tuple[int, int, Node]] = []
        self._pushes = 0
        self._moves: list[Move] = []
        # Digests of pages that these moves write to disk.
        self._spilling: set[bytes] = set()
        self._fetching: dict[int, _Fetching] = {}
        self._offering: dict[int, _Offering] = {}
        # Leaves whose paths are still to be offered, one at a time; whether one is in flight; whom to tell at the end.
        self._hot: deque[Node] = deque()
        self._is_offering_hot = False
        self._hot_offered: list[Callable[[], None]] = []
        self._next_ticket = 0
        self._is_closed = False

    @property
    def num_slots_used(self) -> int:
        return self.store.num_slots - len(self._free)

    @property
    def is_empty(self) -> bool:
        return not (self.num_slots_used or self.store.on_disk or self.store.num_shared)

    @property
    def is_moving(self) -> bool:
        """Whether pages are being fetched or offered: they are locked until that has ended."""
        return bool(self._fetching or self._offering or self._hot)

    def carry_out(self) -> None:
        """Begins the moves that were decided since the last call. Call it before the next step is launched."""
        self._offer_hot()
        # Taken before they begin: after a failure `abandon` asks the store which fetches have begun.
        moves, self._moves = self._moves, []
        self._spilling.clear()
        if moves:
            self.store.carry_out(moves)

    # ---- down: called by the tree, and by `engine.states`

    def demote(self, node: Node) -> None:
        leads = node.children or node.states_below or node.num_parked
        if self._states is not None and not (self.demote_state(node) or leads):
            # Nobody finds a page that leads to no state.
            return
        if node.slot != NOWHERE:
            self._nominate(node)
            return
        if not self.store.num_slots:
            self._spill(node)
            return
        slot = self._free.pop() if self._free else self._oldest_slot()
        if slot is not None:
            node.slot = slot
            self._moves.append(Store(node.page, slot))
            self.counters.stored_pages += 1
            self._nominate(node)

    def demote_state(self, node: Node) -> bool:
        """Whether lower tiers have the node's state: they get it now, if it has been hit."""
        if node.state_slot != NOWHERE:
            return True
        digest = self._state_digest(self._digest(node))
        if digest is not None and self.store.holds_state(digest):
            return True
        if node.state == NOWHERE:
            return False
        if self._state_slots.num_slots:
            return is_worth_room(node, HITS_FOR_HOST) and self._store_state(node)
        return is_worth_room(node, HITS_FOR_DISK) and self._spill_state(node)

    def _store_state(self, node: Node) -> bool:
        if not self._take_state_slot(node):
            return False
        self._moves.append(StoreState(node.state, node.state_slot))
        self.counters.stored_states += 1
        return True

    def demote_parked(self, parked: Parked) -> None:
        if self._take_state_slot(parked):
            self._moves.append(StoreState(parked.state, parked.state_slot))
            self.counters.stored_states += 1

    def forget_parked(self, parked: Parked) -> None:
        self._state_slots.forget(parked)

    def _take_state_slot(self, kept: Kept) -> bool:
        """Whether there is a slot for the state now."""
        lost = self._state_slots.take(kept)
        if lost is not None and isinstance(lost[0], Node) and is_worth_room(lost[0], HITS_FOR_DISK):
            self._spill_state(lost[0], lost[1])
        return kept.state_slot != NOWHERE

    def _spill_state(self, node: Node, slot: int | None = None) -> bool:
        digest = self._state_digest(self._digest(node)) if self.store.has_disk else None
        if digest is None:
            return False
        if not self.store.holds_state(digest):
            self._moves.append(SpillState(digest, slot=slot) if slot is not None else SpillState(digest, node.state))
            self.counters.spilled_states += 1
        return True

    def forget(self, node: Node) -> None:
        if node.slot != NOWHERE:
            self._free.append(node.slot)
            node.slot = NOWHERE
        self._state_slots.forget(node)

    def note_childless(self, node: Node) -> None:
        self._nominate(node)

    def _oldest_slot(self) -> int | None:
        """Takes the slot of the least recently used node that can do without; None if there is none."""
        while self._oldest:
            last_used, _, node = heapq.heappop(self._oldest)
            if node.slot == NOWHERE or node.parent is None or not self._can_lose_slot(node):
                continue
            if node.last_used != last_used:
                self._nominate(node)
                continue
            slot, node.slot = node.slot, NOWHERE
            if not node.is_resident:
                if self._is_of_use_on_disk(node):
                    self._spill(node, slot)
                self._tree.discard(node)
            return slot
        return None

    def _is_of_use_on_disk(self, node: Node) -> bool:
        """Whether the page leads to a state there: perhaps its own, which goes there now if it has been hit enough."""
        if self._states is None or node.states_below or node.num_parked:
            return True
        if self._state_on_disk(self._digest(node)) is not None:
            return True
        is_wanted = node.state_slot != NOWHERE and is_worth_room(node, HITS_FOR_DISK)
        return is_wanted and self._spill_state(node, node.state_slot)

    def _can_lose_slot(self, node: Node) -> bool:
        """Not while a fetch reads the slot; and a node that is not resident leaves the tree with its slot, so its
        children must leave first.
        """
        return not node.is_arriving if node.is_resident else not node.locks and not node.children

    def _nominate(self, node: Node) -> None:
        if node.slot == NOWHERE:
            return
        if len(self._oldest) > 2 * self.store.num_slots + 64:
            nodes = {id(node): node for *_, node in self._oldest if node.slot != NOWHERE}
            self._oldest = [(node.last_used, at, node) for at, node in enumerate(nodes.values())]
            heapq.heapify(self._oldest)
        self._pushes += 1
        heapq.heappush(self._oldest, (node.last_used, self._pushes, node))

    def _spill(self, node: Node, slot: int | None = None) -> None:
        digest = self._digest(node) if self.store.has_disk else None
        if digest is None:
            return
        if node.parent is not None:
            node.parent.states_below = self._states is not None
        if not self.store.holds(digest):
            self._moves.append(Spill(digest, slot=slot) if slot is not None else Spill(digest, page=node.page))
            self._spilling.add(digest)
            self.counters.spilled_pages += 1

    # ---- up

    def attach(self, tree: RadixCache, states: States | None = None) -> None:
        self._tree, self._states = tree, states

    def find(self, node: Node, token_ids: Sequence[int], limit: int, *, spilling: bool = False) -> list[Below] | None:
        """What lower tiers hold after a node, within `limit` tokens; with `spilling` also what is about to be written
        to disk. None if some of it is arriving already.
        """
        found: list[Below] = []
        size = self._tree.page_size
        at: Node | None = node
        digest: bytes | None = None
        for start in range(node.depth * size, limit - size + 1, size):
            key = tuple(token_ids[start : start + size])
            above, at = at, None if at is None else at.children.get(key)
            if at is not None:
                if at.is_arriving:
                    return None
                found.append(Below(key, at.slot))
                continue
            digest = self._next(self._digest(above) if above is not None else digest, key)
            if digest is None or not (self.store.holds(digest) or (spilling and digest in self._spilling)):
                break
            found.append(Below(key, digest))
        return found

    def worthwhile(self, found: Sequence[Below], *, is_turn: bool) -> Sequence[Below]:
        """The part that is quicker to fetch than to compute: all, the pages in slots, or nothing. `is_turn` if it would
        otherwise be computed now.
        """
        num_slots = sum(isinstance(source, int) for _, source in found)
        num_disk, size = len(found) - num_slots, self._tree.page_size
        if num_slots and not self.costs.pays(num_slots, num_slots * size, disk=False, is_turn=is_turn):
            return ()
        if num_disk and not self.costs.pays(num_disk, num_disk * size, disk=True, is_turn=is_turn):
            return found[:num_slots]
        return found

    def restarts(self, node: Node, found: Sequence[Below]) -> Iterator[Restart]:
        """States in lower tiers deeper than any that a node's path has on the device, the deepest first. `found` is
        what `find` returned for the node.
        """
        nodes: list[Node | None] = []
        at: Node | None = node
        for key, _ in found:
            at = None if at is None else at.children.get(key)
            nodes.append(at)
        for num_pages in range(len(found), 0, -1):
            end, last = nodes[num_pages - 1], found[num_pages - 1].source
            source = self._state_on_disk(last) if end is None else self._state_below(end)
            if source is not None:
                yield Restart(found[:num_pages], source, end, node.depth + num_pages)
        for end in node.path():
            if end.state != NOWHERE:
                break
            if (source := self._state_below(end)) is not None:
                yield Restart((), source, end, end.depth)

    def is_state_arriving(self, node: Node) -> bool:
        """Whether a state is arriving deeper than any that the node's path has on the device."""
        ends = takewhile(lambda each: each.state == NOWHERE, node.path())
        return any(end.is_state_arriving for end in ends)

    def restart(self, node: Node, found: Sequence[Below], *, is_turn: bool) -> Restart | None:
        """The deepest state that is quicker to fetch, with what leads there, than its tokens are to compute."""
        start, size = deepest(node).depth, self._tree.page_size
        tried = set[bool]()
        for each in self.restarts(node, found):
            # The deepest of all, then the deepest that takes no disk.
            from_disk = each.num_slots < len(each.pages) or not isinstance(each.source, int)
            if from_disk and tried:
                continue
            num_disk = len(each.pages) - each.num_slots + (0 if isinstance(each.source, int) else self._pages_per_state)
            num_host = each.num_slots + (self._pages_per_state if isinstance(each.source, int) else 0)
            tokens = (each.depth - start) * size
            total = num_disk + num_host
            if all(
                self.costs.pays(count, tokens * count // total, disk=disk, is_turn=is_turn)
                for count, disk in ((num_host, False), (num_disk, True))
                if count
            ):
                return each
            if not from_disk:
                return None
            tried.add(from_disk)
        return None

    def _state_below(self, node: Node) -> Source | None:
        return node.state_slot if node.state_slot != NOWHERE else self._state_on_disk(self._digest(node))

    def _state_on_disk(self, digest: Source | None) -> bytes | None:
        """The digest of the state behind a page on disk, if it is there too."""
        found = self._state_digest(digest) if isinstance(digest, bytes) else None
        return found if found is not None and self.store.holds_state(found) else None

    def hold(self, node: Node, found: Sequence[Below]) -> Node:
        """Locks a node and those stored below it, so that making room for their pages does not cost their slots."""
        for key, source in found:
            if not isinstance(source, int):
                break
            node = node.children[key]
        self._tree.lock(node)
        return node

    def hold_restart(self, node: Node, restart: Restart) -> Node:
        """The same for a state, and for what leads to it from `node`."""
        if restart.node is not None:
            restart.node.is_state_arriving = True
        return self.hold(node, restart.pages)

    def let_go(self, held: Node, restart: Restart) -> None:
        """Ends what `hold_restart` began: nothing is fetched."""
        if restart.node is not None:
            restart.node.is_state_arriving = False
        self._tree.unlock(held, is_use=False)

    def fetch(
        self,
        node: Node,
        held: Node,
        found: Sequence[Below],
        pages: Sequence[int],
        state: StateCopy | None = None,
        parked: Parked | None = None,
    ) -> None:
        """Begins to fetch what was found below `node` into pages; `held` is what `hold` returned for it. A state is
        that of the last page, or of the node itself if there are none; or that of a `parked` sequence.
        """
        nodes: list[Node] = []
        for (key, _), page in zip(found, pages, strict=True):
            node = self._tree.insert(node, key, page)
            node.is_arriving = True
            nodes.append(node)
        self._tree.lock(node)
        self._tree.unlock(held)
        self._next_ticket += 1
        sources = tuple(source for _, source in found)
        num_slots = sum(isinstance(source, int) for source in sources)
        if parked is not None:
            parked.is_state_arriving = state is not None
        elif state is not None:
            node.is_state_arriving = True
            if node.state_slot != NOWHERE:
                self._state_slots.note_use(node)
        self._fetching[self._next_ticket] = _Fetching(node, tuple(nodes), tuple(pages), num_slots, state, parked)
        self._moves.append(Fetch(self._next_ticket, sources, tuple(pages), state))

    def take(self, arrival: Arrival) -> list[int]:
        """Makes the pages that have arrived available. Returns the others, which are free again."""
        if (offering := self._offering.pop(arrival.ticket, None)) is not None:
            self._end_offer(offering, arrival)
        if arrival.ticket not in self._fetching:
            return []
        end, nodes, pages, num_slots, state, parked = self._fetching.pop(arrival.ticket)
        from_host, from_disk = min(arrival.num_good, num_slots), max(0, arrival.num_good - num_slots)
        self.counters.fetched_pages += from_host
        self.counters.fetched_disk_pages += from_disk
        self.counters.lost_pages += arrival.num_damaged
        self.counters.fetch_seconds += arrival.seconds
        if state is not None and arrival.has_state:
            self.counters.fetched_states += 1
            if isinstance(state.source, int):
                from_host += self._pages_per_state
            else:
                from_disk += self._pages_per_state
        self.costs.note_fetch(from_host, arrival.seconds - arrival.disk_seconds, disk=False)
        self.costs.note_fetch(from_disk, arrival.disk_seconds, disk=True)
        if state is not None and parked is not None and self._states is not None:
            parked.is_state_arriving = False
            self._states.arrive_parked(parked, state.state, is_good=arrival.has_state)
        elif state is not None and self._states is not None:
            end.is_state_arriving = False
            self._states.arrive(end, state.state, is_good=arrival.has_state)
        # Once the state is there: pages without one behind them are the first to go.
        self._tree.unlock(end)
        free: list[int] = []
        for at in reversed(range(len(nodes))):
            node, page = nodes[at], pages[at]
            if node.page != page:
                free.append(page)
            elif at < arrival.num_good:
                node.is_arriving = False
            else:
                node.is_arriving = False
                self.forget(node)
                free.append(self._tree.drop_page(node))
            self._nominate(node)
        return free

    # ---- to other engines

    def offer(self, node: Node, done: Callable[[int], None]) -> None:
        """Shares the pages on the path to a resident node with other engines, and its state, if it has one. `done` is
        told, now or later, how many of them others find, from the first on: with a state all or none.
        """
        if not self.store.shares or self._digest(node) is None:
            done(0)
            return
        fresh = [each for each in node.path() if not self.store.is_shared(self._public_digest(each))][::-1]
        state = self._state_digest(self._digest(node)) if node.state != NOWHERE else None
        offered = None if state is None or self.store.is_state_shared(state) else StateOffer(state, node.state)
        if not fresh and offered is None:
            done(node.depth)
            return
        self._tree.lock(node, is_use=False)
        self._next_ticket += 1
        self._offering[self._next_ticket] = _Offering(node, tuple(fresh), offered is not None, done)
        digests = tuple(self._public_digest(each) for each in fresh)
        self._moves.append(Offer(self._next_ticket, digests, tuple(each.page for each in fresh), offered))

    def offer_all(self, done: Callable[[], None]) -> None:
        """Shares all that the device holds with other engines, path by path, the most recently used first. Calls
        `done`, now or later, when there is no more to share.
        """
        leaves = (node for node in self._tree.nodes() if node.is_resident and not node.num_resident)
        self._hot = deque(sorted(leaves, key=lambda node: -node.last_used)) if self.store.shares else deque()
        self._hot_offered.append(done)
        self._offer_hot()

    def _offer_hot(self) -> None:
        """Offers the next hot path, unless one is in flight: offered paths are locked, so only one at a time."""
        while self._hot and not self._is_offering_hot:
            node = self._hot.popleft()
            if self._states is not None:
                node = deepest(node)
            if node.is_resident and not any(each.is_arriving for each in node.path()):
                self._is_offering_hot = True
                self.offer(node, self._end_hot)
        if not self._hot and not self._is_offering_hot:
            offered, self._hot_offered = self._hot_offered, []
            for done in offered:
                done()

    def _end_hot(self, num_pages: int) -> None:
        self._is_offering_hot = False
        if not self._hot:
            self._offer_hot()

    def _end_offer(self, offering: _Offering, arrival: Arrival) -> None:
        node, nodes, has_state, done = offering
        num_good = arrival.num_good
        self._tree.unlock(node, is_use=False)
        self.counters.offered_pages += num_good
        if self._states is not None:
            done(node.depth if num_good == len(nodes) and arrival.has_state == has_state else 0)
        else:
            done(node.depth if num_good == len(nodes) else nodes[num_good].depth - 1)

    def _public_digest(self, node: Node) -> bytes:
        digest = self._digest(node)
        assert digest is not None, "a private salt's pages are never shared"
        return digest

    # ---- digests

    def _digest(self, node: Node) -> bytes | None:
        """Digest of all tokens on the path; None if they must not be written to disk."""
        if node.digest is None:
            unknown = [node]
            while (above := unknown[-1].parent) is not None and above.digest is None:
                unknown.append(above)
            for each in reversed(unknown):
                found = self._root(each.salt) if each.parent is None else self._next(each.parent.digest, each.key)
                each.digest = found or _NOT_ON_DISK
        return node.digest or None

    def _next(self, digest: bytes | None, key: PageKey) -> bytes | None:
        """Digest of a page that follows the path with this digest."""
        return blake2b(digest + array("q", key).tobytes(), digest_size=DIGEST_BYTES).digest() if digest else None

    def _state_digest(self, digest: bytes | None) -> bytes | None:
        """That of the state behind a page."""
        return blake2b(_STATE + digest, digest_size=DIGEST_BYTES).digest() if digest else None

    # ---- the rest

    def abandon(self) -> list[int]:
        """Drops the moves that were not carried out, after a failure. Returns pages that nothing will arrive in. Copies
        that were not made count as made: forget them all.
        """
        self._moves = []
        self._spilling.clear()
        self._hot.clear()
        ended = sorted((self._fetching.keys() | self._offering.keys()) - set(self.store.under_way))
        return [page for ticket in ended for page in self.take(Arrival(ticket, 0, 0.0))]

    def forget_all(self) -> None:
        """Forgets every copy in a slot that no fetch needs, without spilling it."""
        for node in list(self._tree.nodes()):
            if node.is_resident and not (node.is_arriving or node.is_state_arriving):
                self.forget(node)
        # Nodes that are not resident form subtrees below resident ones; those that a fetch needs are resident.
        for node in [each for each in self._tree.nodes() if not each.is_resident]:
            if node.parent is not None:
                self._tree.discard(node)

    def close(self) -> None:
        """Ends the tiers, and has what they and the device hold written to disk if that outlives the engine. Does
        nothing the second time.
        """
        if self._is_closed:
            return
        self._is_closed = True
        # The last step's forks may have evicted pages: slots do not hold yet what their nodes say.
        self.carry_out()
        self.store.close(list(self._hot_records()))

    def _hot_records(self) -> Iterator[Spill | SpillState]:
        """What is worth finding after a restart, most recently used first: all pages; or those that lead to a state,
        with the states that have been hit or end a path.
        """
        leading = None if self._states is None else self._leading_to_states()
        for node in sorted(self._tree.nodes(), key=lambda node: (-node.last_used, node.depth)):
            if node.is_arriving or (digest := self._digest(node)) is None:
                continue
            if leading is None or id(node) in leading:
                yield Spill(digest, page=node.page) if node.is_resident else Spill(digest, slot=node.slot)
            if leading is None or not (node.hits >= HITS_FOR_HOST or leading.get(id(node))):
                continue
            if (state := self._state_digest(digest)) is not None and node.state != NOWHERE:
                yield SpillState(state, node.state)
            elif state is not None and node.state_slot != NOWHERE:
                yield SpillState(state, slot=node.state_slot)

    def _leading_to_states(self) -> dict[int, bool]:
        """Nodes on paths to states, by id, and whether each is the last of them on its path."""
        leading: dict[int, bool] = {}
        for node in self._tree.nodes():
            if node.state != NOWHERE or node.state_slot != NOWHERE:
                leading.setdefault(id(node), True)
                for above in islice(node.path(), 1, None):
                    leading[id(above)] = False
        return leading

    def locked(self) -> Iterator[Node]:
        """Nodes that fetches and offers lock, each as often as it is locked."""
        for fetching in self._fetching.values():
            yield from fetching.end.path()
        for offering in self._offering.values():
            yield from offering.node.path()

    def needless(self) -> Iterator[int]:
        """Pages being fetched for nodes that have got other pages meanwhile."""
        for fetching in self._fetching.values():
            pages = zip(fetching.nodes, fetching.pages, strict=True)
            yield from (page for node, page in pages if node.page != page)

    def check_integrity(self) -> None:
        """Asserts that every slot is free or belongs to one node, and that each node has a place."""
        owners: dict[int, Node] = {}
        arriving = {
            id(node)
            for fetching in self._fetching.values()
            for node, page in zip(fetching.nodes, fetching.pages, strict=True)
            if node.page == page
        }
        for node in self._tree.nodes():
            assert node.is_resident or node.slot != NOWHERE, "a node has neither a page nor a slot"
            assert node.parent is None or node.parent.depth == 0 or node.parent.is_resident or not node.is_resident
            assert node.is_arriving == (id(node) in arriving)
            if node.slot != NOWHERE:
                assert node.slot not in owners, f"slot {node.slot} belongs to two nodes"
                owners[node.slot] = node
        kept: list[Kept] = [*self._tree.nodes(), *(() if self._states is None else self._states.all_parked)]
        # Those that ended while their state was being fetched.
        kept += [each.parked for each in self._fetching.values() if each.parked is not None]
        self._state_slots.check_integrity({each.state_slot: each for each in kept if each.state_slot != NOWHERE})
        fetching = [each for each in self._fetching.values() if each.state is not None]
        ends = {id(each.end) for each in fetching if each.parked is None}
        assert ends == {id(each) for each in self._tree.nodes() if each.is_state_arriving}
        assert not set(self._free) & owners.keys(), "a slot in use is free"
        assert len(self._free) + len(owners) == self.store.num_slots, "slots were lost"
