"""The memory of computed keys and values: joins free pages and the prefix cache. Knows no schedule and no tensors.

A sequence's page table is a path in the tree, then pages of its own:

    seq.pages   [ 4  9  2 | 31 32 ]
                  └ tree ┘  └ its own: not full yet, or not computed yet

A page that fills moves into the tree. So every page is free, in the tree, or owned by exactly one sequence, and no page
needs a reference count.
"""

from dataclasses import dataclass

from ostro.engine.pages import PageAllocator
from ostro.engine.radix import Node, RadixCache
from ostro.engine.sequence import Sequence

# Most pages of room asked for beyond the prompt: a max_tokens of 100,000 should not claim the pool.
_MOST_ROOM = 64


@dataclass(frozen=True, slots=True)
class KVUsage:
    total: int
    free: int
    cached: int
    """Pages in the tree that nobody uses: a prefix hit for someone, or room for anyone."""
    in_use: int


class KVCache:
    def __init__(self, *, num_pages: int, page_size: int, prefix_caching: bool = True) -> None:
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixCache(page_size)
        self._nodes: dict[int, Node] = {}
        self._copies: list[tuple[int, int]] = []

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a sequence."""
        return self._allocator.num_free + self._tree.num_evictable

    @property
    def usage(self) -> KVUsage:
        total, free, cached = self.num_pages, self._allocator.num_free, self._tree.num_evictable
        return KVUsage(total=total, free=free, cached=cached, in_use=total - free - cached)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def admit(self, seq: Sequence, *, hit_limit: int, spare: int = 0) -> bool:
        """Gives the sequence the longest cached prefix within `hit_limit` tokens, and pages for its other tokens.

        Changes nothing and returns False if that would leave fewer than `spare` pages available.
        """
        assert not seq.pages, f"{seq} is admitted already"
        node = self._tree.match(seq.token_ids, limit=hit_limit, salt=self._salt(seq))
        needed = self.pages_for(seq.num_tokens) - node.depth
        newly_locked = sum(not each.locks for each in node.path())
        if needed + spare > self.available - newly_locked:
            return False
        self._tree.lock(node)
        self._nodes[seq.id] = node
        shared = [each.page for each in node.path()][::-1]
        room = min(self.pages_for(seq.max_len) - node.depth, needed + _MOST_ROOM)
        seq.pages = shared + self._take(needed, after=None, room=room)
        seq.num_computed = node.depth * self.page_size
        return True

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Makes sure of pages for the first `num_tokens` tokens. False, and no change, if there are too few."""
        needed = self.pages_for(num_tokens) - len(seq.pages)
        if needed <= 0:
            return True
        if needed > self.available:
            return False
        seq.pages += self._take(needed, after=seq.pages[-1], room=needed)
        return True

    def commit(self, seq: Sequence) -> None:
        """Moves the pages that have filled since the last call into the tree."""
        node = self._nodes[seq.id]
        while (node.depth + 1) * self.page_size <= seq.num_computed:
            node = self._share_page(seq, node)
        self._nodes[seq.id] = node

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Lets the child go on from the parent's computed tokens: full pages shared, a partly filled one copied.

        False, and no change, if there is no page for the copy.
        """
        node = self._nodes[parent.id]
        partial = parent.num_computed % self.page_size != 0
        if partial and not self.available:
            return False
        self._tree.lock(node)
        self._nodes[child.id] = node
        child.pages = parent.pages[: node.depth]
        if partial:
            room = self.pages_for(child.max_len) - node.depth
            child.pages += self._take(1, after=None, room=min(room, _MOST_ROOM))
            self._copies.append((parent.pages[node.depth], child.pages[-1]))
        child.num_computed = parent.num_computed
        return True

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The page copies that forks asked for since the last call; they must happen before the next computation."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def release(self, seq: Sequence) -> None:
        """Takes everything back. What is in the tree stays there, for the next request that starts alike."""
        node = self._nodes.pop(seq.id)
        own = seq.pages[node.depth :]
        if self._copies:
            self._copies = [copy for copy in self._copies if copy[1] not in own]
        self._allocator.release(own)
        self._tree.unlock(node)
        seq.pages = []
        seq.num_computed = 0

    def clear_cache(self) -> None:
        """Forgets every cached prefix that nobody uses."""
        self._allocator.release(self._tree.evict(self._tree.num_evictable))

    def check_integrity(self, live: list[Sequence]) -> None:
        """Asserts that every page is free, in the tree, or owned by one live sequence, and only one of these."""
        owners: dict[int, str] = {}

        def claim(page: int, owner: str) -> None:
            assert not self._allocator.is_free(page), f"page {page} of {owner} is on the free list"
            assert page not in owners, f"page {page} belongs to {owners[page]} and to {owner}"
            owners[page] = owner

        locks: dict[int, int] = {}
        for seq in live:
            node = self._nodes[seq.id]
            path = list(node.path())[::-1]
            assert [each.page for each in path] == seq.pages[: node.depth], f"{seq} does not follow its path"
            for page in seq.pages[node.depth :]:
                claim(page, repr(seq))
            for each in path:
                locks[id(each)] = locks.get(id(each), 0) + 1
        evictable = 0
        for node in self._tree.nodes():
            claim(node.page, "the tree")
            assert node.locks == locks.get(id(node), 0), f"page {node.page} has {node.locks} locks"
            evictable += not node.locks
        assert set(self._nodes) == {seq.id for seq in live}, "a sequence left without giving its pages back"
        assert evictable == self._tree.num_evictable
        assert len(owners) + self._allocator.num_free == self.num_pages, "pages were lost"

    def _share_page(self, seq: Sequence, node: Node) -> Node:
        """Moves the sequence's next full page into the tree, below `node`."""
        start = node.depth * self.page_size
        own = seq.pages[node.depth]
        child = self._tree.insert(node, tuple(seq.token_ids[start : start + self.page_size]), own)
        if child.page != own:
            # Someone else computed the same tokens meanwhile: use theirs.
            seq.pages[node.depth] = child.page
            self._allocator.release([own])
        self._tree.relock(node, child)
        return child

    def _take(self, count: int, *, after: int | None, room: int) -> list[int]:
        short = count - self._allocator.num_free
        if short > 0:
            self._allocator.release(self._tree.evict(short))
        return self._allocator.allocate(count, after=after, room=room)

    def _salt(self, seq: Sequence) -> str:
        # Without prefix caching a request still shares pages among its own choices, so it gets a salt of its own.
        return seq.request.cache_salt if self.prefix_caching else f"\0request {seq.request.id}"
