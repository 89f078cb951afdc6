"""The prefix cache: a tree of computed pages, keyed by the tokens they hold. Knows no sequences and no free list.

    root(salt) ── [t0…t15] page 4 ──┬── [t16…t31] page 9
                                    └── [u16…u31] page 2 ── [u32…u47] page 7

A node is one full page; the path to it spells every token before it. A node is locked while a sequence uses its page,
counted along the whole path, so a locked node's ancestors are locked too. Unlocked leaves are evicted, oldest first.

With a tier below (`engine.tiers`), a node's page and state may have copies in slots there. A node that is evicted then
stays in the tree, stored, if its page has a copy. The ancestors of a resident node are resident:

    root ── resident ── resident ── stored ── stored
            page 4      page 9                            match ends at page 9; two pages can be fetched
                        slot 3      slot 1    slot 8

Where models keep recurrent states too (`engine.states`), a node may carry the state at the end of its page. Hits end
there, so a leaf without one is worth nothing by itself, and is evicted before all others.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

PageKey = tuple[int, ...]
Salt = str | tuple[str, str]
"""Prefixes are shared within a salt, never across salts."""


NOWHERE = -1
"""The page or slot of a node that has none."""


class Node:
    __slots__ = (
        "children",
        "depth",
        "digest",
        "hits",
        "is_arriving",
        "is_state_arriving",
        "key",
        "last_used",
        "locks",
        "num_parked",
        "num_resident",
        "page",
        "parent",
        "salt",
        "slot",
        "state",
        "state_slot",
        "states_below",
    )

    def __init__(self, parent: "Node | None", key: PageKey, page: int, salt: Salt) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        """The node's page; NOWHERE if it is not resident."""
        self.slot = NOWHERE
        """The slot of its copy in the tier below; NOWHERE if it has none."""
        self.state = NOWHERE
        """The slot of the recurrent state at the end of the page; NOWHERE if none is kept."""
        self.state_slot = NOWHERE
        """The slot of that state's copy in the tier below; NOWHERE if it has none."""
        self.hits = 0
        """How often sequences have continued from its state."""
        self.states_below = False
        """Whether pages that follow it, and lead to a state, have been written to disk."""
        self.is_arriving = False
        """Whether its page is still being fetched: nobody may read it."""
        self.is_state_arriving = False
        """The same for its state, which then has no slot on the device yet that others know of."""
        self.digest: bytes | None = None
        """Digest of the tokens on the path, once `engine.tiers` has computed it; empty if they must not get to disk."""
        self.salt = salt
        self.depth: int = parent.depth + 1 if parent else 0
        """Pages on the path from the root, including this one; the root itself holds none."""
        self.children: dict[PageKey, Node] = {}
        self.num_resident = 0
        """Number of resident children."""
        self.num_parked = 0
        """Number of preempted sequences that can resume behind its page: their states count as one at the node."""
        self.locks = 0
        self.last_used = 0

    @property
    def is_resident(self) -> bool:
        return self.page != NOWHERE

    def path(self) -> "Iterator[Node]":
        """The node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class LowerTier(Protocol):
    """The tier below the tree: what the tree notifies it of."""

    def demote(self, node: Node) -> None:
        """The node's page is about to be evicted, and its state with it: gives the node slots, if there are any."""

    def forget(self, node: Node) -> None:
        """The node has left the tree: takes back its slots, if it has any."""

    def note_childless(self, node: Node) -> None:
        """The last child of the node has left the tree."""


class Snapshots(Protocol):
    """What keeps states at nodes: what the tree notifies it of."""

    def lose(self, node: Node) -> None:
        """The node's page is about to leave the tree: takes back its state."""


