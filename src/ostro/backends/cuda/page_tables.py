"""A batch's page tables on the device: row i belongs to the batch's i-th sequence. Transfers only changes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostro.backends.cuda.transfer import send
from ostro.backends.page_rows import PageRows


class PageTables:
    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.on_device = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._sent = PageRows(rows, width)

    @property
    def num_replaced(self) -> int:
        """See `PageRows`."""
        return self._sent.num_replaced

    def update(self, rows: Sequence[list[int]]) -> Tensor:
        """The table for these rows."""
        self.write(self.changes(rows))
        return self.on_device[: len(rows)]

    def changes(self, rows: Sequence[list[int]]) -> npt.NDArray[np.int64] | None:
        """[2, changes]: the cells that must be written for these rows, and their pages. Counts them as written."""
        cells, pages = self._sent.update(rows)
        return np.array([cells, pages], dtype=np.int64) if cells else None

    def write(self, changes: npt.NDArray[np.int64] | None) -> None:
        if changes is not None:
            where, what = send(changes, self.on_device.device)
            self.on_device.view(-1).index_copy_(0, where, what.to(torch.int32))
