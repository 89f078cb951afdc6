"""A short form of `make soak`, and whether what it checks can fail."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from model_directory import write_model
from native_models import needs_library
from soak import Ledger, Options, check_growth, run
from soak_cases import Answer
from soak_watch import Holdings, growth

SHORT = Options(
    hours=0.0,
    rate=5.0,
    round_seconds=4.0,
    fault_seconds=0.5,
    cases=8,
    seed=0,
    model=None,
    adapters=False,
    max_growth=5_000_000,
    report=None,
)


@pytest.mark.full
@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_soak_of_a_few_seconds_finds_nothing_wrong(tmp_path: Path) -> None:
    steady = write_model(tmp_path / "steady", seed=9)
    ledger = run(replace(SHORT, hours=4 / 3600, model=str(steady)), tmp_path)
    assert ledger.violations == []
    assert ledger.counts["kill"] >= 1
    assert any(name.startswith("attack") for name in ledger.counts)
    assert len(ledger.server) >= 1


def test_answer_that_differs_in_a_letter_a_reason_or_a_score_is_wrong() -> None:
    right = Answer(("one", "two"), ("stop", "length"))
    assert right.agrees(Answer(("one", "two"), ("stop", "length")))
    assert not right.agrees(Answer(("one", "too"), ("stop", "length")))
    assert not right.agrees(Answer(("one", "two"), ("stop", "stop")))
    assert not right.agrees(Answer(("one",), ("stop",)))
    assert not Answer(scores=(-1.0,)).agrees(Answer(scores=(-1.1,)))
    assert not Answer(scores=(-1.0,)).agrees(Answer(scores=(-1.0, -2.0)))


def test_client_that_hangs_up_has_read_a_prefix_of_the_right_answer() -> None:
    whole = Answer(("one two", "three"), ("stop", "stop"))
    assert Answer(("one", "")).begins(whole)
    assert not Answer(("two",)).begins(whole)
    assert not Answer(("one", "thou")).begins(whole)
    assert not Answer(("one", "", "x")).begins(whole)


def test_growth_is_from_after_the_warm_up_to_the_end_and_one_odd_value_is_no_growth() -> None:
    assert growth([0, 50, 100, 100, 100, 100, 100, 100, 100, 100]) == 0
    assert growth([100, 100, 100, 100, 100, 100, 100, 100, 900, 100]) == 0
    assert growth([0, 0, 10, 20, 30, 40, 50, 60, 70, 80]) == 50
    assert growth([1]) == 0


def test_process_that_grows_is_a_violation() -> None:
    ledger = Ledger()
    ledger.server = [Holdings(10_000_000 + 1_000_000 * at, 20, 5) for at in range(10)]
    ledger.steady = [Holdings(10_000_000, 20 + at, 5) for at in range(10)]
    check_growth(ledger, max_growth=5_000_001)
    [leak] = ledger.violations
    assert "steady: descriptors grew by 5" in leak
    check_growth(ledger, max_growth=4_999_999)
    assert any("server: anonymous_bytes grew by 5000000" in violation for violation in ledger.violations)
