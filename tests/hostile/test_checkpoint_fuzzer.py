"""Short forms of the fuzzers of models' files, and that they notice what they are for. `make fuzz-checkpoints` and
`make fuzz-tokenizers` run the long ones.

In processes of its own: it forks, and a test process has threads.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_models import needs_library

pytestmark = needs_library
HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"


def run(*command: str, seconds: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(SUPPORT), str(HERE), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def fuzz(
    count: int, seed: int, *, seconds: float, outcomes: tuple[str, ...], program: str = "checkpoint_fuzzer.py"
) -> None:
    done = run(str(HERE / program), "--count", str(count), "--seed", str(seed), seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith(f"{count} cases in ")
    assert summary.endswith("; 0 findings")
    # Neither is everything refused, nor does everything pass.
    assert all(f" {outcome}" in summary for outcome in outcomes), summary


# Models that only torch runs are too few for one to be among these whatever families there are.
@pytest.mark.full
@pytest.mark.parametrize(("count", "seed"), [(40, 15), pytest.param(150, 16, marks=pytest.mark.full)])
def test_mutated_checkpoints_are_refused_or_right(count: int, seed: int) -> None:
    fuzz(count, seed=seed, seconds=300, outcomes=("refused", "right", "same"))


@pytest.mark.full
def test_mutated_encoders_are_refused_or_embed() -> None:
    fuzz(100, seed=18, seconds=300, outcomes=("refused", "torch", "native"), program="encoder_fuzzer.py")


@pytest.mark.parametrize(("count", "seed"), [(60, 19), pytest.param(600, 20, marks=pytest.mark.full)])
def test_mutated_tokenizers_are_refused_or_encode(count: int, seed: int) -> None:
    fuzz(count, seed=seed, seconds=300, outcomes=("refused", "same", "other"), program="tokenizer_fuzzer.py")


@pytest.mark.slow
def test_thousands_of_mutated_checkpoints_are_refused_or_right() -> None:
    fuzz(5000, seed=17, seconds=1800, outcomes=("refused", "right", "same", "torch"))


@pytest.mark.full
def test_a_signal_a_hang_and_an_untyped_error_are_pinned_to_their_cases() -> None:
    program = """
import os, signal, time
import checkpoint_fuzzer as fuzzer

real = fuzzer.Bench._run

def faulty(self, subject, directory, **how):
    number = self.number
    if number == 3:
        # As SIGSEGV would; that one a sanitizer makes into an abort.
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        time.sleep(600)
    if number == 7:
        {}["nothing"]
    return real(self, subject, directory, **how)

def outcome(self, number):
    self.number = number
    return whole(self, number)

whole, fuzzer.Bench.outcome = fuzzer.Bench.outcome, outcome
fuzzer.Bench._run, fuzzer.MOST_SECONDS = faulty, 10
report = fuzzer.fuzz(12, 0)
print(report.num_cases)
for finding in report.findings:
    print(finding.splitlines()[0], "|", finding.splitlines()[-1])
"""
    done = run("-c", program, seconds=120)
    count, *findings = done.stdout.splitlines()
    assert count == "12", done.stderr
    assert [finding.split(" (")[0] for finding in findings] == [f"--seed 0 --only {number}" for number in (3, 5, 7)]
    assert findings[0].endswith("ended by SIGKILL")
    assert findings[1].endswith("ended by SIGALRM")
    assert findings[2].endswith("KeyError: 'nothing'")
