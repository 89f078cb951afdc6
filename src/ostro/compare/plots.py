"""Small plots as inline SVG. They hold numbers and our own words, and take their colours from the page's CSS."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 440.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 14.0, 18.0, 40.0
_BINS = 24


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to places on the page, and knows the round values in between."""

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


def histogram(a: Sequence[float], b: Sequence[float], *, label: str) -> Markup:
    """How A's values are spread, above the line, and B's, below it; the medians are marked. Seconds."""
    values = [*a, *b]
    if not values:
        return Markup("")
    unit, scale = _unit(max(values))
    x = _Axis(*_span([value * scale for value in values]), _LEFT, _WIDTH - _RIGHT)
    counts = [_counts([value * scale for value in side], x) for side in (a, b)]
    most = max(max(each) for each in counts)
    y = _Axis(-most, most, _HEIGHT - _BOTTOM, _TOP)
    parts = list(_x_axis(x, f"{label}, {unit}"))
    for name, side, each, sign in (("a", a, counts[0], 1), ("b", b, counts[1], -1)):
        end = y.at(most * sign)
        parts += _bars(each, x, y, sign, name)
        parts.append(_text(_LEFT - 6, end + 4, str(most), "end"))
        parts.append(_text(_LEFT / 2, (y.at(0) + end) / 2 + 5, name.upper(), "middle", f"name {name}"))
        if side:
            at = x.at(median(side) * scale)
            parts.append(_line("median", at, y.at(0), at, end))
    parts.append(_line("axis", _LEFT, y.at(0), _WIDTH - _RIGHT, y.at(0)))
    return _svg(parts, f"{label} of A and B")


def scatter(points: Sequence[tuple[float, float]], *, label: str) -> Markup:
    """One point a prompt: A's seconds to the right, B's upwards; on the line both are equal."""
    if not points:
        return Markup("")
    unit, scale = _unit(max(max(point) for point in points))
    high = max(max(point) for point in points) * scale * 1.05 or 1.0
    x = _Axis(0.0, high, _LEFT, _WIDTH - _RIGHT)
    y = _Axis(0.0, high, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        *_x_axis(x, f"A, {label}, {unit}"),
        *(_text(_LEFT - 6, y.at(tick) + 4, f"{tick:g}", "end") for tick in y.ticks(4)),
        _line("equal", x.at(0), y.at(0), x.at(high), y.at(high)),
        _text(_LEFT - 6, _TOP - 6, f"B, {label}, {unit}", "start"),
        _text(_LEFT + 8, _TOP + 12, "↑ B slower", "start"),
        _text(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM - 8, "A slower →", "end"),
        *(f'<circle class="point" cx="{x.at(a * scale):.1f}" cy="{y.at(b * scale):.1f}" r="3.5"/>' for a, b in points),
        _line("axis", _LEFT, _TOP, _LEFT, _HEIGHT - _BOTTOM),
    ]
    return _svg(parts, f"{label} of each prompt, A against B")


def _svg(parts: Sequence[str], title: str) -> Markup:
    head = f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title)}">'
    return Markup(head + "".join(parts) + "</svg>")


def _x_axis(x: _Axis, label: str) -> Iterator[str]:
    base = _HEIGHT - _BOTTOM
    for tick in x.ticks():
        at = x.at(tick)
        yield _line("grid", at, _TOP, at, base)
        yield _text(at, base + 15, f"{tick:.10g}", "middle")
    yield _line("axis", _LEFT, base, _WIDTH - _RIGHT, base)
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, label, "middle")


def _bars(counts: Sequence[int], x: _Axis, y: _Axis, sign: int, name: str) -> Iterator[str]:
    width = (x.end - x.start) / _BINS
    for number, count in enumerate(counts):
        if count:
            top, bottom = sorted((y.at(0), y.at(count * sign)))
            yield (
                f'<rect class="{name}" x="{x.start + number * width + 0.5:.1f}" y="{top:.1f}" '
                f'width="{width - 1:.1f}" height="{bottom - top:.1f}"/>'
            )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _counts(values: Sequence[float], x: _Axis) -> list[int]:
    counts = [0] * _BINS
    for value in values:
        counts[min(int((value - x.low) / (x.high - x.low) * _BINS), _BINS - 1)] += 1
    return counts


def _span(values: Sequence[float]) -> tuple[float, float]:
    """From the least to the greatest, or from nothing where that is not far; never empty."""
    low, high = min(values), max(values)
    low = 0.0 if low < 0.4 * high else low
    return (low, high) if high > low else (low * 0.9, (high or 1.0) * 1.1)


def _unit(most: float) -> tuple[str, float]:
    return ("s", 1.0) if most >= 1 else ("ms", 1e3)


def _round_step(step: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))
