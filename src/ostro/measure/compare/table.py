"""The comparison as aligned plain text for a terminal."""

from collections.abc import Callable, Iterator

from ostro.measure.compare.answers import Answer, Failure, Outcome
from ostro.measure.compare.run import Comparison, SideRun
from ostro.measure.compare.speed import Percentiles
from ostro.measure.compare.wording import agreement_verdict, caveats, prompt_text, ratio, speed_verdict
from ostro.measure.report.wording import duration, on_one_line, percent, rate, shortened

_SHOWN = 5
_WIDEST = 44


def table(comparison: Comparison) -> str:
    blocks = [_sides(comparison), _agreement(comparison), _differences(comparison), _failures(comparison)]
    notes = [f"note: {note}" for note in caveats(comparison)]
    return "\n\n".join("\n".join(lines) for lines in [*map(list, blocks), notes] if lines)


def _sides(comparison: Comparison) -> list[str]:
    a, b = comparison.a, comparison.b

    def row(label: str, cell: Callable[[SideRun], str], better: str = "") -> tuple[str, str, str, str]:
        return label, cell(a), cell(b), better

    rows = [
        ("", "A", "B", ""),
        row("side", lambda side: shortened(on_one_line(side.reference), _WIDEST)),
        row("model", lambda side: shortened(on_one_line(side.model) or "–", _WIDEST)),
        row("answered", lambda side: f"{side.speed.answered} of {len(side.outcomes)}"),
        row("tokens", lambda side: f"{side.speed.num_tokens:,}"),
        row(
            "tokens/s",
            lambda side: rate(side.speed.tokens_per_second),
            ratio(a.speed.tokens_per_second, b.speed.tokens_per_second, more_is_better=True),
        ),
        row("requests/s", lambda side: rate(side.speed.requests_per_second)),
        ("", *[f"{'p50':<9} {'p90':<9} p99"] * 2, "p50"),
        row("latency", lambda side: _three(side.speed.latency), _median(a.speed.latency, b.speed.latency)),
        row("first token", lambda side: _three(side.speed.ttft), _median(a.speed.ttft, b.speed.ttft)),
        row(
            "per token",
            lambda side: _three(side.speed.token_seconds),
            _median(a.speed.token_seconds, b.speed.token_seconds),
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]


def _agreement(comparison: Comparison) -> Iterator[str]:
    found = comparison.summary
    yield f"{agreement_verdict(comparison)} ({percent(found.exact_share)}). {speed_verdict(comparison)}."
    if found.prefix_share is not None:
        tokens = "" if found.prefix_tokens is None else f" or {found.prefix_tokens:.1f} tokens"
        yield (
            f"The common prefix is {percent(found.prefix_share)} of the text, {found.prefix_chars:.1f} characters"
            f"{tokens} on average."
        )
    if found.divergence is not None:
        yield (
            f"Log-probabilities of those tokens differ by {found.divergence.mean:.2g} on average, "
            f"{found.divergence.max:.2g} at most ({found.divergence.num_tokens:,} tokens)."
        )


def _differences(comparison: Comparison) -> Iterator[str]:
    different = [
        (number, found.prefix_chars, pair)
        for number, (found, pair) in enumerate(zip(comparison.agreements, comparison.pairs, strict=True))
        if found is not None and not found.exact
    ]
    for number, prefix, (a, b) in different[:_SHOWN]:
        yield f"#{number + 1} {_prompt(comparison, number)}: different after {prefix} characters"
        yield f"   A {_from(a, prefix)}"
        yield f"   B {_from(b, prefix)}"
    if len(different) > _SHOWN:
        yield f"and {len(different) - _SHOWN} more; --report and --json hold all of them."


def _failures(comparison: Comparison) -> Iterator[str]:
    failed = [
        (number, name, outcome.error)
        for number, pair in enumerate(comparison.pairs)
        for name, outcome in zip("AB", pair, strict=True)
        if isinstance(outcome, Failure)
    ]
    for number, name, error in failed[:_SHOWN]:
        yield f"#{number + 1} {_prompt(comparison, number)}: {name} failed: {on_one_line(error)}"
    if len(failed) > _SHOWN:
        yield f"and {len(failed) - _SHOWN} more failures."


def _prompt(comparison: Comparison, number: int) -> str:
    return f'"{shortened(on_one_line(prompt_text(comparison.prompts[number])), 40)}"'


def _from(outcome: Outcome, prefix: int) -> str:
    """The answer, starting a little before the first difference."""
    assert isinstance(outcome, Answer)
    start = max(prefix - 12, 0)
    text = ("…" if start else "") + outcome.text[start:prefix] + "│" + outcome.text[prefix:]
    return shortened(on_one_line(text), 90)


def _three(values: Percentiles | None) -> str:
    if values is None:
        return "–"
    return f"{duration(values.p50):<9} {duration(values.p90):<9} {duration(values.p99)}"


def _median(a: Percentiles | None, b: Percentiles | None) -> str:
    return "" if a is None or b is None else ratio(a.p50, b.p50)
