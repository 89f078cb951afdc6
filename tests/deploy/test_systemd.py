"""The systemd unit: read by systemd where it is installed, and held to what the server does."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest
from checkout import ENGINE_STOP_SECONDS, ROOT, known_variables

UNIT = ROOT / "deploy" / "systemd" / "ostro.service"


def _values(section: str, key: str) -> list[str]:
    """All that a key is given; it may be given several times."""
    found: list[str] = []
    current = ""
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = line.strip("[]")
        elif current == section and line.startswith(f"{key}="):
            found.append(line.partition("=")[2])
    return found


def _environment() -> dict[str, str]:
    return {key: value for line in _values("Service", "Environment") for key, _, value in _pairs(line)}


def _pairs(line: str) -> list[tuple[str, str, str]]:
    return [word.partition("=") for word in line.split()]


def test_systemd_reads_it(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd is not installed")
    # The program is not there on this machine, and systemd looks for it.
    program = "/bin/true"
    unit = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    assert "/opt/ostro/.venv/bin/ostro serve" in text
    unit.write_text(text.replace("/opt/ostro/.venv/bin/ostro serve", f"{program} serve"), encoding="utf-8")
    result = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_it_is_well_formed() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    assert parser.sections() == ["Unit", "Service", "Install"]


def test_variables_are_known() -> None:
    assert set(_environment()) <= known_variables()


def test_requests_under_way_have_time_to_end_and_engines_are_left_to_the_server() -> None:
    [timeout], [mode], [number] = (_values("Service", key) for key in ("TimeoutStopSec", "KillMode", "KillSignal"))
    assert float(timeout) >= float(_environment()["OSTRO_DRAIN_TIMEOUT"]) + ENGINE_STOP_SECONDS
    # Otherwise engines get the signal too.
    assert (mode, number) == ("mixed", "SIGTERM")


def test_it_writes_to_its_own_directories_alone() -> None:
    assert _values("Service", "ProtectSystem") == ["strict"]
    assert _values("Service", "DynamicUser") == ["yes"]
    for name in ("OSTRO_CACHE", "HF_HOME", "TRITON_CACHE_DIR"):
        assert _environment()[name].startswith("%C/" + _values("Service", "CacheDirectory")[0])


def test_sandbox_allows_what_torch_needs() -> None:
    """It makes code at run time, and a GPU is a device."""
    assert _values("Service", "MemoryDenyWriteExecute") == []
    assert _values("Service", "PrivateDevices") == []
