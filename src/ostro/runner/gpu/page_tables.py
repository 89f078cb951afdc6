"""A batch's page tables on the device: row i belongs to the batch's i-th sequence. Transfers only changes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostro.runner.gpu.transfer import send


class PageTables:
    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.on_device = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._sent: list[list[int]] = [[] for _ in range(rows)]

    def update(self, rows: Sequence[list[int]]) -> Tensor:
        """The table for these rows. A row's pages may grow or be replaced, or the row may now be another sequence's."""
        self.write(self.changes(rows))
        return self.on_device[: len(rows)]

    def changes(self, rows: Sequence[list[int]]) -> npt.NDArray[np.int64] | None:
        """[2, changes]: the cells that must be written for these rows, and their pages. Counts them as written."""
        width = self.on_device.shape[1]
        cells: list[int] = []
        pages: list[int] = []
        for row, wanted in enumerate(rows):
            sent = self._sent[row]
            if sent == wanted:
                continue
            start = len(sent) if wanted[: len(sent)] == sent else 0
            cells += range(row * width + start, row * width + len(wanted))
            pages += wanted[start:]
            self._sent[row] = list(wanted)
        return np.array([cells, pages], dtype=np.int64) if cells else None

    def write(self, changes: npt.NDArray[np.int64] | None) -> None:
        if changes is not None:
            where, what = send(changes, self.on_device.device)
            self.on_device.view(-1).index_copy_(0, where, what.to(torch.int32))
