import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.engine.radix import Node, RadixCache

SIZE = 2


class Tree:
    """A radix cache whose pages are numbered as they come."""

    def __init__(self) -> None:
        self.cache = RadixCache(SIZE)
        self._pages = itertools.count()

    def store(self, tokens: str, salt: str = "") -> Node:
        """Caches a text's full pages, one letter a token, as a sequence that computes it and goes away would."""
        node = self.hold(tokens, salt)
        self.cache.unlock(node)
        return node

    def hold(self, tokens: str, salt: str = "") -> Node:
        """The same, but the sequence stays."""
        ids = [ord(letter) for letter in tokens]
        node = self.cache.match(ids, limit=len(ids), salt=salt)
        self.cache.lock(node)
        for start in range(node.depth * SIZE, len(ids) - SIZE + 1, SIZE):
            child = self.cache.insert(node, tuple(ids[start : start + SIZE]), next(self._pages))
            self.cache.relock(node, child)
            node = child
        return node

    def find(self, tokens: str, *, limit: int | None = None, salt: str = "") -> int:
        ids = [ord(letter) for letter in tokens]
        return self.cache.match(ids, limit=len(ids) if limit is None else limit, salt=salt).depth


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_longest_stored_prefix_is_found_in_whole_pages(tree: Tree) -> None:
    tree.store("abcdef")
    assert tree.find("abcdef") == 3
    assert tree.find("abcdeX") == 2
    assert tree.find("abXdef") == 1
    assert tree.find("Xbcdef") == 0
    assert tree.find("abcdefgh") == 3


def test_match_keeps_within_its_limit(tree: Tree) -> None:
    tree.store("abcdef")
    assert [tree.find("abcdef", limit=limit) for limit in range(-1, 7)] == [0, 0, 0, 1, 1, 2, 2, 3]


def test_match_changes_nothing(tree: Tree) -> None:
    tree.store("abcd")
    for text in ("abcd", "abXX", "XX"):
        tree.find(text, salt="new")
    assert (tree.cache.num_pages, tree.cache.num_evictable) == (2, 2)
    assert tree.cache.evict(2) == [1, 0]


def test_partly_filled_page_is_not_stored(tree: Tree) -> None:
    tree.store("abc")
    assert tree.cache.num_pages == 1


def test_prefix_is_found_under_its_own_salt_only(tree: Tree) -> None:
    tree.store("abcd", salt="mine")
    assert tree.find("abcd", salt="mine") == 2
    assert tree.find("abcd") == tree.find("abcd", salt="yours") == 0


def test_same_tokens_under_two_salts_are_two_pages(tree: Tree) -> None:
    assert tree.store("ab", salt="mine").page != tree.store("ab", salt="yours").page


def test_salt_can_be_used_again_after_its_last_page_was_evicted(tree: Tree) -> None:
    held = tree.cache.match([], limit=0, salt="mine")
    tree.store("abcd", salt="mine")
    tree.cache.evict(2)
    assert tree.find("abcd", salt="mine") == 0
    tree.cache.insert(held, (1, 2), 7)
    assert tree.cache.match([1, 2], limit=2, salt="mine").page == 7


def test_insert_gives_the_page_that_is_already_there(tree: Tree) -> None:
    stored = tree.store("ab")
    root = tree.cache.match([], limit=0)
    assert tree.cache.insert(root, (ord("a"), ord("b")), 99) is stored
    assert tree.cache.num_pages == 1


def test_two_who_found_nothing_store_under_one_root(tree: Tree) -> None:
    first, second = (tree.cache.match([1, 2], limit=2) for _ in range(2))
    assert tree.cache.insert(first, (1, 2), 0) is tree.cache.insert(second, (1, 2), 1)


def test_leaf_is_evicted_before_its_parent(tree: Tree) -> None:
    tree.store("abcdef")
    assert tree.cache.evict(1) == [2]
    assert tree.find("abcdef") == 2
    assert tree.cache.evict(2) == [1, 0]
    assert tree.cache.num_pages == 0


def test_oldest_is_evicted_first(tree: Tree) -> None:
    pages = [tree.store(text).page for text in ("aa", "bb", "cc")]
    assert tree.cache.evict(3) == pages


def test_using_a_node_makes_it_the_most_recent(tree: Tree) -> None:
    a, b, c = (tree.store(text).page for text in ("aa", "bb", "cc"))
    tree.store("aa")
    assert tree.cache.evict(3) == [b, c, a]


def test_using_a_leaf_refreshes_its_whole_path(tree: Tree) -> None:
    tree.store("aabb")
    other = tree.store("cc").page
    tree.store("aabb")
    assert tree.cache.evict(1) == [other]


def test_branch_that_is_not_used_stays_old(tree: Tree) -> None:
    tree.store("aabb")
    old = tree.store("aacc").page
    tree.store("aabb")
    assert tree.cache.evict(1) == [old]


def test_locked_path_is_not_evicted(tree: Tree) -> None:
    held = tree.hold("aabb")
    free = tree.store("aacc").page
    assert tree.cache.num_evictable == 1
    assert tree.cache.evict(1) == [free]
    page = held.page
    tree.cache.unlock(held)
    assert tree.cache.evict(2) == [page, 0]


def test_node_locked_twice_needs_two_unlocks(tree: Tree) -> None:
    node = tree.store("aa")
    page = node.page
    for locks in (1, 2):
        tree.cache.lock(node)
        assert (node.locks, tree.cache.num_evictable) == (locks, 0)
    tree.cache.unlock(node)
    assert tree.cache.num_evictable == 0
    tree.cache.unlock(node)
    assert tree.cache.evict(1) == [page]


def test_lock_moves_down_without_touching_the_path_above(tree: Tree) -> None:
    upper = tree.hold("aa")
    child = tree.cache.insert(upper, (1, 2), 9)
    tree.cache.relock(upper, child)
    assert (upper.locks, child.locks) == (1, 1)
    tree.cache.unlock(child)
    assert (upper.locks, child.locks, tree.cache.num_evictable) == (0, 0, 2)


def test_often_used_page_does_not_fill_the_memory_with_stale_entries(tree: Tree) -> None:
    """Every unlock offers the page for eviction again; what it offered before must not pile up."""
    node = tree.store("aa")
    page = node.page
    for _ in range(10_000):
        tree.cache.lock(node)
        tree.cache.unlock(node)
    assert len(tree.cache._oldest) < 100
    assert tree.cache.evict(1) == [page]


texts = st.text("ab", max_size=8)


@given(st.lists(st.tuples(st.sampled_from(["store", "hold", "unhold", "evict"]), texts, st.sampled_from(["", "s"]))))
def test_random_use_keeps_what_is_held_and_can_evict_all_the_rest(actions: list[tuple[str, str, str]]) -> None:
    tree, held = Tree(), []
    for action, text, salt in actions:
        if action == "store":
            tree.store(text, salt)
        elif action == "hold":
            held.append((text, salt, tree.hold(text, salt)))
        elif action == "unhold" and held:
            tree.cache.unlock(held.pop(len(text) % len(held))[2])
        elif action == "evict":
            count = min(len(text), tree.cache.num_evictable)
            assert len(tree.cache.evict(count)) == count
        for kept, kept_salt, _ in held:
            assert tree.find(kept, salt=kept_salt) == len(kept) // SIZE
    tree.cache.evict(tree.cache.num_evictable)
    still_held = {(salt, text[: end + SIZE]) for text, salt, _ in held for end in range(0, len(text) - SIZE + 1, SIZE)}
    assert len(list(tree.cache.nodes())) == tree.cache.num_pages == len(still_held)
