"""On Windows: one clear line, and what only talks to servers can be imported. No Windows machine has run this."""

import subprocess
import sys

import pytest

from ostro.cli import COMMANDS, main

# What Python does not have on Windows, of what is used anywhere here.
UNIX_ONLY = ("fcntl", "grp", "pwd", "resource", "termios", "uvloop")


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"bench"}))
def test_a_command_that_needs_unix_says_wsl_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main([command, "--help"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ostro: ostro {command} needs Linux or macOS. On Windows run it within WSL")


@pytest.mark.cases(2)
@pytest.mark.parametrize("module", ["ostro", "ostro.client.client", "ostro.client.async_client", "ostro.cli.bench"])
def test_what_talks_to_servers_imports_no_module_of_unix(module: str) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({UNIX_ONLY})); import {module}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
