"""The contents of a page table's rows: row i belongs to a batch's i-th sequence. Knows no device."""

from collections.abc import Sequence


class PageRows:
    """Finds what has changed since the last batch, so that only changes are written."""

    def __init__(self, rows: int, width: int) -> None:
        self._width = width
        self._held: list[list[int]] = [[] for _ in range(rows)]
        self.num_replaced = 0
        """How often a row was replaced: while this does not change, rows have at most grown."""

    def update(self, rows: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """The cells of the flat table to be written, and the pages to write there. A row's pages may grow or be
        replaced, or the row may now be another sequence's.
        """
        cells: list[int] = []
        pages: list[int] = []
        for row, wanted in enumerate(rows):
            held = self._held[row]
            if held == wanted:
                continue
            start = len(held) if wanted[: len(held)] == held else 0
            self.num_replaced += not start
            cells += range(row * self._width + start, row * self._width + len(wanted))
            pages += wanted[start:]
            self._held[row] = list(wanted)
        return cells, pages
