"""Measurements, what they are held to, and the table of both. Pure: runs nothing, knows no engine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

HEAD = ("", "Ostro", "peer", "", "Ostro / peer", "bar", "met")


@dataclass(frozen=True, slots=True)
class Bar:
    """Limits of one figure: Ostro's own value, its ratio to the peer's, or how far it is above the peer's."""

    of: Literal["value", "ratio", "excess"]
    least: float | None = None
    most: float | None = None

    def holds(self, figure: float) -> bool:
        return (self.least is None or figure >= self.least) and (self.most is None or figure <= self.most)

    def words(self, unit: str) -> str:
        sign, tail = {"value": ("", f" {unit}"), "ratio": ("", "×"), "excess": ("+", f" {unit}")}[self.of]
        limits = [f"≥ {sign}{self.least:g}{tail}"] if self.least is not None else []
        limits += [f"≤ {sign}{self.most:g}{tail}"] if self.most is not None else []
        return ", ".join(limits)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of Ostro and of one peer, as often as it was measured."""

    name: str
    unit: str
    ostro: Sequence[float]
    peer: str
    theirs: Sequence[float] = ()
    """Empty where the peer was not asked."""
    bar: Bar | None = None

    @property
    def ratio(self) -> float | None:
        """Ratio of the medians."""
        return statistics.median(self.ostro) / statistics.median(self.theirs) if self.theirs else None

    @property
    def judged(self) -> float | None:
        """The value that the bar judges; None without a bar, or without the peer that it needs."""
        if self.bar is None:
            return None
        ours = statistics.median(self.ostro)
        if self.bar.of == "value":
            return ours
        if not self.theirs:
            return None
        return self.ratio if self.bar.of == "ratio" else ours - statistics.median(self.theirs)

    @property
    def met(self) -> bool | None:
        """None where there is nothing to judge by."""
        figure = self.judged
        return None if self.bar is None or figure is None else self.bar.holds(figure)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "ostro": list(self.ostro),
            "peer": self.peer,
            "theirs": list(self.theirs),
            "ratio": self.ratio,
            "bar": self.bar.words(self.unit) if self.bar else None,
            "judged": self.judged,
            "met": self.met,
        }


def with_spread(values: Sequence[float]) -> str:
    """The median, and half the way from the least to the most in percent of it: `163 ±2%`."""
    if not values:
        return "–"
    middle = statistics.median(values)
    text = f"{middle:.4g}" if middle < 100 else f"{middle:,.0f}"
    return text if len(values) < 2 or not middle else f"{text} ±{(max(values) - min(values)) / 2 / middle:.0%}"


def table(rows: Sequence[Row]) -> str:
    """Aligned, a line for each row, and how many bars are met below."""
    text = aligned([HEAD, *(_cells(row) for row in rows)], left=[0, 3])
    verdicts = [row.met for row in rows if row.bar is not None]
    text += f"\n{verdicts.count(True)} of {len(verdicts)} bars met"
    if unjudged := verdicts.count(None):
        text += f", {unjudged} not judged"
    return text


def aligned(lines: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    """Columns as wide as their widest cell; those named by `left` begin alike, the others end alike."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.name} ({row.unit})" if row.unit else row.name,
        with_spread(row.ostro),
        with_spread(row.theirs),
        row.peer if row.theirs else "",
        "–" if row.ratio is None else f"{row.ratio:.3f}×",
        row.bar.words(row.unit) if row.bar else "",
        {True: "yes", False: "NO", None: "" if row.bar is None else "?"}[row.met],
    )
