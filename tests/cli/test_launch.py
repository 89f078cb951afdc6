"""`ostro launch`: what agents are started with. tests/agents starts real ones; here programs of their names tell what
they were given.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from terminal import CTRL_C, OSTRO, PATIENCE, terminal

from ostro.cli import main
from ostro.cli.agents import AGENTS, Endpoint

KEY = "sk-very-secret"
# Tells its arguments and environment, and the files among its arguments.
PROGRAM = """#!/bin/sh
echo "arguments: $@"
for each in "$@"; do [ -f "$each" ] && stat -c 'mode: %a' "$(dirname "$each")" && cat "$each"; done
env
exit 7
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("server")
    state = {"XDG_STATE_HOME": str(directory / "state")}
    with live_server(directory, str(model), "--max-seq-len", "256", "--api-key", KEY, env=state) as server:
        yield server


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where nothing is installed, and the user has a key."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OSTRO_API_KEY", KEY)


def install(tmp_path: Path, name: str, program: str = PROGRAM) -> None:
    path = tmp_path / "bin" / AGENTS[name].program
    path.write_text(program)
    path.chmod(0o755)


@pytest.mark.parametrize("name", AGENTS)
def test_a_dry_run_shows_what_would_be_run(
    name: str, server: LiveServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", name, "--url", server.url, "--dry-run", "--", "say", "--model", "a b"]) == 0
    shown = capfd.readouterr()
    assert f"Install it with `npm install -g {AGENTS[name].package}`" in shown.err
    assert "tiny has room for 256" in shown.err
    assert shown.out.splitlines()[-1].strip() == "say --model 'a b'"
    assert f"{server.url}" in shown.out
    assert "tiny" in shown.out
    assert KEY not in shown.out + shown.err
    # Nothing was written.
    assert not (tmp_path / "home").exists()
    assert list((tmp_path / "temporary").iterdir()) == []

    # What is shown is what a shell understands.
    install(tmp_path, name)
    command = "\n".join(line for line in shown.out.splitlines() if not line.startswith("#"))
    if name != "continue":
        ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert ran.returncode == 7
        assert ran.stdout.splitlines()[0].endswith("say --model a b")


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_the_settings_and_its_arguments(
    name: str,
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    install(tmp_path, name)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of-another-service")
    assert main(["launch", name, "--url", server.url, "--", "-p", "hello"]) == 7
    given = capfd.readouterr().out
    assert given.splitlines()[0].startswith("arguments: ")
    assert given.splitlines()[0].endswith("-p hello")
    assert server.url in given
    assert "tiny" in given
    # Once in what the user had, and once more in what the agent looks at.
    assert KEY in given.replace(f"OSTRO_API_KEY={KEY}\n", "") or name == "codex"
    assert (name == "claude") == ("ANTHROPIC_API_KEY=of-another-service" not in given)
    if name == "continue":
        assert "mode: 700" in given
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "home").exists()


def test_without_a_key_none_is_asked_of_the_environment() -> None:
    endpoint = Endpoint(url="http://127.0.0.1:8000", model="org/name", key=None, context=65536)
    prepared = {name: agent.prepare(endpoint, Path("/nowhere")) for name, agent in AGENTS.items()}
    assert not any("env_key" in word for word in prepared["codex"].arguments)
    assert 'model="org/name"' in prepared["codex"].arguments
    assert "model_context_window=65536" in prepared["codex"].arguments
    settings = json.loads(prepared["opencode"].variables["OPENCODE_CONFIG_CONTENT"])
    assert settings["model"] == "ostro/org/name"
    assert settings["provider"]["ostro"]["models"]["org/name"]["limit"] == {"context": 65536, "output": 16384}
    assert prepared["claude"].variables["ANTHROPIC_AUTH_TOKEN"]
    # It compacts a conversation before the model's context is full.
    window, percent = (
        int(prepared["claude"].variables[name])
        for name in ("CLAUDE_CODE_AUTO_COMPACT_WINDOW", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE")
    )
    assert 0.5 * 65536 < window * percent / 100 < 0.9 * 65536


@pytest.mark.full
def test_the_server_that_runs_is_found(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with live_server(tmp_path, str(model)) as server:
        assert main(["launch", "codex", "--dry-run"]) == 0
        assert f'base_url="{server.url}/v1"' in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["codx"], 2, "'codx' is not one of codex, claude, opencode, continue. Did you mean codex?"),
        ([], 2, "codex|claude|opencode|continue"),
        (["codex"], 1, "Install it with `npm install -g @openai/codex`."),
        (["codex", "--dry-run", "--url", "http://127.0.0.1:9"], 1, "Start one with `ostro serve`"),
        (["codex", "--dry-run", "--url", "SERVER", "--model", "nobody"], 1, "'nobody'"),
        (["codex", "--dry-run", "--url", "SERVER", "--api-key", "wrong"], 1, "key"),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: list[str], status: int, told: str, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [server.url if word == "SERVER" else word for word in words]
    try:
        ended: object = main(["launch", *words])
    except SystemExit as left:
        ended = left.code
    assert ended == status
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_ctrl_c_is_the_agents_to_answer(server: LiveServer, tmp_path: Path) -> None:
    install(tmp_path, "claude", "#!/bin/sh\ntrap 'echo it goes on' INT\necho it runs\nread line\nread line\nexit 3\n")
    with terminal("launch", "claude", "--url", server.url) as screen:
        screen.until("it runs")
        screen.type(CTRL_C)
        screen.until("it goes on")
        screen.type("one\ntwo\nthree\n")
        assert screen.end() == 3


@pytest.mark.full
def test_an_agent_ends_with_the_command(server: LiveServer, tmp_path: Path) -> None:
    install(tmp_path, "continue", "#!/bin/sh\necho it runs\nexec sleep 1000\n")
    command = [*OSTRO, "launch", "continue", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "it runs\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert list((tmp_path / "temporary").iterdir()) == []
