"""Rows that begin with the same pages are found, and found again when rows change."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.backends.cuda.shared_prefixes import PrefixGroup, PrefixLimits, SharedPrefixes, prefix_groups
from ostro.backends.page_rows import PageRows
from ostro.kernels.gpu.prefix_attention import GROUP_END, GROUP_KEYS, GROUP_OF, GROUP_ROWS

# Few pages, so that many rows begin alike.
TABLES = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=7)


def saved(groups: list[PrefixGroup]) -> int:
    return sum(group.saved for group in groups)


@given(tables=TABLES, least_rows=st.integers(2, 4), least_pages=st.integers(1, 3))
def test_groups_share_what_they_say_and_divide_the_rows(
    tables: list[list[int]], least_rows: int, least_pages: int
) -> None:
    groups = prefix_groups(tables, least_rows=least_rows, least_pages=least_pages)
    for rows, pages in groups:
        assert len(rows) >= least_rows
        assert pages >= least_pages
        assert len({tuple(tables[row][:pages]) for row in rows}) == 1
        assert all(len(tables[row]) >= pages for row in rows)
    grouped = [row for rows, _ in groups for row in rows]
    assert len(grouped) == len(set(grouped))


@given(tables=TABLES, least_rows=st.integers(2, 4), least_pages=st.integers(1, 3))
def test_no_other_groups_save_more(tables: list[list[int]], least_rows: int, least_pages: int) -> None:
    """All rows with some prefix are a candidate; the best of all sets of disjoint candidates is found by trying."""
    candidates = set()
    for table in tables:
        for pages in range(least_pages, len(table) + 1):
            rows = frozenset(row for row, other in enumerate(tables) if other[:pages] == table[:pages])
            if len(rows) >= least_rows:
                candidates.add((rows, pages))
    most = 0
    for count in range(1, len(tables) // least_rows + 1):
        for chosen in combinations(candidates, count):
            if sum(len(rows) for rows, _ in chosen) == len(frozenset().union(*(rows for rows, _ in chosen))):
                most = max(most, sum((len(rows) - 1) * pages for rows, pages in chosen))
    assert saved(prefix_groups(tables, least_rows=least_rows, least_pages=least_pages)) == most


def test_search_ends_where_every_row_shares_a_page_more_than_the_one_before() -> None:
    tables = [[*range(length), 10_000 + length] for length in range(3000)]
    groups = prefix_groups(tables, least_rows=2, least_pages=1)
    assert saved(groups) > 0


class Batch:
    """The rows of a page table, and the groups that are known of them."""

    def __init__(self, *, page_size: int = 16) -> None:
        self.rows: list[list[int]] = []
        self._held = PageRows(64, 1000)
        self.prefixes = SharedPrefixes(PrefixLimits(), max_rows=64, page_size=page_size, block=64)

    def update(self) -> np.ndarray | None:
        self._held.update(self.rows)
        return self.prefixes.update(self.rows, self._held.num_replaced)


PREFIX = list(range(100, 140))


def sharing(count: int, prefix: list[int] = PREFIX, first: int = 1000) -> list[list[int]]:
    return [[*prefix, first + row] for row in range(count)]


def test_groups_are_sent_to_the_device_once_and_again_when_rows_are_replaced() -> None:
    batch = Batch()
    batch.rows = [[1, 2], *sharing(10)]
    told = batch.update()
    assert told is not None
    assert batch.prefixes.pays
    assert told[GROUP_OF].tolist() == [-1, *[0] * 10, *[-1] * 53]
    assert told[GROUP_ROWS, :10].tolist() == list(range(1, 11))
    assert (told[GROUP_KEYS, 0], told[GROUP_END, 0]) == (640, 10)
    assert batch.update() is None
    for row in batch.rows:
        row.append(2000 + row[-1])
    assert batch.update() is None
    assert batch.prefixes.pays
    del batch.rows[0]
    told = batch.update()
    assert told is not None
    assert told[GROUP_OF].tolist() == [*[0] * 10, *[-1] * 54]
    batch.rows[3] = [7, 8]
    told = batch.update()
    assert told is not None
    assert told[GROUP_ROWS, :9].tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_groups_are_forgotten_when_their_rows_leave() -> None:
    batch = Batch()
    batch.rows = sharing(10)
    assert batch.update() is not None
    del batch.rows[5:]
    assert batch.update() is None
    assert not batch.prefixes.pays
    batch.rows += sharing(10, first=3000)
    assert batch.update() is not None
    assert batch.prefixes.pays


@pytest.mark.parametrize(
    "rows", [sharing(7), sharing(60, PREFIX[:15]), sharing(8, PREFIX[:30]), [[row] for row in range(60)]]
)
def test_small_groups_and_short_prefixes_do_not_pay(rows: list[list[int]]) -> None:
    batch = Batch()
    batch.rows = rows
    assert batch.update() is None
    assert not batch.prefixes.pays


def test_keys_count_in_whole_blocks() -> None:
    batch = Batch()
    batch.rows = sharing(20, PREFIX[:39])
    told = batch.update()
    assert told is not None
    assert told[GROUP_KEYS, 0] == 39 * 16 // 64 * 64
