"""A short form of the HTTP fuzzer, and that it notices what it is for. `make fuzz-http` runs the long one.

In processes of its own: it forks, and a test process has threads.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(SUPPORT), str(HERE), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def fuzz(count: int, *options: str) -> None:
    done = run(str(HERE / "http_fuzzer.py"), "--count", str(count), *options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = done.stdout.splitlines()[-1]
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (plain|refused|read|lenient|left)\b", summary)}
    assert sum(counts.values()) == count, summary
    # Neither is everything refused, nor does everything pass.
    assert min(counts.get(kind, 0) for kind in ("plain", "refused", "read", "left")) > count // 100, summary


@pytest.mark.parametrize(("count", "seed"), [(1500, 1), pytest.param(30_000, 2, marks=pytest.mark.full)])
def test_what_comes_out_of_any_conversation_is_what_was_sent(count: int, seed: int) -> None:
    fuzz(count, "--seed", str(seed))


@pytest.mark.full
def test_what_comes_out_of_any_conversation_over_a_socket_is_what_was_sent() -> None:
    fuzz(320, "--seed", "3", "--sockets")


FAULTY = """
import os, signal, time
import http_fuzzer as fuzzer
from ostro.server.http.protocol import BoundedHttp

{fault}
fuzzer.BATCH, fuzzer.MOST_SECONDS = 8, 0.5
report = fuzzer.fuzz(fuzzer.Cases(0), 64)
print(report)
for finding in report.findings:
    print(finding.splitlines()[0])
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("BoundedHttp.on_body = lambda self, body: None", "came out instead of"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("BoundedHttp._decline_offer = lambda self: 1 / 0", "the protocol raised ZeroDivisionError"),
                ("BoundedHttp.timeout_keep_alive_handler = lambda self: None", "the connection stays open"),
                ("BoundedHttp.on_body = lambda self, body: [None for _ in iter(int, 1)]", "ended by SIGPROF"),
                ("BoundedHttp.on_body = lambda self, body: os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
            )
        ),
    ],
    ids=["lost-body", "exception", "lost-timer", "hang", "signal"],
)
def test_faults_are_found_and_pinned_to_their_cases(fault: str, told: str) -> None:
    done = run("-c", FAULTY.format(fault=fault))
    assert done.returncode == 0, done.stderr
    _, *findings = done.stdout.splitlines()
    assert any(told in finding for finding in findings), done.stdout
    assert all(finding.startswith("--seed 0 --only ") for finding in findings)
