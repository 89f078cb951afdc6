"""The figures over time end with what the files of results say."""

import copy
import json
from pathlib import Path

import bench_history
from bench_history import LEFT_OUT, RESULTS, ROOT, SHOWN, Shown


def test_history_ends_with_what_the_results_are_now() -> None:
    history = bench_history.read()
    updated = bench_history.with_current(copy.deepcopy(history), "now", "today")
    assert updated == history, "run `python tools/bench_history.py`, then `make docs-generate`"


def test_every_file_of_results_is_shown_or_left_out_for_a_reason() -> None:
    there = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.json")}
    assert there == {*SHOWN, *LEFT_OUT}
    assert not SHOWN.keys() & LEFT_OUT.keys()
    assert bench_history.read().keys() == SHOWN.keys()


def test_every_figure_is_in_its_file_and_every_command_in_the_repository() -> None:
    for name, shown in SHOWN.items():
        found = bench_history.extract(shown, json.loads((RESULTS / name).read_text()))
        assert found.keys() == shown.figures.keys(), name
        assert (ROOT / shown.command.split()[1]).is_file(), shown.command


def test_a_row_is_added_where_a_figure_has_changed_and_only_there() -> None:
    history: bench_history.History = {}
    shown = Shown("", "", "", {"a": ("runs",), "b": ("deep", 0, "b")})
    for commit, results in (
        ("1", {"runs": [1, 9, 2]}),
        ("2", {"runs": [2, 2, 2], "other": 1}),
        ("3", {"runs": [2], "deep": [{"b": 12345.6}]}),
        ("4", {"text": "none"}),
    ):
        bench_history._add(history, "x", commit, "then", bench_history.extract(shown, results))
    assert [(row["commit"], row["figures"]) for row in history["x"]] == [
        ("1", {"a": 2.0}),
        ("3", {"a": 2.0, "b": 12350.0}),
    ]


def test_history_has_rows_of_commits_and_dates() -> None:
    for rows in bench_history.read().values():
        assert rows
        assert [row["date"] for row in rows] == sorted(row["date"] for row in rows)
        assert all(len(row["commit"]) >= 8 for row in rows)


def test_program_keeps_its_history_beside_the_results() -> None:
    assert Path(ROOT / "bench" / "history.json") == bench_history.HISTORY
