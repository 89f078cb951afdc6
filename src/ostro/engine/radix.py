"""The prefix cache: a tree of computed pages, keyed by the tokens they hold. Knows no sequences and no free list.

    root(salt) ── [t0…t15] page 4 ──┬── [t16…t31] page 9
                                    └── [u16…u31] page 2 ── [u32…u47] page 7

A node is one full page; the path to it spells every token before it. A node is locked while a sequence uses its page,
counted along the whole path, so a locked node's ancestors are locked too. Unlocked leaves are evicted, oldest first.
"""

import heapq
from collections.abc import Iterator, Sequence

PageKey = tuple[int, ...]
Salt = str | tuple[str, str]
"""Prefixes are shared within a salt, never across salts."""


class Node:
    __slots__ = ("children", "depth", "key", "last_used", "locks", "page", "parent", "salt")

    def __init__(self, parent: "Node | None", key: PageKey, page: int, salt: Salt) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.salt = salt
        self.depth: int = parent.depth + 1 if parent else 0
        """Pages on the path from the root, including this one; the root itself holds none."""
        self.children: dict[PageKey, Node] = {}
        self.locks = 0
        self.last_used = 0

    def path(self) -> "Iterator[Node]":
        """The node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixCache:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_evictable = 0
        """Pages of unlocked nodes. All of them can be evicted, leaves first: none has a locked node below it."""
        self._roots: dict[Salt, Node] = {}
        self._clock = 0
        # (last used, tie-breaker, node) of unlocked leaves; an entry is stale once its node has been used again.
        self._oldest: list[tuple[int, int, Node]] = []
        self._pushes = 0

    def match(self, token_ids: Sequence[int], *, limit: int, salt: Salt = "") -> Node:
        """The deepest node whose path spells a prefix of `token_ids`, at most `limit` tokens of it.

        Does not change the tree: lock the node before you use its pages.
        """
        node = self._roots.get(salt) or Node(None, (), -1, salt)
        size = self.page_size
        for start in range(0, limit - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            node = child
        return node

    def insert(self, parent: Node, key: PageKey, page: int) -> Node:
        """The child of `parent` that holds `key`: the one already there, else a new one that owns `page`."""
        assert len(key) == self.page_size
        if parent.depth == 0:
            # A match that finds nothing returns a detached root; the first insertion below one attaches it.
            parent = self._roots.setdefault(parent.salt, parent)
        child = parent.children.get(key)
        if child is not None:
            return child
        child = parent.children[key] = Node(parent, key, page, parent.salt)
        self.num_pages += 1
        self.num_evictable += 1
        return child

    def lock(self, node: Node) -> None:
        """Keeps the node and its path from eviction."""
        self._clock += 1
        for each in node.path():
            each.last_used = self._clock
            if not each.locks:
                self.num_evictable -= 1
            each.locks += 1

    def unlock(self, node: Node) -> None:
        self._clock += 1
        for each in node.path():
            each.last_used = self._clock
            each.locks -= 1
            if not each.locks:
                self.num_evictable += 1
        self._offer(node)

    def relock(self, node: Node, child: Node) -> None:
        """Moves one lock from a node down to its child; the locks above the child stay as they are."""
        if not child.locks:
            self.num_evictable -= 1
        child.locks += 1

    def evict(self, count: int) -> list[int]:
        """Drops the `count` least recently used pages that are not locked, leaves first; returns them."""
        pages: list[int] = []
        while len(pages) < count:
            last_used, _, node = heapq.heappop(self._oldest)
            if node.locks or node.children or node.last_used != last_used or node.parent is None:
                continue
            pages.append(node.page)
            self._remove(node)
        return pages

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self.num_pages -= 1
        self.num_evictable -= 1
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self._roots[parent.salt]

    def _offer(self, node: Node) -> None:
        """Makes the node a candidate for eviction if it is an unlocked leaf."""
        if node.locks or node.children or node.parent is None:
            return
        if len(self._oldest) > 2 * self.num_pages + 64:
            self._oldest = [entry for entry in self._oldest if entry[2].parent and entry[0] == entry[2].last_used]
            heapq.heapify(self._oldest)
        self._pushes += 1
        heapq.heappush(self._oldest, (node.last_used, self._pushes, node))
