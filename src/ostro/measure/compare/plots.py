"""Small plots as inline SVG. They contain only numbers and our own labels; colours come from the page's CSS."""

from collections.abc import Sequence
from statistics import median

from markupsafe import Markup

from ostro.measure.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    bars,
    counts,
    drawing,
    line,
    span,
    text,
    unit,
    x_axis,
    y_labels,
)


def histogram(a: Sequence[float], b: Sequence[float], *, label: str) -> Markup:
    """Distribution of A's values above the line and of B's below it, with medians. In seconds."""
    values = [*a, *b]
    if not values:
        return Markup("")
    unit_name, scale = unit(max(values))
    x = Axis(*span([value * scale for value in values]), LEFT, WIDTH - RIGHT)
    in_bins = [counts([value * scale for value in side], x) for side in (a, b)]
    most = max(max(each) for each in in_bins)
    y = Axis(-most, most, HEIGHT - BOTTOM, TOP)
    parts = list(x_axis(x, f"{label}, {unit_name}"))
    for name, side, each, sign in (("a", a, in_bins[0], 1), ("b", b, in_bins[1], -1)):
        end = y.at(most * sign)
        parts += bars(each, x, y, sign, name)
        parts.append(text(LEFT - 6, end + 4, str(most), "end"))
        parts.append(text(LEFT / 2, (y.at(0) + end) / 2 + 5, name.upper(), "middle", f"name {name}"))
        if side:
            at = x.at(median(side) * scale)
            parts.append(line("median", at, y.at(0), at, end))
    parts.append(line("axis", LEFT, y.at(0), WIDTH - RIGHT, y.at(0)))
    return drawing(parts, f"{label} of A and B")


def scatter(points: Sequence[tuple[float, float]], *, label: str) -> Markup:
    """One point per prompt: A's seconds on the x-axis, B's on the y-axis; on the diagonal they are equal."""
    if not points:
        return Markup("")
    unit_name, scale = unit(max(max(point) for point in points))
    high = max(max(point) for point in points) * scale * 1.05 or 1.0
    x = Axis(0.0, high, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, high, HEIGHT - BOTTOM, TOP)
    parts = [
        *x_axis(x, f"A, {label}, {unit_name}"),
        *y_labels(y),
        line("equal", x.at(0), y.at(0), x.at(high), y.at(high)),
        text(LEFT - 6, TOP - 6, f"B, {label}, {unit_name}", "start"),
        text(LEFT + 8, TOP + 12, "↑ B slower", "start"),
        text(WIDTH - RIGHT, HEIGHT - BOTTOM - 8, "A slower →", "end"),
        *(f'<circle class="point" cx="{x.at(a * scale):.1f}" cy="{y.at(b * scale):.1f}" r="3.5"/>' for a, b in points),
        line("axis", LEFT, TOP, LEFT, HEIGHT - BOTTOM),
    ]
    return drawing(parts, f"{label} of each prompt, A against B")
