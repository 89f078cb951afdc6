"""Which pages are free. Knows no sequences and no tree.

Any free page will do. But a device may read a run of contiguous pages at once, so the allocator prefers to continue a
sequence's run, and starts new runs where there is room for them to grow:

    page   0 1 2 3 4 5 6 7 8 9 …
           A A A . . . B B . .       A may become 6 pages long: B starts after the room that A needs
"""

_FREE = b"\x01"


class PageAllocator:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        # One byte per page, so that a substring search finds a run of free pages.
        self._free = bytearray(_FREE * num_pages)
        self._cursor = 0

    def allocate(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Takes `count` pages; the caller has made sure that many are free.

        `after` is the page that the new ones continue. `room` is how many pages a new run may grow to.
        """
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} free"
        pages = [] if after is None else self._take_run(after + 1, count)
        while len(pages) < count:
            missing = count - len(pages)
            pages += self._take_run(self._find_run(missing, max(room, missing)), missing)
        return pages

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert not self._free[page], f"page {page} was released twice"
            self._free[page] = 1
        self.num_free += len(pages)

    def is_free(self, page: int) -> bool:
        return bool(self._free[page])

    def _find_run(self, count: int, room: int) -> int:
        """Start of a free run: of `room` pages if there is one, else of `count` pages, else of one page."""
        for length in (room, count, 1):
            start = self._free.find(_FREE * length, self._cursor)
            if start < 0:
                start = self._free.find(_FREE * length)
            if start >= 0:
                self._cursor = start + length
                return start
        raise AssertionError("no free page")

    def _take_run(self, start: int, most: int) -> list[int]:
        end = start
        while end < start + most and end < self.num_pages and self._free[end]:
            self._free[end] = 0
            end += 1
        self.num_free -= end - start
        return list(range(start, end))
