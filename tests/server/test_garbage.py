"""Requests free their memory when they end: what refers to itself would stay until garbage is collected, which is late
once everything that was loaded is frozen.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import garbage_probe
import pytest


@pytest.mark.full
def test_requests_leave_nothing_to_the_garbage_collector() -> None:
    """256 streams left 19,000 objects in cycles: cancelled tasks and what had started them, writers that were their own
    framing, turns that kept their own method.
    """
    probe = [sys.executable, garbage_probe.__file__]
    support = str(Path(garbage_probe.__file__).parent)
    environment = {**os.environ, "OSTRO_FAULTS": "fake", "PYTHONPATH": support}
    found = json.loads(subprocess.run(probe, env=environment, check=True, stdout=subprocess.PIPE, timeout=300).stdout)
    assert found.keys() == garbage_probe.KINDS.keys()
    assert {name: count for name, count in found.items() if count >= garbage_probe.MANY} == {}
