"""The commands' help and what a mistyped one is told, in processes of their own."""

import re
import shlex
import subprocess
import sys

import pytest
from warm_start import warm_run

from ostro.cli import COMMANDS, _parser, _translated
from ostro.cli.serve import _ESSENTIAL
from ostro.server.settings import GROUPS, ONLY_IN_FILES, ServeSettings

COLD = ["", *(command for command in COMMANDS if command != "serve")]
ENVIRONMENT = {"COLUMNS": "80", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


def ostro(*args: str) -> subprocess.CompletedProcess[str]:
    return warm_run(args, environment=ENVIRONMENT)


@pytest.fixture(scope="module")
def help_of_serve() -> str:
    return ostro("serve", "--help-all").stdout


@pytest.mark.full
def test_ostro_alone_prints_its_help() -> None:
    alone = ostro()
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout == ostro("--help").stdout
    assert all(f"\n    {name} " in alone.stdout for name in COMMANDS)


def test_ostro_models_alone_prints_its_help() -> None:
    alone = ostro("models")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout == ostro("models", "--help").stdout


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["serve", "--prot", "9000"], "ostro serve: error: unrecognized arguments: --prot. Did you mean --port?"),
        (["serve", "--max-batch-sise=4"], "Did you mean --max-batch-size?"),
        (["serve", "-port", "9000"], "Did you mean --port?"),
        (["serve", "--nothing-like-it"], "unrecognized arguments: --nothing-like-it"),
        (["sevre"], "Did you mean serve?"),
        (["models", "lst"], "Did you mean list?"),
        (["generate", "--temprature", "0", "x"], "Did you mean --temperature?"),
        (["chat", "--sytem", "x"], "Did you mean --system?"),
        (["bench", "--endpoint", "caht"], "Did you mean chat?"),
    ],
)
def test_a_mistyped_word_gets_the_one_that_was_meant(args: list[str], told: str) -> None:
    ran = ostro(*args)
    assert (ran.returncode, ran.stdout) == (2, "")
    usage, complaint = ran.stderr.splitlines()
    assert usage.startswith("usage: ostro ")
    assert complaint.endswith(told)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "args",
    [
        ["serve", "--no-such-option"],
        ["serve", "--port", "nonsense", "--print-config"],
        ["serve", "--device", "nonsense", "--print-config"],
        ["generate"],
        ["chat", "--n", "2"],
        ["bench", "--requests", "0"],
        ["plan", "--memory", "nonsense"],
    ],
)
def test_wrong_usage_has_one_exit_status(args: list[str]) -> None:
    """It was 2 from the parser and from some commands, and 1 where a command found the mistake itself."""
    ran = ostro(*args)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr


def test_the_help_of_serve_has_all_settings_in_groups(help_of_serve: str) -> None:
    titles = re.findall(r"^(\S.*):$", help_of_serve, re.MULTILINE)
    wanted = [title.lower().replace("hrm", "HRM") for title in GROUPS.values()]
    assert titles == ["positional arguments", "options", *wanted, "examples"]
    shown = {flag.replace("[no-]", "") for flag in re.findall(r"^  (--[\w\[\]-]+)", help_of_serve, re.MULTILINE)}
    assert shown >= {"--" + name.replace("_", "-") for name in ServeSettings.model_fields.keys() - ONLY_IN_FILES}


def test_the_help_of_serve_is_short_and_names_the_whole(help_of_serve: str) -> None:
    """It had 370 lines, among which the port was hard to find."""
    shown = ostro("serve", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert len(lines) < 90 < len(help_of_serve.splitlines())
    for flag in ("--help-all", "--model", "--port", "--ui", "--api-key", "--quantize"):
        assert any(line.startswith(f"  {flag} ") or f" --[no-]{flag[2:]} " in line for line in lines), flag
    assert "--hrm-dialect" not in shown.stdout
    assert "`ostro serve --help-all` shows all settings." in " ".join(shown.stdout.split())
    # Only a selection: nothing else is said there.
    whole = set(" ".join(help_of_serve.split()).split())
    assert set(" ".join(shown.stdout.split()).split()) <= whole


def test_the_short_help_has_no_setting_that_is_gone() -> None:
    assert set(_ESSENTIAL) <= ServeSettings.model_fields.keys() | {"config", "print_config", "dry_run"}


def test_the_help_says_what_each_flag_takes_and_its_default(help_of_serve: str) -> None:
    flat = " ".join(help_of_serve.split())
    for line in (
        "--port PORT port to listen on",
        "(default: 8000)",
        "--max-body-size SIZE",
        "(default: 64M)",
        "--device auto|cpu|cuda",
        "--[no-]prefix-caching",
        "(also --max-batch-size, --max-num-seqs",
    ):
        assert line in flat
    assert re.search(r"--default-max-tokens N .*?\(default: .*?\)", flat)
    assert "(default: auto) (default:" not in flat
    assert all(len(line) <= 80 for line in help_of_serve.splitlines())


@pytest.mark.cases(3)
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_examples_in_the_help_can_be_typed(command: str) -> None:
    shown = ostro(*filter(None, [command]), "--help").stdout
    examples = re.findall(r"^  (ostro .*?)(?:  # .*)?$", shown.split("\nexamples:\n")[1], re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" < ")[0])[1:]
        _parser(words).parse_args(_translated(words))


@pytest.mark.full
@pytest.mark.parametrize("command", ["serve", *(pytest.param(each, marks=pytest.mark.full) for each in COLD)])
def test_a_cold_start_shows_the_same_help(command: str) -> None:
    """All others here are forked from a process that has imported the command."""
    line = [sys.executable, "-m", "ostro", *filter(None, [command]), "--help"]
    cold = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True, env=ENVIRONMENT)
    assert cold.stdout == ostro(*filter(None, [command]), "--help").stdout


def test_help_imports_nothing_heavy() -> None:
    script = "import sys\nfrom ostro.cli import main\nmain([])\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "numpy", "pydantic", "yaml", "httpx"} & set(ran.stdout.splitlines()[-1].split())
