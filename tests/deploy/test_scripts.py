"""scripts/run_server.sh and .ps1: one command from a checkout to a server."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import ROOT, install_script, mark_as_installed

from ostro.server.settings import ALIASES

SHELL = ROOT / "scripts" / "run_server.sh"
POWERSHELL = ROOT / "scripts" / "run_server.ps1"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """For the script to find everything installed, in a place of the test's own."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    program = venv / "bin" / "ostro"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ostro "$@"\n')
    program.chmod(0o755)
    mark_as_installed(venv)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {"OSTRO_VENV": str(venv), "PYTHONPATH": str(ROOT / "src")}


def _run(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SHELL, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_arguments_and_variables_reach_the_server_from_any_directory(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    environment |= {"AIOS_DEVICE": "cpu", "AIOS_MAX_BATCH_SIZE": "3", "AIOS_MODEL_PATH": "./a model"}
    mark_as_installed(Path(environment["OSTRO_VENV"]), "torch")
    result = _run("--print-config", "--port", "9123", cwd=tmp_path, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"^port: 9123 +# --port$", result.stdout, re.MULTILINE)
    assert re.search(r"^max_batch_seqs: 3 +# AIOS_MAX_BATCH_SIZE in the environment$", result.stdout, re.MULTILINE)
    assert re.search(r"^device: .*cpu.* +# AIOS_DEVICE in the environment$", result.stdout, re.MULTILINE)
    assert "./a model" in result.stdout


@pytest.mark.full
def test_script_runs_from_a_path_with_spaces(tmp_path: Path, environment: dict[str, str]) -> None:
    linked = tmp_path / "my projects"
    linked.symlink_to(ROOT)
    script = linked / "scripts" / "run_server.sh"
    result = subprocess.run([script, "--help"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert result.returncode == 0


@pytest.mark.full
def test_a_signal_reaches_the_server_itself(tmp_path: Path, environment: dict[str, str]) -> None:
    environment |= {"OSTRO_FAULTS": "fake", "PORT": "0", "OSTRO_LOG_FORMAT": "json"}
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen([SHELL], cwd=tmp_path, env=environment, stdout=sink, stderr=sink)
    try:
        deadline = time.monotonic() + 60
        while '"listening"' not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert '"stopped"' in log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def noting(environment: dict[str, str], tmp_path: Path) -> Path:
    """The file in which pip's stand-in in that environment notes what it is to install. No server is started there."""
    venv = Path(environment["OSTRO_VENV"])
    (venv / "bin" / "ostro").write_text("#!/bin/sh\n")
    noted = tmp_path / "installed"
    noted.write_text("")
    python = venv / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" != -m ]; then exec "{sys.executable}" "$@"; fi\nprintf "%s\\n" "$@" >>"{noted}"\n'
    )
    python.chmod(0o755)
    for name in ("pip", "torch"):
        pinned = install_script().Project().pinned(name)
        (venv / "lib" / "python3" / "site-packages" / f"{name}-{pinned}.dist-info").mkdir(parents=True)
    return noted


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("arguments", "variables", "dotenv", "installed"),
    [
        ((), {"GCS_BUCKET": "b"}, "", {"google-cloud-storage"}),
        ((), {}, "# OSTRO_MODELS=s3://no\nexport GCS_BUCKET=b\n", {"google-cloud-storage"}),
        (("--models", "s3://b/models"), {}, "", {"boto3"}),
        (("--otlp-endpoint", "http://localhost:4318"), {}, "", {"opentelemetry-sdk"}),
        ((), {"OSTRO_CHECKPOINT_PATH": "runs/x"}, "", {"tensorstore"}),
        (("--checkpoint-path", "gs://b/runs/x"), {}, "", {"tensorstore", "google-cloud-storage"}),
        (("--config", "my.yaml"), {}, "", {"tensorstore"}),
        (("--device", "cuda"), {}, "", {"torch"}),
        (("--backend=torch",), {}, "", {"torch"}),
        ((), {"AIOS_MODEL_PATH": "./my-brain"}, "", {"torch"}),
        (("--device", "cpu"), {}, "", set()),
        (("--port", "1"), {"GCS_BUCKET": ""}, "", set()),
    ],
)
def test_what_the_settings_need_is_installed_once(
    tmp_path: Path,
    environment: dict[str, str],
    noting: Path,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    dotenv: str,
    installed: set[str],
) -> None:
    (tmp_path / ".env").write_text(dotenv)
    (tmp_path / "my.yaml").write_text("checkpoint_path: runs/x\n")
    environment |= variables
    result = _run(*arguments, cwd=tmp_path, env=environment)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    known = {"google-cloud-storage", "boto3", "opentelemetry-sdk", "tensorstore", "torch"}
    names = {re.split("[>;]", line)[0] for line in noting.read_text().splitlines()}
    assert names & known == installed
    noting.write_text("")
    assert _run(*arguments, cwd=tmp_path, env=environment).returncode == 0
    assert noting.read_text() == ""


def test_an_old_python_is_refused_before_anything_is_made(tmp_path: Path, environment: dict[str, str]) -> None:
    venv = tmp_path / "none"
    result = _run(cwd=tmp_path, env=environment | {"OSTRO_VENV": str(venv), "PYTHON": "false"})
    assert result.returncode == 1
    assert "false is not Python 3.11 or later" in result.stderr
    assert not venv.exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_installs_once(tmp_path: Path) -> None:
    """From nothing, with the network; the second time without."""
    environment = os.environ | {"OSTRO_VENV": str(tmp_path / "venv"), "PYTHON": sys.executable}
    first = _run("--print-config", cwd=tmp_path, env=environment)
    assert first.returncode == 0, first.stderr
    mark = tmp_path / "venv" / "ostro-installed.json"
    installed = mark.stat().st_mtime_ns
    second = _run("--print-config", cwd=tmp_path, env=environment | {"PIP_NO_INDEX": "1"})
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert mark.stat().st_mtime_ns == installed


def test_the_shell_and_shellcheck_have_no_complaint() -> None:
    assert SHELL.read_text().startswith("#!/bin/sh\n")
    assert os.access(SHELL, os.X_OK)
    subprocess.run(["sh", "-n", SHELL], check=True)
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run([shellcheck, SHELL], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_powershell_reads_its_script() -> None:
    if (pwsh := shutil.which("pwsh")) is None:
        pytest.skip("PowerShell is not installed")
    parse = f"[void][ScriptBlock]::Create((Get-Content -Raw '{POWERSHELL}'))"
    subprocess.run([pwsh, "-NoProfile", "-Command", parse], check=True)


def test_psscriptanalyzer_has_no_complaint() -> None:
    if (pwsh := shutil.which("pwsh")) is None:
        pytest.skip("PowerShell is not installed")
    analyse = (
        "if (-not (Get-Module -ListAvailable PSScriptAnalyzer)) { exit 9 }; "
        f"Invoke-ScriptAnalyzer -Path '{POWERSHELL}' -Severity Warning,Error | Format-List"
    )
    result = subprocess.run([pwsh, "-NoProfile", "-Command", analyse], capture_output=True, text=True, check=False)
    if result.returncode == 9:
        pytest.skip("PSScriptAnalyzer is not installed: Install-Module PSScriptAnalyzer")
    assert (result.returncode, result.stdout.strip()) == (0, "")


def test_the_powershell_script_is_ascii() -> None:
    """Windows PowerShell takes a file without a byte order mark for the system's code page."""
    assert POWERSHELL.read_text(encoding="utf-8").isascii()


def test_the_powershell_script_is_whole() -> None:
    """What can be seen without PowerShell: brackets and quotes close, and what it runs is there."""
    text = POWERSHELL.read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    bare = re.sub(r"'[^'\n]*'", "''", code)
    assert bare.replace("''", "").count("'") == 0
    assert bare.count('"') == 0
    for opening, closing in ("()", "{}", "[]"):
        assert bare.count(opening) == bare.count(closing)
    assert "run_server.sh" in code
    assert (POWERSHELL.parent / "run_server.sh").exists()


def test_the_powershell_script_passes_on_every_variable_that_is_a_setting() -> None:
    match = re.search(r"^\$ours = '(.+)'$", POWERSHELL.read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    ours = re.compile(match[1])
    names = {name for names in ALIASES.values() for name in names.env} | {"OSTRO_PORT", "OSTRO_CACHE", "HF_TOKEN"}
    assert {name for name in names if not ours.search(name)} == set()
