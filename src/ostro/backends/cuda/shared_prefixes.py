"""Which rows of a batch begin with the same pages, so that attention can read those once for all of them.

    pages   a  [ 4 9 2 | 31 32 ]
            b  [ 4 9 2 | 17 ]            a, b and c share three pages
            c  [ 4 9 2 | 50 51 52 ]
            d  [ 8 ]

Pages that sequences share are full and computed (`engine.kv`). Knows no device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.kernels.gpu.prefix_attention import group_arrays

# How often groups may be divided into smaller ones that share more: bounds the search.
_MOST_DIVISIONS = 8


class PrefixLimits(NamedTuple):
    """Below these, groups save less than the extra kernel in each layer costs."""

    rows: int = 8
    """The fewest rows in a group."""
    tokens: int = 256
    """The fewest tokens that a group shares."""
    saved: int = 4096
    """The fewest tokens, over all groups, whose keys need not be read."""


class PrefixGroup(NamedTuple):
    rows: list[int]
    pages: int
    """How many leading pages the rows share."""

    @property
    def saved(self) -> int:
        """Page reads that the group saves."""
        return (len(self.rows) - 1) * self.pages


def prefix_groups(
    tables: Sequence[list[int]], *, least_rows: int, least_pages: int, divisions: int = _MOST_DIVISIONS
) -> list[PrefixGroup]:
    """Groups of at least `least_rows` rows that share at least `least_pages` leading pages; a row is in at most one.

    The groups save as much as possible: one is divided where its parts, which share longer prefixes, save more.
    """
    return _best(tables, list(range(len(tables))), 0, least_rows, max(1, least_pages), divisions)


class SharedPrefixes:
    """The groups of the latest batch. They are computed again only when rows were replaced: a row that grows stays in
    its group.
    """

    def __init__(self, limits: PrefixLimits, *, max_rows: int, page_size: int, block: int) -> None:
        """`block` is that of `decode_attention`."""
        self._limits, self._max_rows, self._page_size, self._block = limits, max_rows, page_size, block
        self._seen = (0, 0)
        self.pays = False
        """Whether groups save enough to be used."""

    def update(self, tables: Sequence[list[int]], num_replaced: int) -> npt.NDArray[np.int32] | None:
        """The arrays to send to the device before the step, if any. For `num_replaced` see `PageRows`."""
        seen = (len(tables), num_replaced)
        if seen == self._seen:
            return None
        self._seen = seen
        limits, least_pages = self._limits, -(-self._limits.tokens // self._page_size)
        groups = prefix_groups(tables, least_rows=limits.rows, least_pages=least_pages)
        self.pays = sum(group.saved for group in groups) * self._page_size >= limits.saved
        if not self.pays:
            return None
        shared = [(group.rows, group.pages * self._page_size) for group in groups]
        return group_arrays(shared, self._max_rows, self._block)


def _best(
    tables: Sequence[list[int]], rows: list[int], shared: int, least_rows: int, least_pages: int, divisions: int
) -> list[PrefixGroup]:
    """The groups among rows that have their first `shared` pages in common."""
    if shared:
        shared = _common([tables[row] for row in rows])
    whole = [PrefixGroup(rows, shared)] if shared >= least_pages else []
    if shared and not divisions:
        return whole
    by_page: dict[int, list[int]] = {}
    for row in rows:
        if len(tables[row]) > shared:
            by_page.setdefault(tables[row][shared], []).append(row)
    parts = [
        group
        for part in by_page.values()
        if len(part) >= least_rows
        for group in _best(tables, part, shared + 1, least_rows, least_pages, divisions - bool(shared))
    ]
    return max(whole, parts, key=lambda groups: sum(group.saved for group in groups))


def _common(tables: Sequence[list[int]]) -> int:
    """How many leading pages all have in common."""
    common = tables[0]
    for table in tables:
        if table[: len(common)] != common:
            length = 0
            for ours, theirs in zip(common, table, strict=False):
                if ours != theirs:
                    break
                length += 1
            common = common[:length]
    return len(common)
