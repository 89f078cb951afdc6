"""The comparison as a self-contained HTML file. Output of models and servers is escaped text, never markup."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from ostro.measure.compare.answers import Answer, Failure, Outcome
from ostro.measure.compare.run import Comparison, SideRun
from ostro.measure.compare.speed import Percentiles
from ostro.measure.compare.wording import agreement_verdict, caveats, prompt_text, ratio, settings, speed_verdict
from ostro.measure.report.page import Tile, render
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
from ostro.measure.report.wording import duration, percent, rate

MOST_ROWS = 200

_SPREAD = "Requests by time: A above, B below, medians dashed."


def report(comparison: Comparison) -> str:
    different, failed = _differences(comparison), _failures(comparison)
    return render(
        "ostro.measure.compare",
        title="A/B comparison",
        sides=[("A", comparison.a), ("B", comparison.b)],
        tiles=_tiles(comparison),
        measures=_measures(comparison),
        plots=_plots(comparison),
        different=different[:MOST_ROWS],
        num_different=len(different),
        num_prompts=len(comparison.prompts),
        failed=failed[:MOST_ROWS],
        left_out=len(different[MOST_ROWS:]) + len(failed[MOST_ROWS:]),
        notes=caveats(comparison),
        settings=settings(comparison),
    )


@dataclass(frozen=True, slots=True)
class _Difference:
    number: int
    prompt: str
    common: str
    """The texts' common prefix."""
    rest_a: str
    rest_b: str
    detail: str


def _tiles(comparison: Comparison) -> list[Tile]:
    found, lead = comparison.summary, comparison.speed_ratio
    a, b = comparison.a.speed, comparison.b.speed
    mood = "good" if found.exact == found.prompts else "bad" if found.exact_share < 0.5 else "fair"
    factor = "–" if lead is None else f"{max(lead, 1 / lead):.2f}×"
    tiles = [
        Tile(percent(found.exact_share), "same output", agreement_verdict(comparison), mood),
        Tile(
            factor,
            speed_verdict(comparison),
            f"{rate(a.tokens_per_second)} against {rate(b.tokens_per_second)} tokens/s",
            "" if lead is None else "lead-a" if lead > 1 else "lead-b",
        ),
    ]
    if found.prefix_share is not None and found.exact < found.prompts:
        tokens = "" if found.prefix_tokens is None else f", {found.prefix_tokens:.1f} tokens"
        detail = f"{found.prefix_chars:.1f} characters{tokens} on average"
        tiles.append(Tile(percent(found.prefix_share), "of the text before the first difference", detail))
    if found.divergence is not None:
        detail = f"{found.divergence.max:.2g} at most, {found.divergence.num_tokens:,} tokens in common"
        tiles.append(Tile(f"{found.divergence.mean:.2g}", "mean difference of log-probabilities", detail))
    if failures := a.failed + b.failed:
        tiles.append(Tile(str(failures), "failed requests", f"A {a.failed}, B {b.failed}", "bad"))
    return tiles


def _measures(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    a, b = comparison.a.speed, comparison.b.speed
    rows = [
        (
            "tokens per second",
            rate(a.tokens_per_second),
            rate(b.tokens_per_second),
            ratio(a.tokens_per_second, b.tokens_per_second, more_is_better=True),
        ),
        (
            "requests per second",
            rate(a.requests_per_second),
            rate(b.requests_per_second),
            ratio(a.requests_per_second, b.requests_per_second, more_is_better=True),
        ),
    ]
    for label, of_a, of_b in (
        ("latency", a.latency, b.latency),
        ("time to first token", a.ttft, b.ttft),
        ("time per token", a.token_seconds, b.token_seconds),
    ):
        for name in ("p50", "p90", "p99"):
            x, y = _value(of_a, name), _value(of_b, name)
            rows.append((f"{label}, {name}", duration(x), duration(y), ratio(x, y)))
    return [*rows, ("tokens generated", f"{a.num_tokens:,}", f"{b.num_tokens:,}", "")]


def _value(values: Percentiles | None, name: str) -> float | None:
    return None if values is None else float(getattr(values, name))


def _plots(comparison: Comparison) -> list[tuple[str, str, Markup]]:
    a, b = _answers(comparison.a), _answers(comparison.b)
    both = [(x.seconds, y.seconds) for x, y in comparison.pairs if isinstance(x, Answer) and isinstance(y, Answer)]
    firsts = ([x.ttft for x in side if x.ttft is not None] for side in (a, b))
    plots = [
        ("Latency", _SPREAD, histogram([x.seconds for x in a], [x.seconds for x in b], label="latency")),
        ("Time to first token", _SPREAD, histogram(*firsts, label="first token")),
        (
            "Latency, prompt by prompt",
            "One dot per prompt; on the line, A and B are equal.",
            scatter(both, label="latency"),
        ),
    ]
    return [plot for plot in plots if plot[2]]


def _answers(side: SideRun) -> list[Answer]:
    return [outcome for outcome in side.outcomes if isinstance(outcome, Answer)]


def _differences(comparison: Comparison) -> list[_Difference]:
    rows = []
    for number, (prompt, found, pair) in enumerate(
        zip(comparison.prompts, comparison.agreements, comparison.pairs, strict=True), 1
    ):
        if found is None or found.exact:
            continue
        (common, rest_a), (_, rest_b) = (_split(outcome, found.prefix_chars) for outcome in pair)
        tokens = "" if found.prefix_tokens is None else f", {found.prefix_tokens} tokens"
        detail = f"common prefix: {found.prefix_chars} characters{tokens}"
        rows.append(_Difference(number, prompt_text(prompt), common, rest_a, rest_b, detail))
    return rows


def _split(outcome: Outcome, at: int) -> tuple[str, str]:
    assert isinstance(outcome, Answer)
    return outcome.text[:at], outcome.text[at:]


def _failures(comparison: Comparison) -> list[tuple[int, str, str, str]]:
    return [
        (number, prompt_text(prompt), name, outcome.error)
        for number, (prompt, pair) in enumerate(zip(comparison.prompts, comparison.pairs, strict=True), 1)
        for name, outcome in zip("AB", pair, strict=True)
        if isinstance(outcome, Failure)
    ]


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
