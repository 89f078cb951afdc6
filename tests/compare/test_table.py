from outcomes import FAILED, comparison

from ostro.measure.compare.table import table
from ostro.measure.compare.wording import ratio
from ostro.measure.report.wording import duration, on_one_line, percent, rate
from ostro.sampling_params import SamplingParams


def test_the_table_is_aligned_and_says_it_in_words() -> None:
    lines = table(comparison([("same", "same"), ("abc", "abd")])).splitlines()
    b = lines[0].index("B")
    assert [lines[row][b:].split("  ")[0] for row in (1, 3, 4)] == ["http://side-b", "2 of 2", "6"]
    assert any(line.startswith("tokens/s") and line.endswith("A 2.00× as fast") for line in lines)
    assert "1 of 2 outputs are the same (50 %). A is 2.00× as fast as B." in lines
    at = lines.index('#2 "prompt 2": different after 2 characters')
    assert lines[at + 1 : at + 3] == ["   A ab│c", "   B ab│d"]
    assert all(line == line.rstrip() for line in lines)


def test_only_some_differences_are_shown() -> None:
    text = table(comparison([("a", "b")] * 8))
    assert text.count("different after") == 5
    assert "and 3 more; --report and --json hold all of them." in text


def test_failures_are_reported_with_their_reason() -> None:
    text = table(comparison([("a", "a"), (FAILED, "a")]))
    assert '#2 "prompt 2": A failed: HTTP 500: out of order' in text
    assert "note: 1 of 2 prompts failed" in text


def test_a_side_that_never_answered_leaves_gaps() -> None:
    text = table(comparison([(FAILED, "a")]))
    assert "Speed cannot be compared" in text
    assert "0 of 1 outputs are the same (0 %)" in text


def test_sampling_triggers_a_warning() -> None:
    sampled = SamplingParams(max_tokens=3, temperature=0.5, seed=1)
    assert "Compare exactly at temperature 0" in table(comparison([("a", "a")], params=sampled))
    assert "note:" not in table(comparison([("a", "a")]))


def test_a_models_words_cannot_drive_the_terminal() -> None:
    hostile = "\x1b[2Jx\x07\u202e\r\u2028"
    text = table(comparison([(hostile, "y")], prompts=[hostile], model=hostile))
    assert not {"\x1b", "\x07", "\u202e", "\r", "\u2028"} & set(text)
    assert "‹U+001B›[2Jx" in text


def test_figures_are_short() -> None:
    assert [duration(value) for value in (None, 0.00123, 0.9996, 11.0, 123.4)] == [
        "–",
        "1.23 ms",
        "1.00 s",
        "11.0 s",
        "123 s",
    ]
    assert [rate(value) for value in (7.656, 20, 1234.5)] == ["7.66", "20.0", "1,234"]
    assert [percent(value) for value in (0, 0.0001, 0.5, 0.9999, 1)] == ["0 %", "0.1 %", "50 %", "99.9 %", "100 %"]
    assert [ratio(1, 2), ratio(2, 1), ratio(2, 1, more_is_better=True)] == [
        "A 2.00× as fast",
        "B 2.00× as fast",
        "A 2.00× as fast",
    ]
    assert [ratio(1, 1.01), ratio(None, 1), ratio(0, 1)] == ["about equal", "", ""]
    assert on_one_line("a\n\tb\r\n") == "a⏎ b⏎"
