"""A benchmark as a self-contained HTML file."""

from collections.abc import Callable, Sequence
from functools import partial

from markupsafe import Markup

from ostro.measure.bench.figures import Figures, Spread
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.plots import Curve, legend, over_levels, spread
from ostro.measure.bench.run import Bench, LevelRun
from ostro.measure.bench.table import overhead, rows
from ostro.measure.report.page import Tile, render
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
