"""Engines measured by turns: scripts stand for the engines, and a list of times for the clock."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from cpu_peers.machine import choose_cpus
from cpu_peers.quiet import Counters, Disturbance, counters
from cpu_peers.rounds import (
    AGAIN,
    LLAMA,
    OSTRO,
    READ,
    Comparison,
    Measured,
    Plan,
    Side,
    Task,
    compare,
    in_turn,
    quartiles,
    table,
)
from cpu_peers.shapes import former_sources

PREFILL, ONE, EIGHT = Task(4, decodes=False), Task(1, decodes=True), Task(8, decodes=True)
QUIET, BUSY = Disturbance(0.0, 0.01), Disturbance(0.0, 0.3)
# A side whose prompt takes 0.5 s, and a step as long as its argument says; it writes down what it is asked.
SCRIPT = """
import json, sys
print("noise\\n" + json.dumps({"about": "script"}), flush=True)
for line in sys.stdin:
    print(line, end="", file=open(sys.argv[2], "a"))
    words = line.split()
    took = 0.5 if words[0] == "prefill" else float(sys.argv[1]) * int(words[2])
    print(json.dumps({"seconds": took}), flush=True)
"""


def script(name: str, step: float, log: Path, takes: Callable[[Task], bool] = lambda _: True) -> Side:
    return Side(name, [sys.executable, "-c", SCRIPT, str(step), str(log)], takes=takes)


def plan(rounds: int = 3) -> Plan:
    return Plan(tasks=[PREFILL, ONE, EIGHT], input=128, seconds=1.0, most_steps=64, rounds=rounds)


def test_every_side_computes_as_many_steps_and_the_slowest_says_how_many(tmp_path: Path) -> None:
    log = tmp_path / "log"
    comparisons = [Comparison("135m q4_0", task, {}) for task in plan().tasks]
    with ExitStack() as stack:
        sides = [stack.enter_context(script(name, step, log)) for name, step in ((OSTRO, 0.05), (LLAMA, 0.1))]
        assert list(compare(comparisons, sides, plan(), 100.0, count().__next__)) == [1, 2, 3]
    warm = ["prefill 4"] * 2 + ["decode 1 4"] * 2 + ["decode 8 4"] * 2
    measured = ["prefill 4"] * 2 + ["decode 1 10"] * 2 + ["decode 8 10"] * 2
    assert log.read_text().splitlines() == warm + 3 * measured
    assert [each.speeds for each in comparisons[2].measured] == [
        {OSTRO: pytest.approx(160), LLAMA: pytest.approx(80)}
    ] * 3
    assert comparisons[0].measured[0].speeds == {OSTRO: 1024, LLAMA: 1024}


def test_no_round_is_begun_that_would_outlast_the_time(tmp_path: Path) -> None:
    comparisons = [Comparison("135m q4_0", ONE, {})]
    with script(OSTRO, 0.1, tmp_path / "log") as side:
        # The clock: at the start, then at the beginning and the end of each round.
        clock = iter([0.0, 0.0, 10.0, 10.0, 21.0, 21.0, 29.0]).__next__
        assert list(compare(comparisons, [side], plan(rounds=9), 30.0, clock)) == [1, 2]
        assert len(comparisons[0].measured) == 2


def test_first_round_is_measured_however_little_time_there_is(tmp_path: Path) -> None:
    comparisons = [Comparison("135m q4_0", ONE, {})]
    with script(OSTRO, 0.1, tmp_path / "log") as side:
        assert list(compare(comparisons, [side], plan(), 0.0, count().__next__)) == [1]


def test_side_is_asked_only_for_what_it_takes(tmp_path: Path) -> None:
    log = tmp_path / "read"
    comparisons = [Comparison("135m q4_0", task, {}) for task in (PREFILL, ONE)]
    with ExitStack() as stack:
        sides = [
            stack.enter_context(script(OSTRO, 0.1, tmp_path / "log")),
            stack.enter_context(script(READ, 0.08, log, lambda task: task == ONE)),
        ]
        list(compare(comparisons, sides, plan(1), 1.0, count().__next__))
    assert log.read_text().split()[0] == "decode"
    assert comparisons[0].ratios(READ) == []
    assert comparisons[1].ratios(READ) == [pytest.approx(0.8)]


def test_side_that_ends_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"llama\.cpp ended with status 3"):
        Side(LLAMA, [sys.executable, "-c", "raise SystemExit(3)"]).__enter__()


@pytest.mark.parametrize("number", [2, 3, 4])
def test_each_side_is_as_often_before_any_other_as_after_it(number: int) -> None:
    sides = [Side(str(each), []) for each in range(number)]
    orders = [[side.name for side in in_turn(sides, turn)] for turn in range(2 * number)]
    for one in map(str, range(number)):
        assert sum(order[0] == one for order in orders) == 2
        for other in map(str, range(number)):
            if one != other:
                assert sum(order.index(one) < order.index(other) for order in orders) == number


# --- what is made of the rounds -------------------------------------------------------------------------------------


def measured(ours: float, theirs: float, disturbance: Disturbance = QUIET) -> Measured:
    return Measured({OSTRO: ours, LLAMA: theirs}, disturbance)


def test_ratios_are_those_within_a_round() -> None:
    """The ratio of the medians would be 2."""
    comparison = Comparison("1b q4_0", ONE, {LLAMA: 1.4}, [measured(10, 10), measured(20, 20), measured(30, 10)])
    assert comparison.ratios(LLAMA) == [1, 1, 3]
    assert comparison.met(LLAMA) is False
    assert comparison.met(AGAIN) is None


def test_disturbed_rounds_count_only_where_none_is_quiet() -> None:
    comparison = Comparison("1b q4_0", ONE, {LLAMA: 1.2}, [measured(10, 20, BUSY), measured(30, 20)])
    assert comparison.ratios(LLAMA) == [1.5]
    assert "1 of 2" in table([comparison])
    restless = Comparison("1b q4_0", ONE, {LLAMA: 1.2}, [measured(10, 20, BUSY)])
    assert restless.ratios(LLAMA) == [0.5]
    assert table([restless]).endswith("0 of 1 bars met; 1 of 1 lines have no quiet round, and count disturbed ones")


def test_quartiles_surround_the_median() -> None:
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)
    assert quartiles([7]) == (7, 7, 7)


def test_table_shows_ratios_with_their_quartiles_and_leaves_out_what_was_not_measured() -> None:
    of_one = Comparison("1b q4_0", ONE, {LLAMA: 1.2, READ: 0.85})
    of_one.measured = [Measured({OSTRO: 1000 + each, LLAMA: 500, READ: 1250}, QUIET) for each in (0, 50, 100)]
    head, first, count = table([of_one, Comparison("1b q8_0", ONE, {LLAMA: 1.2})]).splitlines()
    assert "Ostro / llama.cpp" in head
    assert "again" not in head
    assert first.split("  ")[0] == "1b q4_0, 1 stream"
    assert "1,050" in first
    assert "2.10 [2.05–2.15]" in first
    assert "NO (≥ 0.85)" in first
    assert count == "1 of 2 bars met"


# --- the machine ----------------------------------------------------------------------------------------------------


def proc(directory: Path, steal: int, waited: int) -> Path:
    (directory / "pressure").mkdir(parents=True, exist_ok=True)
    (directory / "stat").write_text(f"cpu  10 0 10 1000 0 0 0 {steal} 0 0\ncpu0 5 0 5 500 0 0 0 0 0 0\n")
    (directory / "pressure" / "cpu").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited}\n")
    return directory


def test_disturbance_is_the_share_of_time_stolen_and_waited(tmp_path: Path) -> None:
    ticks, cpus = os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
    before = counters(proc(tmp_path, 0, 1_000_000), lambda: 100.0)
    after = counters(proc(tmp_path, ticks * cpus, 2_000_000), lambda: 110.0)
    disturbance = before.until(after)
    assert disturbance.stolen == pytest.approx(0.1)
    assert disturbance.pressure == pytest.approx(0.1)
    assert not disturbance.quiet


def test_machine_that_tells_nothing_counts_as_quiet(tmp_path: Path) -> None:
    before, after = (counters(tmp_path, lambda at=at: at) for at in (0.0, 1.0))  # type: ignore[misc]
    assert before == Counters(0.0, None, None)
    assert before.until(after) == Disturbance(None, None)
    assert before.until(after).quiet


def test_threads_get_cores_of_their_own_first(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,4", "1,5", "2,6", "3,7") * 2):
        (topology := tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert choose_cpus(4, range(8), tmp_path) == [0, 1, 2, 3]
    assert choose_cpus(4, [0, 4, 1, 5, 6], tmp_path) == [0, 1, 4, 6]
    assert choose_cpus(3, range(8), tmp_path / "nothing") == [0, 1, 2]


# --- programs -------------------------------------------------------------------------------------------------------


def test_archive_of_another_ostro_is_unpacked_once(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    native = checkout / "src" / "ostro" / "kernels" / "cpu"
    native.mkdir(parents=True)
    (native / "libostro_native.so").write_bytes(b"")
    archive = tmp_path / "former.tar"
    with tarfile.open(archive, "w") as file:
        file.add(checkout / "src", "src")
    (work := tmp_path / "work").mkdir()
    sources = former_sources(archive, work)
    assert (sources / "ostro" / "kernels" / "cpu" / "libostro_native.so").is_file()
    assert former_sources(archive, work) == sources
    assert former_sources(checkout, work) == checkout / "src"
    with pytest.raises(FileNotFoundError, match="holds no src/ostro"):
        former_sources(native, work)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_plain_read_answers_as_a_side(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "bench" / "cpu_peers" / "read_bandwidth.cpp"
    program = tmp_path / "read-bandwidth"
    subprocess.run(["c++", "-O1", "-std=c++17", "-pthread", str(source), "-o", str(program)], check=True)
    with Side(READ, [str(program), str(1 << 20), "2"]) as side:
        assert 0 < side.seconds(ONE, 3) < 60


@pytest.mark.full
def test_table_is_printed_when_a_signal_ends_the_benchmark(tmp_path: Path) -> None:
    """llama.cpp is a script that ends the benchmark in the second round."""
    llama = tmp_path / "llama-turns"
    killing = f"""#!{sys.executable}
import json, os, signal, sys
print(json.dumps({{"about": "killer"}}), flush=True)
for number, line in enumerate(sys.stdin):
    if number == 4:
        os.kill(os.getppid(), signal.SIGTERM)
        sys.stdin.read()  # until it has ended
    print(json.dumps({{"seconds": 0.25}}), flush=True)
"""
    llama.write_text(killing)
    llama.chmod(0o755)
    # The smallest shape: its file takes a second to write.
    options = ["--variants", "q4_0", "--streams", "1", "--prompts", "1", "--input", "8", "--output", "4"]
    ran = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).parents[2] / "bench" / "cpu.py"), "135m", *options),
            *("--llama", str(tmp_path), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")),
            *("--no-control", "--threads", "1"),
        ],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 128 + signal.SIGTERM, ran.stderr
    assert "135m q4_0, prefill" in ran.stdout
    assert "135m q4_0, prefill" in (tmp_path / "out" / "rounds.txt").read_text()
