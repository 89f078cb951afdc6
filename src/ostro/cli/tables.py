"""Tables and sizes as commands print them."""

from collections.abc import Sequence


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def size(num_bytes: int) -> str:
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.1f} {unit}"
    return f"{num_bytes} B"
