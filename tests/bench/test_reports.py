"""The table and the page of runs that never were."""

from html.parser import HTMLParser

import pytest

from ostro.measure.bench.figures import Slo, figures
from ostro.measure.bench.jobs import Burden, Level
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.page import page
from ostro.measure.bench.run import Bench, BenchOptions, LevelRun
from ostro.measure.bench.table import table
from ostro.measure.bench.workload import Span, Workload

HOSTILE = "<script>alert(1)</script>\x1b[2J{{ 7 * 7 }}"
BURDEN = Burden(cpu_share=0.25, lag_mean=0.001, lag_p99=0.002, lag_max=0.003)


def outcome(index: int, *, error: str | None = None, detail: str = "") -> Outcome:
    return Outcome(
        index=index,
        start=index * 0.1,
        e2e=0.5,
        arrivals=[] if error else [0.1, 0.2, 0.3],
        input_tokens=8,
        output_tokens=3,
        max_tokens=3,
        error=error,
        detail=detail,
    )


def made(num_levels: int = 2, *, model: str = "m", outcomes: list[Outcome] | None = None) -> Bench:
    levels = [Level(kind="concurrency", value=2.0**n, number=n, requests=4) for n in range(num_levels)]
    slo = Slo.parsed("ttft=500ms")
    found = [outcome(index) for index in range(4)] if outcomes is None else outcomes
    return Bench(
        options=BenchOptions(
            url="http://host",
            headers={},
            workload=Workload(model=model, output_len=Span(3, 3)),
            levels=levels,
            timeout=1.0,
            processes=1,
            slo=slo,
            self_test=False,
        ),
        machine={"cores": 2},
        began="2030-01-01T00:00:00Z",
        levels=[
            LevelRun(level=level, figures=figures(found, slo=slo), burdens=[BURDEN], outcomes=found) for level in levels
        ],
        self_test=None,
        notes=[],
        whole=True,
    )


class Tags(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)


def test_table_has_a_column_for_each_level() -> None:
    lines = table(made(2)).splitlines()
    cells = {line.split("  ")[0].strip(): line.split()[-2:] for line in lines if line}
    assert cells["concurrency"] == ["1", "2"]
    assert cells["succeeded"] == ["4", "4"]
    assert [line.split() for line in lines if line.startswith("TTFT p50")] == [["TTFT", "p50", *["100", "ms"] * 2]]
    assert cells["output tokens/s"] == ["15.0", "15.0"]


def test_many_levels_are_shown_in_blocks() -> None:
    header = [line.split()[1:] for line in table(made(8)).splitlines() if line.startswith("concurrency")]
    assert header == [["1", "2", "4", "8", "16", "32"], ["64", "128"]]


@pytest.mark.cases(5)
@pytest.mark.parametrize("outcomes", [None, [outcome(0)], [outcome(0, error="timeout", detail="slow")]])
@pytest.mark.parametrize("num_levels", [1, 3, 9])
def test_page_and_table_bear_few_and_many(num_levels: int, outcomes: list[Outcome] | None) -> None:
    found = made(num_levels, outcomes=outcomes)
    assert table(found)
    # Without an answer there is nothing to plot but that there was none.
    assert Tags(page(found)).seen.count("svg") == (2 if outcomes and outcomes[0].error else 8)


def test_what_servers_say_is_text() -> None:
    outcomes = [outcome(0), outcome(1, error=f"HTTP 500 {HOSTILE}", detail=HOSTILE)]
    found = made(model=HOSTILE, outcomes=outcomes)
    assert "script" not in Tags(page(found)).seen
    assert "\x1b" not in page(found)
    assert "\x1b" not in table(found)
    assert "{{ 7 * 7 }}" in page(found)
