"""ostro completion: what each shell offers when Tab is pressed. zsh and fish are asked where they are installed."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ostro.cli import COMMANDS
from ostro.cli.completion import _SCRIPTS, commands
from ostro.server.settings import ONLY_IN_FILES, ServeSettings

# Tab is pressed at the end of the line; prints what is offered, one word per line.
PRESS_TAB = {
    "bash": """
        source "$1"; COMP_LINE="$2"; COMP_POINT=${#COMP_LINE}; compopt() { :; }
        _ostro; printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        compdef() { : }; compset() { : }; _files() { print -l -- *(N) }; compadd() { shift; print -l -- "$@" }
        source "$1"; words=("${(@s: :)2}"); CURRENT=${#words}
        _ostro
    """,
    "fish": 'source "$argv[1]"; complete -C "$argv[2]"',
}
SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed"))
    for shell in PRESS_TAB
]
MODEL = "gs://bucket/models/acme/tiny"


@cache
def script(shell: str) -> str:
    return _SCRIPTS[shell](commands())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one file, in which `ostro` is a program that knows two models."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ostro"
    program.write_text(f'#!/bin/sh\n[ "$1" = completion ] && echo smollm2-135m && echo {MODEL}-"$2"\n')
    program.chmod(0o755)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "settings.yaml").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "here"


def offered(shell: str, line: str, here: Path) -> list[str]:
    (here.parent / "script").write_text(script(shell))
    first = {"bash": ["--norc", "-c"], "zsh": ["-f", "-c"], "fish": ["--no-config", "-c"]}[shell]
    # The word after the command is $0 in bash and zsh, but an argument in fish.
    name = [] if shell == "fish" else [shell]
    ran = subprocess.run(
        [shell, *first, PRESS_TAB[shell], *name, str(here.parent / "script"), line],
        capture_output=True,
        text=True,
        check=True,
        cwd=here,
        # Neither a locale that is not installed nor the user's own start files.
        env={"PATH": os.environ["PATH"], "HOME": str(here), "LC_ALL": "C"},
        timeout=60,
    )
    assert ran.stderr == ""
    typed = line.rpartition(" ")[2].rpartition("=")[2]
    # fish adds descriptions, and repeats the option before `=`; zsh itself chooses among the candidates.
    words = [each.partition("\t")[0] for each in ran.stdout.splitlines() if each]
    words = [each.rpartition("=")[2] if "=" in line else each for each in words]
    return [each for each in words if shell != "zsh" or each.startswith(typed)]


@pytest.mark.cases(23)
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("ostro se", ["serve"]),
        ("ostro models l", ["list"]),
        ("ostro models list --j", ["--json"]),
        ("ostro serve --max-batch-t", ["--max-batch-tokens"]),
        ("ostro serve --dtype bf", ["bfloat16"]),
        ("ostro serve --dtype=bf", ["bfloat16"]),
        ("ostro serve --port 9000 --no-prefix-c", ["--no-prefix-caching"]),
        ("ostro serve --config set", ["settings.yaml"]),
        ("ostro serve smol", ["smollm2-135m"]),
        ("ostro plan smol", ["smollm2-135m"]),
        ("ostro serve --port ", []),
        ("ostro completion f", ["fish"]),
        ("ostro launch cl", ["claude"]),
        ("ostro launch codex --dry", ["--dry-run"]),
        ("ostro stop --n", ["--now"]),
        ("ostro stop smol", ["smollm2-135m"]),
        ("ostro ps --j", ["--json"]),
    ],
)
def test_tab_offers_what_fits(shell: str, line: str, wanted: list[str], here: Path) -> None:
    assert offered(shell, line, here) == wanted


@pytest.mark.parametrize("shell", SHELLS)
def test_references_with_colons_are_completed(shell: str, here: Path) -> None:
    """bash sees several words in them, and replaces the last."""
    rest = f"{MODEL}-models".removeprefix("gs:" if shell == "bash" else "")
    assert offered(shell, "ostro serve gs://bu", here) == [rest]
    assert offered(shell, "ostro models rm gs://bu", here) == [rest.replace("-models", "-cached")]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_is_offered(shell: str, here: Path) -> None:
    assert set(offered(shell, "ostro ", here)) >= set(COMMANDS)


def test_every_setting_of_a_server_is_in_the_table() -> None:
    [serve] = [each for each in commands() if each.path == "serve"]
    flags = {flag for option in serve.options for flag in option.flags}
    assert flags >= {"--" + name.replace("_", "-") for name in ServeSettings.model_fields.keys() - ONLY_IN_FILES}


@pytest.mark.full
def test_models_are_those_with_short_names_and_those_in_both_caches(tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--acme--tiny--one").mkdir(parents=True)
    (tmp_path / "cache" / "pypi" / "llm-tiny-1.0").mkdir(parents=True)
    (tmp_path / "cache" / "pypi" / "llm-tiny-1.0" / "tiny.gguf").write_bytes(bytes(5000))
    environment = {"HOME": str(tmp_path), "OSTRO_CACHE": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "hub")}

    def told(wanted: str) -> list[str]:
        line = [sys.executable, "-m", "ostro", "completion", wanted]
        ran = subprocess.run(line, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
        return ran.stdout.split()

    assert set(told("models")) >= {"acme/tiny--one", "pypi:llm-tiny==1.0", "qwen2.5-coder-0.5b"}
    assert told("cached") == ["llm-tiny"]


def test_names_are_told_without_a_slow_import() -> None:
    """Somebody waits for them, with a finger on Tab."""
    code = "import sys\nfrom ostro.cli import main\nmain(['completion', 'models'])\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "numpy", "pydantic", "huggingface_hub"} & set(ran.stdout.splitlines()[-1].split())
