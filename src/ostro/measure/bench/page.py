"""A benchmark as a self-contained HTML file, with plots by level and of the latency distribution at each level."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from markupsafe import Markup

from ostro.measure.bench.figures import Figures, Spread
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.run import Bench, LevelRun
from ostro.measure.bench.table import overhead, rows
from ostro.measure.report.numbers import percentile
from ostro.measure.report.page import Tile, render
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
from ostro.measure.report.wording import duration, percent, rate

_RANKS = ("p50", "p95", "p99")


def page(bench: Bench) -> str:
    workload, options = bench.options.workload, bench.options
    header, *measures = rows(bench.levels)
    return render(
        "ostro.measure.bench",
        title=f"Benchmark of {workload.model}",
        server=options.url,
        began=bench.began,
        tiles=_tiles(bench),
        notes=bench.notes,
        plots=_plots(bench.levels),
        header=header,
        measures=measures,
        errors=[
            (run.level.name, kind, number, next(each.detail for each in run.outcomes if each.error == kind))
            for run in bench.levels
            for kind, number in run.figures.errors.items()
        ],
        overhead=list(overhead(bench)),
        settings=_settings(bench),
    )


def _tiles(bench: Bench) -> list[Tile]:
    best = max(bench.levels, key=lambda run: run.figures.output_tokens_per_second)
    tiles = [
        Tile(
            rate(best.figures.output_tokens_per_second),
            "output tokens/s at most",
            f"at {best.level.name}, {rate(best.figures.requests_per_second)} requests/s",
        )
    ]
    quickest = min((run for run in bench.levels if run.figures.ttft), key=_median_ttft, default=None)
    if quickest is not None:
        detail = f"median, at {quickest.level.name}"
        tiles.append(Tile(duration(_median_ttft(quickest)), "to the first token at best", detail))
    with_goodput = [run for run in bench.levels if run.figures.goodput is not None]
    if with_goodput:
        run = max(with_goodput, key=_goodput)
        share = run.figures.goodput.share if run.figures.goodput else 0.0
        detail = f"at {run.level.name}, {percent(share)} within the SLO"
        tiles.append(Tile(rate(_goodput(run)), "good requests/s at most", detail))
    failed, asked = (sum(getattr(run.figures, name) for run in bench.levels) for name in ("failed", "requests"))
    tiles.append(Tile(f"{failed:,}", "failed requests", f"of {asked:,}", "bad" if failed else "good"))
    return tiles


def _plots(levels: Sequence[LevelRun]) -> list[tuple[str, Markup, Markup]]:
    kind = levels[0].level.kind
    x_label = {"concurrency": "requests at a time", "rate": "requests/s", "trace": "speed"}[kind]

    def of(cell: Callable[[Figures], float | None]) -> list[tuple[float, float]]:
        return [(run.level.value, value) for run in levels if (value := cell(run.figures)) is not None]

    def ranked(name: str) -> list[Curve]:
        return [(rank, of(partial(_ranked, name=name, rank=rank))) for rank in _RANKS]

    def values(pick: Callable[[Outcome], Sequence[float | None]]) -> list[tuple[str, list[float]]]:
        return [
            (
                run.level.name,
                [value for each in run.outcomes if each.error is None for value in pick(each) if value is not None],
            )
            for run in levels
        ]

    tokens: list[Curve] = [("output", of(lambda found: found.output_tokens_per_second))]
    requests: list[Curve] = [("succeeded", of(lambda found: found.requests_per_second))]
    if good := of(lambda found: found.goodput.requests_per_second if found.goodput else None):
        requests.append(("within the SLO", good))
    names = [run.level.name for run in levels]
    plots = [
        ("Throughput", legend(["output tokens"]), over_levels(tokens, x_label=x_label, y_label="tokens/s")),
        (
            "Requests",
            legend([name for name, _ in requests]),
            over_levels(requests, x_label=x_label, y_label="requests/s"),
        ),
    ]
    for title, name in (("Time to first token", "ttft"), ("Inter-token latency", "itl"), ("Whole answer", "e2e")):
        plots.append(
            (title, legend(_RANKS), over_levels(ranked(name), x_label=x_label, y_label=name.upper(), seconds=True))
        )
    plots += [
        ("Time to first token, spread", legend(names), spread(values(lambda each: [each.ttft]), label="first token")),
        ("Inter-token latency, spread", legend(names), spread(values(lambda each: each.gaps), label="gap")),
        ("Whole answer, spread", legend(names), spread(values(lambda each: [each.e2e]), label="answer")),
    ]
    return [plot for plot in plots if plot[2]]


def _settings(bench: Bench) -> dict[str, str]:
    options, workload = bench.options, bench.options.workload
    prompts = f"{len(workload.items):,} given" if workload.items else f"random, {workload.input_len} tokens"
    found = {
        "endpoint": workload.endpoint,
        "prompts": prompts + (f", {workload.shared_prefix} shared tokens before" if workload.shared_prefix else ""),
        "output tokens": str(workload.output_len),
        "ignore_eos": "yes" if workload.ignore_eos else "no",
        "seed": str(workload.seed),
        "SLO": ", ".join(f"{name} {duration(limit)}" for name, limit in options.slo.limits.items())
        if options.slo
        else "none",
        "load processes": str(options.processes),
    }
    return found | {name.replace("_", " "): str(value) for name, value in bench.machine.items()}


def _ranked(found: Figures, name: str, rank: str) -> float | None:
    spread: Spread | None = getattr(found, name)
    return None if spread is None else float(getattr(spread, rank))


def _median_ttft(run: LevelRun) -> float:
    return run.figures.ttft.p50 if run.figures.ttft else 0.0


def _goodput(run: LevelRun) -> float:
    return run.figures.goodput.requests_per_second if run.figures.goodput else 0.0


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
    parts = [*x_axis(x, f"{label}, {unit_name}"), *_frame(y, "% at or below")]
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
