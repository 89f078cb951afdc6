"""A benchmark as an aligned text table, one column per level."""

from collections.abc import Callable, Iterator, Sequence

from ostro.measure.bench.figures import Figures, Spread
from ostro.measure.bench.run import Bench, LevelRun
from ostro.measure.report.wording import duration, on_one_line, percent, rate

_COLUMNS = 6
_LATENCIES = (
    ("TTFT", "ttft", "to the first token"),
    ("ITL", "itl", "from one event to the next"),
    ("TPOT", "tpot", "per output token after the first"),
    ("E2E", "e2e", "whole answer"),
)
_RANKS = ("mean", "p50", "p95", "p99", "max")


def table(bench: Bench) -> str:
    options = bench.options
    blocks = [[f"{on_one_line(options.url)}, {on_one_line(options.workload.model)}, {options.workload.endpoint}"]]
    for at in range(0, len(bench.levels), _COLUMNS):
        blocks.append(_aligned(rows(bench.levels[at : at + _COLUMNS])))
    blocks += [list(_errors(bench)), list(overhead(bench)), [f"note: {on_one_line(note)}" for note in bench.notes]]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def rows(levels: Sequence[LevelRun]) -> list[tuple[str, ...]]:
    """The header, then a label and each level's figure."""

    def row(label: str, cell: Callable[[Figures], str]) -> tuple[str, ...]:
        return label, *(cell(run.figures) for run in levels)

    def any_has(name: str) -> bool:
        return any(getattr(run.figures, name) is not None for run in levels)

    found = [
        (levels[0].level.kind, *(f"{run.level.value:g}" for run in levels)),
        row("succeeded", lambda each: f"{each.succeeded:,}"),
        row("failed", lambda each: f"{each.failed:,}"),
        row("seconds", lambda each: rate(each.seconds)),
        row("requests/s", lambda each: rate(each.requests_per_second)),
        row("output tokens/s", lambda each: rate(each.output_tokens_per_second)),
    ]
    if any_has("total_tokens_per_second"):
        found.append(row("in+out tokens/s", lambda each: _rate(each.total_tokens_per_second)))
    if any(run.figures.cached_share for run in levels):
        found.append(row("prompt in cache", lambda each: _share(each.cached_share)))
    if any_has("goodput"):
        found.append(
            row("goodput, req/s", lambda each: rate(each.goodput.requests_per_second) if each.goodput else "–")
        )
        found.append(row("within the SLO", lambda each: percent(each.goodput.share) if each.goodput else "–"))
    if any_has("cost"):
        found.append(row("cost/1M output", lambda each: _cost(each, "per_million_output_tokens")))
        found.append(row("cost/1M in+out", lambda each: _cost(each, "per_million_tokens")))
    for label, name, _ in _LATENCIES:
        if any_has(name):
            found += [row(f"{label} {rank}", _ranked(name, rank)) for rank in _RANKS]
    return found


def _ranked(name: str, rank: str) -> Callable[[Figures], str]:
    def cell(figures: Figures) -> str:
        spread: Spread | None = getattr(figures, name)
        return "–" if spread is None else duration(getattr(spread, rank))

    return cell


def _rate(value: float | None) -> str:
    return "–" if value is None else rate(value)


def _cost(figures: Figures, name: str) -> str:
    value: float | None = getattr(figures.cost, name, None)
    return "–" if value is None else f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    first = max(len(row[0]) for row in rows)
    width = max(max(len(cell) for row in rows for cell in row[1:]), 8)
    lines = []
    for row in rows:
        if row[0].endswith("mean"):
            lines.append("")
        lines.append("  ".join([f"{row[0]:<{first}}", *(f"{cell:>{width}}" for cell in row[1:])]))
    return lines


def _errors(bench: Bench) -> Iterator[str]:
    for run in bench.levels:
        for kind, number in run.figures.errors.items():
            detail = next(each.detail for each in run.outcomes if each.error == kind)
            yield f"{run.level.name}: {number:,} failed by {on_one_line(kind)}: {on_one_line(detail)}"


def overhead(bench: Bench) -> Iterator[str]:
    burdens = [burden for run in bench.levels for burden in run.burdens]
    if not burdens:
        # Nobody generated load: it was simulated.
        return
    yield (
        f"load generator: {percent(max(each.cpu_share for each in burdens))} of a core at most, timers "
        f"{duration(max(each.lag_p99 for each in burdens))} late (p99)"
    )
    tested = bench.self_test
    if tested is not None and tested.added_ttft is not None:
        itl = tested.added_itl
        yield (
            f"self-test, {tested.concurrency} streams, {rate(tested.events_per_second)} events/s: adds "
            f"{duration(tested.added_ttft.p50)} to TTFT ({duration(tested.added_ttft.p99)} p99)"
            + ("" if itl is None else f"; ITL off by {duration(itl.p50)} ({duration(itl.p99)} p99)")
        )