class RadixCache:
    def __init__(self, page_size: int, below: LowerTier | None = None, snapshots: Snapshots | None = None) -> None:
        self.page_size = page_size
        self.num_pages = 0
        """Pages of resident nodes."""
        self.num_evictable = 0
        """Pages of unlocked nodes. All of them can be evicted, leaves first: none has a locked node below it."""
        self._below = below
        self._snapshots = snapshots
        self._roots: dict[Salt, Node] = {}
        self._clock = 0
        # (last used, tie-breaker, node) of unlocked resident nodes without resident children; an entry is stale once
        # its node has been used again.
        self._oldest: list[tuple[int, int, Node]] = []
        # The same for those that lack a state where states are kept.
        self._stateless: list[tuple[int, int, Node]] = []
        self._pushes = 0

    def match(self, token_ids: Sequence[int], *, limit: int, salt: Salt = "", arriving: bool = False) -> Node:
        """The deepest resident node whose path spells a prefix of `token_ids`, at most `limit` tokens of it. Pages that
        are `arriving` count only if asked for.

        Does not change the tree: lock the node before you use its pages.
        """
        node = self._roots.get(salt) or Node(None, (), NOWHERE, salt)
        size = self.page_size
        for start in range(0, limit - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None or child.page == NOWHERE or (child.is_arriving and not arriving):
                break
            node = child
        return node

    def insert(self, parent: Node, key: PageKey, page: int) -> Node:
        """The child of `parent` that holds `key`: the one already there, else a new one that owns `page`. A child that
        was stored gets the page.
        """
        assert len(key) == self.page_size
        if parent.depth == 0:
            # A match that finds nothing returns a detached root; the first insertion below one attaches it.
            parent = self._roots.setdefault(parent.salt, parent)
        child = parent.children.get(key)
        if child is None:
            child = parent.children[key] = Node(parent, key, NOWHERE, parent.salt)
        if child.page == NOWHERE:
            child.page = page
            parent.num_resident += 1
            self.num_pages += 1
            if not child.locks:
                self.num_evictable += 1
        return child

    def lock(self, node: Node, *, is_use: bool = True) -> None:
        """Keeps the node and its path from eviction, in this tier and below. Counts as a use of the path only if it
        `is_use`.
        """
        self._clock += 1
        for each in node.path():
            if is_use:
                each.last_used = self._clock
            if not each.locks and each.page != NOWHERE:
                self.num_evictable -= 1
            each.locks += 1

    def unlock(self, node: Node, *, is_use: bool = True) -> None:
        self._clock += 1
        for each in node.path():
            if is_use:
                each.last_used = self._clock
            each.locks -= 1
            if not each.locks and each.page != NOWHERE:
                self.num_evictable += 1
        # Where the path ends in lower tiers, its last resident page may be the next to go.
        while node.page == NOWHERE and node.parent is not None:
            node = node.parent
        self._nominate(node)

    def relock(self, node: Node, child: Node) -> None:
        """Moves one lock from a node down to its child; the locks above the child stay as they are."""
        if not child.locks:
            self.num_evictable -= 1
        child.locks += 1

    def evict(self, count: int, *, keep: bool = True) -> list[int]:
        """Drops the `count` least recently used pages that are not locked, leaves first; returns them. With `keep`,
        the tier below may store them first.
        """
        pages: list[int] = []
        while len(pages) < count:
            last_used, _, node = heapq.heappop(self._stateless or self._oldest)
            if not self._is_leaf(node) or node.last_used != last_used:
                continue
            if keep and self._below is not None:
                self._below.demote(node)
            pages.append(node.page)
            self._leave(node)
        return pages

    def discard(self, node: Node) -> None:
        """Removes a node that is not resident, with all below it."""
        parent, doomed = node.parent, [node]
        assert parent is not None
        del parent.children[node.key]
        while doomed:
            each = doomed.pop()
            assert not each.locks, "a node in use must not leave the tree"
            assert not each.is_resident, "a resident node must not leave the tree"
            each.parent = None
            if self._below is not None:
                self._below.forget(each)
            doomed += each.children.values()
        if parent.parent is None:
            if not parent.children:
                self._roots.pop(parent.salt, None)
        elif not parent.children and self._below is not None:
            self._below.note_childless(parent)

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def note_stateless(self, node: Node) -> None:
        """The node has lost its state."""
        self._nominate(node)

    def drop_page(self, node: Node) -> int:
        """Takes the page of an unlocked leaf out of the tree, and the node as well unless it has a copy below."""
        assert self._is_leaf(node)
        page = node.page
        self._leave(node)
        return page

    def _leave(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        node.page = NOWHERE
        if node.state != NOWHERE and self._snapshots is not None:
            self._snapshots.lose(node)
        parent.num_resident -= 1
        self.num_pages -= 1
        self.num_evictable -= 1
        if node.slot == NOWHERE:
            self.discard(node)
        self._nominate(parent)

    def _is_leaf(self, node: Node) -> bool:
        """Whether it is unlocked and has no resident children, so that its page can be evicted."""
        return node.page != NOWHERE and not node.locks and not node.num_resident and node.parent is not None

    def _nominate(self, node: Node) -> None:
        """Makes the node a candidate for eviction if it is an unlocked leaf."""
        if not self._is_leaf(node):
            return
        is_behind_states = self._snapshots is not None and node.state == NOWHERE and not node.num_parked
        entries = self._stateless if is_behind_states else self._oldest
        if len(entries) > 2 * self.num_pages + 64:
            entries[:] = [entry for entry in entries if entry[2].parent and entry[0] == entry[2].last_used]
            heapq.heapify(entries)
        self._pushes += 1
        heapq.heappush(entries, (node.last_used, self._pushes, node))
