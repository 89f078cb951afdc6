"""Which replicas hold a prefix: chains of digests, and an index over them that is bounded both ways."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ostro.routing.key import BLOCK, MOST_BLOCKS, blocks_of, levels_of
from ostro.routing.prefix_index import MOST_HOLDERS, PrefixIndex

ALL = frozenset({"one", "two", "three"})


def text(name: str, blocks: int) -> str:
    return (name * BLOCK)[:BLOCK] * blocks


def test_texts_share_as_many_blocks_as_their_common_beginning_fills() -> None:
    first, second = blocks_of(text("a", 3) + "tail"), blocks_of(text("a", 2) + text("b", 3))
    assert (len(first), len(second)) == (3, 5)
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second)
    assert not set(first) & set(blocks_of(text("a", 3), salt="another model"))


def test_levels_are_exact_for_short_prompts_and_few_for_long_ones() -> None:
    assert levels_of(0) == ()
    assert levels_of(8) == tuple(range(1, 9))
    assert levels_of(11) == (*range(1, 9), 10, 11), "its own length is always among them"
    levels = levels_of(MOST_BLOCKS)
    assert levels == levels_of(MOST_BLOCKS + 1)
    assert levels[-1] == MOST_BLOCKS
    assert len(levels) <= 28
    assert all(after - before <= max(1, before / 4) for before, after in pairwise(levels))


def test_index_reports_how_much_each_replica_holds() -> None:
    index = PrefixIndex()
    index.add_prompt(blocks_of(text("a", 4)), "one")
    index.add_prompt(blocks_of(text("a", 2) + text("b", 2)), "two")
    asked = blocks_of(text("a", 3) + text("c", 2))
    assert index.matches(asked, ALL) == {"one": 3, "two": 2}
    assert index.matches(asked, {"two"}) == {"two": 2}, "the others are gone"
    assert index.matches(blocks_of(text("c", 2)), ALL) == {}


def test_index_forgets_what_was_used_longest_ago_and_keeps_shared_beginnings() -> None:
    index = PrefixIndex(most_prefixes=16)
    first, second = text("a", 2) + text("b", 2), text("a", 2) + text("c", 2)
    index.add_prompt(blocks_of(first), "one")
    for name, remembered in (("d", 4), ("e", 2)):
        index.add_prompt(blocks_of(second), "one")
        index.add_prompt(blocks_of(text(name, 4)), "one")
        assert len(index) <= 16
        assert index.matches(blocks_of(first), ALL) == {"one": remembered}
        assert index.matches(blocks_of(second), ALL) == {"one": 4}
        assert index.matches(blocks_of(text(name, 4)), ALL) == {"one": 4}


def test_index_remembers_at_least_the_latest_half_of_its_bound() -> None:
    index = PrefixIndex(most_prefixes=80)
    for n in range(100):
        index.add_prompt(blocks_of(text(f"{n} ", 4)), "one")
        assert len(index) <= 80
        for latest in range(max(0, n - 9), n + 1):
            assert index.matches(blocks_of(text(f"{latest} ", 4)), ALL) == {"one": 4}
    assert index.matches(blocks_of(text("79 ", 4)), ALL) == {}


def test_prompt_that_is_sent_again_pushes_nothing_out() -> None:
    """Its prefixes counted as new, so that a full index forgot its older half for nothing."""
    index = PrefixIndex(most_prefixes=16)
    for name in "abcd":
        index.add_prompt(blocks_of(text(name, 4)), "one")
    for _ in range(3):
        index.add_prompt(blocks_of(text("d", 4)), "two")
        assert len(index) == 16
    assert all(index.matches(blocks_of(text(name, 4)), {"one"}) == {"one": 4} for name in "abcd")
    index.add_prompt(blocks_of(text("d", 4) + text("e", 1)), "one")
    assert len(index) == 8 + 1, "one that is new takes the place of the older half"


def test_prefix_that_is_used_again_is_counted_once() -> None:
    index = PrefixIndex(most_prefixes=16)
    for name in "abca":
        index.add_prompt(blocks_of(text(name, 4)), "one")
    assert len(index) == 12


def test_prefix_that_a_replica_has_dropped_is_not_its_own_any_more() -> None:
    index, blocks = PrefixIndex(), blocks_of(text("a", 4))
    index.add_prompt(blocks, "one")
    index.add_prompt(blocks[:2], "two")
    for block in blocks[1:]:
        index.discard(block, "one")
    assert index.matches(blocks, ALL) == {"two": 2, "one": 1}
    index.discard(b"unknown", "one")
    assert len(index) == 2


def test_prefix_of_the_older_half_is_dropped_as_well() -> None:
    index, blocks = PrefixIndex(most_prefixes=8), blocks_of(text("a", 4))
    index.add_prompt(blocks, "one")
    index.add_prompt(blocks[:2], "two")
    for block in blocks:
        index.discard(block, "one")
    assert index.matches(blocks, ALL) == {"two": 2}
    assert len(index) == 2


def test_latest_of_many_holders_are_remembered() -> None:
    index, [block] = PrefixIndex(), blocks_of(text("a", 1))
    names = [str(n) for n in range(MOST_HOLDERS + 2)]
    for name in [*names, names[2]]:
        index.add([block], name)
    assert set(index.matches([block], set(names))) == set(names[2:])


@given(
    st.lists(st.tuples(st.text("ab", max_size=6), st.sampled_from(sorted(ALL))), max_size=12),
    st.text("ab", max_size=8),
)
def test_longest_match_is_found_whatever_was_added(added: list[tuple[str, str]], asked: str) -> None:
    index = PrefixIndex()
    for spelt, name in added:
        index.add_prompt(_blocks(spelt), name)
    common = {
        name: max((_common(spelt, asked) for spelt, holder in added if holder == name), default=0) for name in ALL
    }
    longest = max(common.values())
    matches = index.matches(_blocks(asked), ALL)
    assert matches == {name: count for name, count in common.items() if count and 2 * count >= longest}


def _blocks(spelt: str) -> tuple[bytes, ...]:
    return blocks_of("".join(text(letter, 1) for letter in spelt))


def _common(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
