import random

import torch

from ostro.backends.cuda.attention import PageTables


def test_device_has_what_the_rows_hold_after_any_change(device: torch.device) -> None:
    """Rows grow, are cut, have a page replaced, and become another sequence's."""
    dice = random.Random(0)
    tables = PageTables(6, 10, device)
    rows: list[list[int]] = [[] for _ in range(6)]
    for _ in range(200):
        row = rows[dice.randrange(6)]
        change = dice.randrange(4)
        if change == 0 and len(row) < 10:
            row.append(dice.randrange(100))
        elif change == 1 and row:
            row[dice.randrange(len(row))] = dice.randrange(100)
        elif change == 2:
            row[:] = [dice.randrange(100) for _ in range(dice.randrange(11))]
        else:
            dice.shuffle(rows)
        on_device = tables.update(rows)
        for given, wanted in zip(on_device.tolist(), rows, strict=True):
            assert given[: len(wanted)] == wanted


def test_only_changes_are_sent(device: torch.device) -> None:
    tables = PageTables(2, 4, device)
    tables.update([[1, 2], [3]])
    tables.on_device.zero_()
    tables.update([[1, 2, 5], [3]])
    assert tables.on_device.tolist() == [[0, 0, 5, 0], [0, 0, 0, 0]]
