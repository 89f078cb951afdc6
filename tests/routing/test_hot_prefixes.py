"""What a replica tells of its prefix cache: the latest prompts, and what there was no room for."""

from hypothesis import given
from hypothesis import strategies as st

from ostro.routing.report import MOST_DROPPED, MOST_HELD, HotPrefixes, Latest


def prompt(name: str, blocks: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{n:07}".encode() for n in range(blocks))


def names(latest: Latest) -> list[str]:
    return [f"{name[0]}{int(name[1:])}" for name in map(bytes.decode, latest.since(0))]


def test_prompts_are_held_and_the_latest_comes_last() -> None:
    hot = HotPrefixes()
    hot.use(prompt("a", 3))
    hot.use(prompt("b", 1))
    assert names(hot.held()) == ["a2", "a1", "a0", "b0"]
    hot.use(prompt("a", 2))
    assert names(hot.held()) == ["a2", "b0", "a1", "a0"]
    assert (hot.num_blocks, hot.total_blocks) == (4, 6)


def test_the_longest_unused_are_dropped_first_and_ends_before_beginnings() -> None:
    hot = HotPrefixes()
    hot.use(prompt("a", 3))
    hot.use(prompt("b", 3))
    hot.shrink(4)
    assert names(hot.held()) == ["a0", "b2", "b1", "b0"]
    assert names(hot.dropped()) == ["a2", "a1"]
    hot.use(prompt("a", 2))
    assert names(hot.dropped()) == ["a2"], "a prompt that was computed again is held again"
    hot.forget()
    assert (names(hot.held()), hot.num_blocks, hot.total_blocks) == ([], 0, 0)


def test_long_prompts_are_reported_in_few_digests_that_count_for_all_their_blocks() -> None:
    hot = HotPrefixes()
    hot.use(prompt("a", 300))
    assert hot.num_blocks == 300
    assert len(names(hot.held())) < 30
    assert names(hot.held())[0] == "a299"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 200), st.integers(0, 300)), max_size=30))
def test_what_is_reported_is_bounded_and_consistent(steps: list[tuple[str, int, int]]) -> None:
    hot = HotPrefixes()
    for name, blocks, room in steps:
        hot.use(prompt(name, blocks))
        hot.shrink(room)
        assert hot.num_blocks <= room
        assert not set(names(hot.held())) & set(names(hot.dropped()))
        assert len(names(hot.held())) <= MOST_HELD
        assert len(names(hot.dropped())) <= MOST_DROPPED
