import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.engine.kv import PageAllocator


def test_new_run_is_contiguous() -> None:
    assert PageAllocator(8).allocate(5) == [0, 1, 2, 3, 4]


def test_run_that_grows_alone_stays_contiguous() -> None:
    allocator = PageAllocator(16)
    pages = allocator.allocate(3, room=10)
    while len(pages) < 10:
        pages += allocator.allocate(1, after=pages[-1])
    assert pages == list(range(10))


def test_runs_that_grow_in_turn_stay_contiguous_within_their_room() -> None:
    allocator = PageAllocator(64)
    runs = [allocator.allocate(2, room=8) for _ in range(4)]
    for _ in range(6):
        for run in runs:
            run += allocator.allocate(1, after=run[-1])
    assert runs == [list(range(start, start + 8)) for start in (0, 8, 16, 24)]


def test_run_takes_fewer_pages_of_room_when_no_gap_has_them_all() -> None:
    allocator = PageAllocator(8)
    allocator.allocate(5)
    assert allocator.allocate(2, room=100) == [5, 6]


def test_room_is_found_again_at_the_start_once_the_end_is_reached() -> None:
    allocator = PageAllocator(8)
    first = allocator.allocate(4)
    allocator.allocate(4)
    allocator.release(first)
    assert allocator.allocate(3) == [0, 1, 2]


def test_run_is_pieced_together_from_single_pages_when_nothing_longer_is_left() -> None:
    allocator = PageAllocator(6)
    allocator.allocate(6)
    allocator.release([0, 2, 4])
    assert sorted(allocator.allocate(3)) == [0, 2, 4]
    assert allocator.num_free == 0


def test_run_goes_on_elsewhere_when_its_next_page_is_taken() -> None:
    allocator = PageAllocator(8)
    first = allocator.allocate(2)
    allocator.allocate(2)
    assert allocator.allocate(2, after=first[-1]) == [4, 5]


def test_page_after_the_last_one_is_not_taken() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(4)
    allocator.release([0])
    assert allocator.allocate(1, after=pages[-1]) == [0]


def test_page_released_twice_is_a_bug_that_is_caught() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(pages)


def test_more_pages_than_are_free_is_a_bug_that_is_caught() -> None:
    with pytest.raises(AssertionError, match="5 pages asked for, 4 free"):
        PageAllocator(4).allocate(5)


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 30)), max_size=40))
def test_every_page_is_free_or_held_once(num_pages: int, actions: list[tuple[bool, int, int]]) -> None:
    allocator = PageAllocator(num_pages)
    held: list[list[int]] = []
    for takes, count, number in actions:
        if takes:
            count = min(count, allocator.num_free)
            after = held[number % len(held)][-1] if held and number % 2 else None
            pages = allocator.allocate(count, after=after, room=number)
            assert len(pages) == count
            held += [pages] if pages else []
        elif held:
            allocator.release(held.pop(number % len(held)))
        flat = [page for run in held for page in run]
        assert len(set(flat)) == len(flat) == num_pages - allocator.num_free
        assert [page for page in range(num_pages) if not allocator.is_free(page)] == sorted(flat)
