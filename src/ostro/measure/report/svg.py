"""Building blocks for small inline SVG plots: axes, lines, labels. Colours come from the page's CSS."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 440.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 18.0, 40.0
BINS = 24


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to page coordinates, and finds round tick values."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, about: int = 5) -> Iterator[float]:
        step = _round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        for number in range(first, math.floor(self.high / step + 1e-9) + 1):
            yield number * step


def drawing(parts: Sequence[str], title: str) -> Markup:
    head = f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(title)}">'
    return Markup(head + "".join(parts) + "</svg>")


def x_axis(x: Axis, label: str) -> Iterator[str]:
    base = HEIGHT - BOTTOM
    for tick in x.ticks():
        at = x.at(tick)
        yield line("grid", at, TOP, at, base)
        yield text(at, base + 15, f"{tick:.10g}", "middle")
    yield line("axis", LEFT, base, WIDTH - RIGHT, base)
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, label, "middle")


def y_labels(y: Axis) -> Iterator[str]:
    return (text(LEFT - 6, y.at(tick) + 4, f"{tick:.10g}", "end") for tick in y.ticks(4))


def bars(counts: Sequence[int], x: Axis, y: Axis, sign: int, name: str) -> Iterator[str]:
    width = (x.end - x.start) / BINS
    for number, count in enumerate(counts):
        if count:
            top, bottom = sorted((y.at(0), y.at(count * sign)))
            yield (
                f'<rect class="{name}" x="{x.start + number * width + 0.5:.1f}" y="{top:.1f}" '
                f'width="{width - 1:.1f}" height="{bottom - top:.1f}"/>'
            )


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, words: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def counts(values: Sequence[float], x: Axis) -> list[int]:
    counts = [0] * BINS
    for value in values:
        counts[min(int((value - x.low) / (x.high - x.low) * BINS), BINS - 1)] += 1
    return counts


def span(values: Sequence[float]) -> tuple[float, float]:
    """From the minimum to the maximum, or from zero if the minimum is relatively small; never empty."""
    low, high = min(values), max(values)
    low = 0.0 if low < 0.4 * high else low
    return (low, high) if high > low else (low * 0.9, (high or 1.0) * 1.1)


def unit(most: float) -> tuple[str, float]:
    return ("s", 1.0) if most >= 1 else ("ms", 1e3)


def _round_step(step: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
