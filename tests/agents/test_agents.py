"""Coding agents, unmodified, against the server: each completes a task of two tools. The model's answers are scripted.

`make test-agents` installs the agents; without them each test says what is missing. Nothing leaves this machine: an
agent's home is empty, and the only address it is given is the server's.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checkout import ROOT
from scripted_answers import Scripts

pytestmark = pytest.mark.slow

BIN = ROOT / "build" / "agents" / "node_modules" / ".bin"
DONE = "All done: the house is red."
OPENCODE_QUIET = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
CONTINUE_QUIET = {"CONTINUE_TELEMETRY_ENABLED": "0"}


@dataclass(frozen=True)
class Agent:
    name: str
    """For `ostro launch`."""
    program: str
    shell: tuple[str, Callable[[str], dict[str, object]]]
    """The tool that runs a command."""
    reader: tuple[str, Callable[[Path], dict[str, object]]]
    """The tool that reads a file."""
    arguments: Callable[[str], Sequence[str]]
    """Given the task."""
    launch_arguments: Callable[[str], Sequence[str]]
    """The same, where `ostro launch` gives the settings."""
    set_up: Callable[[str, Path, Path], Mapping[str, str]]
    """Writes its settings, given the server's address, its home and where it works; returns environment variables."""
    quiet: Mapping[str, str] = field(default_factory=dict)
    """Variables that keep it from asking for anything but the server, which have nothing to do with the server."""


def _codex(url: str, home: Path, work: Path) -> dict[str, str]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        'model = "default"\nmodel_provider = "ostro"\n\n[model_providers.ostro]\nname = "Ostro"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    return {}


def _claude(url: str, home: Path, work: Path) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "default",
        "ANTHROPIC_SMALL_FAST_MODEL": "default",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _opencode(url: str, home: Path, work: Path) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Ostro",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"default": {"name": "default", "limit": {"context": 65536, "output": 4096}}},
    }
    (work / "opencode.json").write_text(json.dumps({"model": "ostro/default", "provider": {"ostro": provider}}))
    return OPENCODE_QUIET


def _continue(url: str, home: Path, work: Path) -> dict[str, str]:
    (home / "config.yaml").write_text(
        "name: Ostro\nversion: 1.0.0\nschema: v1\nmodels:\n"
        "  - name: default\n    provider: openai\n    model: default\n"
        f"    apiBase: {url}/v1\n    apiKey: none\n"
    )
    return CONTINUE_QUIET


def _codex_arguments(task: str) -> list[str]:
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task]


def _claude_arguments(task: str) -> list[str]:
    return ["-p", task, "--allowedTools", "Bash,Read"]


def _opencode_arguments(task: str) -> list[str]:
    return ["run", task]


def _continue_arguments(task: str) -> list[str]:
    return ["--auto", "-p", task]


AGENTS = {
    "Codex": Agent(
        "codex",
        "codex",
        ("exec_command", lambda command: {"cmd": command}),
        # It reads files by commands.
        ("exec_command", lambda path: {"cmd": f"cat {path}"}),
        _codex_arguments,
        _codex_arguments,
        _codex,
    ),
    "Claude Code": Agent(
        "claude",
        "claude",
        ("Bash", lambda command: {"command": command, "description": "Says something"}),
        ("Read", lambda path: {"file_path": str(path)}),
        _claude_arguments,
        _claude_arguments,
        _claude,
    ),
    "opencode": Agent(
        "opencode",
        "opencode",
        ("bash", lambda command: {"command": command, "description": "Says something"}),
        ("read", lambda path: {"filePath": str(path)}),
        _opencode_arguments,
        _opencode_arguments,
        _opencode,
        OPENCODE_QUIET,
    ),
    "Continue": Agent(
        "continue",
        "cn",
        ("Bash", lambda command: {"command": command}),
        ("Read", lambda path: {"filepath": str(path)}),
        lambda task: ["--config", "../home/config.yaml", *_continue_arguments(task)],
        _continue_arguments,
        _continue,
        CONTINUE_QUIET,
    ),
}


def _call(name: str, arguments: Mapping[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _by_settings(agent: Agent, url: str, directory: Path, task: str) -> subprocess.CompletedProcess[str]:
    """As docs/client.md says how to set it up."""
    settings = agent.set_up(url, directory / "home", directory / "work")
    return _run([str(BIN / agent.program), *agent.arguments(task)], directory, settings)


def _by_launch(agent: Agent, url: str, directory: Path, task: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ostro", "launch", agent.name, "--url", url, "--", *agent.launch_arguments(task)]
    return _run(command, directory, {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **agent.quiet})


def _run(command: Sequence[str], directory: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    home, work = directory / "home", directory / "work"
    return subprocess.run(
        command,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


START = {"by settings": _by_settings, "by launch": _by_launch}


@pytest.mark.parametrize("how", START)
@pytest.mark.parametrize("name", AGENTS)
def test_agent_completes_a_task_of_two_tools(tmp_path: Path, name: str, how: str) -> None:
    agent = AGENTS[name]
    if not (BIN / agent.program).exists():
        pytest.skip(f"{name} is not installed: make test-agents")
    for folder in ("home", "work"):
        (tmp_path / folder).mkdir()
    note = tmp_path / "work" / "note.txt"
    scripts = Scripts()
    # Last to first: each result brings the key of the next answer.
    last = scripts.add(DONE)
    note.write_text(f"Case {last}.\n")
    second = scripts.add("I read." + _call(agent.reader[0], agent.reader[1](note)))
    first = scripts.add("I look." + _call(agent.shell[0], agent.shell[1](f"echo Case {second}.")))
    with scripts.served(tmp_path, "--max-seq-len", "65536") as server:
        ran = START[how](agent, server.url, tmp_path, f"Do case {first}.")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert DONE in ran.stdout + ran.stderr
        records = [json.loads(line) for line in server.log_text.splitlines() if '"ostro.access"' in line]
    answers = [record for record in records if record["method"] == "POST"]
    assert {record["status"] for record in answers} == {200}
    # Nearly all of a prompt is that of the turn before it, and was found in the cache.
    longest = max(answers, key=lambda record: record["prompt_tokens"])
    assert longest["cached_tokens"] > 0.8 * longest["prompt_tokens"]
