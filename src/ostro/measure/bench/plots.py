"""A benchmark's plots: figures by level, and the latency distribution at each level."""

from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup

from ostro.measure.report.numbers import percentile
from ostro.measure.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    drawing,
    line,
    span,
    text,
    unit,
    x_axis,
    y_labels,
)

_COLOURS = 6
_POINTS = 60

Curve = tuple[str, Sequence[tuple[float, float]]]
"""Name and points."""


def over_levels(curves: Sequence[Curve], *, x_label: str, y_label: str, seconds: bool = False) -> Markup:
    """Joined markers, one per level; levels are equidistant and labelled with their values."""
    curves = [curve for curve in curves if curve[1]]
    if not curves:
        return Markup("")
    levels = sorted({x for _, points in curves for x, _ in points})
    place = {level: float(number) for number, level in enumerate(levels)}
    most = max(y for _, points in curves for _, y in points)
    unit_name, scale = unit(most) if seconds else ("", 1.0)
    margin = 0.5 if len(levels) == 1 else 0.15
    x = Axis(-margin, len(levels) - 1 + margin, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, most * scale * 1.08 or 1.0, HEIGHT - BOTTOM, TOP)
    base = HEIGHT - BOTTOM
    parts = [_text_below(x.at(number), f"{level:g}") for level, number in place.items()]
    parts += [
        line("axis", LEFT, base, WIDTH - RIGHT, base),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle"),
    ]
    parts += _frame(y, f"{y_label}, {unit_name}" if unit_name else y_label)
    for number, (_, points) in enumerate(curves):
        at = [(x.at(place[level]), y.at(value * scale)) for level, value in sorted(points)]
        parts += _path(at, number)
        parts += [f'<circle class="series{number % _COLOURS}" cx="{cx:.1f}" cy="{cy:.1f}" r="3.5"/>' for cx, cy in at]
    return drawing(parts, f"{y_label} over {x_label}")


def spread(curves: Sequence[tuple[str, Sequence[float]]], *, label: str) -> Markup:
    """The cumulative distribution of the values at each level, in seconds, without the last percent."""
    known = [(name, sorted(values)) for name, values in curves]
    if not any(values for _, values in known):
        return Markup("")
    low, high = span([percentile(values, share) for _, values in known if values for share in (0.0, 0.99)])
    unit_name, scale = unit(high)
    x = Axis(low * scale, high * scale, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, 100.0, HEIGHT - BOTTOM, TOP)
    parts = [*x_axis(x, f"{label}, {unit_name}"), *_frame(y, "% of them take at most")]
    for number, (_, values) in enumerate(known):
        if values:
            shares = [0.99 * step / _POINTS for step in range(_POINTS + 1)]
            at = [(x.at(percentile(values, share) * scale), y.at(share * 100)) for share in shares]
            parts += _path(at, number)
    return drawing(parts, f"How {label} is spread at each level")


def legend(names: Sequence[str]) -> Markup:
    parts = (
        Markup('<span class="series{}">━ {}</span>').format(number % _COLOURS, name)
        for number, name in enumerate(names)
    )
    return Markup(" ").join(parts)


def _frame(y: Axis, label: str) -> list[str]:
    grid = [line("grid", LEFT, y.at(tick), WIDTH - RIGHT, y.at(tick)) for tick in y.ticks(4)]
    return [
        *grid,
        *y_labels(y),
        line("axis", LEFT, TOP, LEFT, HEIGHT - BOTTOM),
        text(LEFT - 6, TOP - 6, label, "start"),
    ]


def _text_below(at: float, words: str) -> str:
    return text(at, HEIGHT - BOTTOM + 15, words, "middle")


def _path(points: Sequence[tuple[float, float]], number: int) -> list[str]:
    return [line(f"curve series{number % _COLOURS}", *a, *b) for a, b in pairwise(points)]
