"""What `ostro serve` says: to a person at a terminal, and to programs, as JSON and nothing else."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from live_server import live_server
from model_directory import make_embedding_model, write_model
from terminal import CTRL_C, Screen, terminal

from ostro.version import __version__

FAKE = {"OSTRO_FAULTS": "fake"}
SLOW = {"OSTRO_FAULTS": "fake,step_seconds=0.1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def until_ready(screen: Screen) -> str:
    """The server's address, once all that the start says is shown."""
    url = screen.until("\r\n\r\n  Try it").split("API    ")[1].split("/v1")[0]
    screen.until("Ctrl-C stops the server.")
    return url


def printed_command(screen: Screen) -> str:
    return screen.shown.replace("\r", "").split("another terminal:\n\n")[1].split("\n\n")[0].split("\n  Set ")[0]


# --- at a terminal --------------------------------------------------------------------------------------------------


def test_the_first_line_names_what_dotenv_has_set(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"PORT=0\nOSTRO_CACHE={tmp_path}\nOSTRO_API_KEY=hush\n")
    env = {**FAKE, "OSTRO_DRAIN_TIMEOUT": "5", "OSTRO_CACHE": ""}
    with terminal("serve", str(model), cwd=tmp_path, env=env) as screen:
        until_ready(screen)
    first = screen.shown.splitlines()[0]
    assert f"Ostro {__version__} · from .env: " in first
    assert {"port = 0", f"OSTRO_CACHE = {tmp_path}", 'api_key = ["***"]'} <= set(re.split(r", |: | · ", first))
    assert first.endswith("from environment: drain_timeout = 5.0")
    assert "hush" not in screen.shown


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["chat", "no template", "embeddings", "keys", "several"])
def test_the_start_ends_with_a_command_that_works_as_printed(kind: str, tmp_path: Path) -> None:
    args, env = ["serve", "--port", "0"], dict(FAKE)
    match kind:
        case "chat":
            args += [str(write_model(tmp_path / "tiny")), "--ui"]
        case "no template":
            args += [str(write_model(tmp_path / "tiny", chat_template=None))]
        case "embeddings":
            args, env = [*args, str(make_embedding_model(write_model(tmp_path / "tiny")))], {}
        case "keys":
            args, env = [*args, str(write_model(tmp_path / "tiny"))], {**env, "OSTRO_API_KEY": "a-key"}
        case "several":
            write_model(tmp_path / "models" / "tiny")
            args += ["--models", str(tmp_path / "models")]
    with terminal(*args, env=env, cwd=tmp_path) as screen:
        url = until_ready(screen)
        ran = subprocess.run(
            ["bash", "-c", f"{printed_command(screen).replace('curl ', 'curl -sS --fail-with-body ')}"],
            capture_output=True,
            text=True,
            timeout=60,
            env={"OSTRO_API_KEY": "a-key", "PATH": "/usr/bin:/bin"},
        )
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
        assert json.loads(ran.stdout)["object"] in ("chat.completion", "text_completion", "list")
        # Without the page, the switch for it is named.
        assert (f"Page   {url}/" in screen.shown) == (kind == "chat")
        assert ("Page   off: start with --ui" in screen.shown) == (kind != "chat")
        if kind == "chat":
            assert httpx.get(f"{url}/", trust_env=False).status_code == 200
        assert "a-key" not in screen.shown


@pytest.mark.full
def test_a_request_is_one_short_line(model: Path, tmp_path: Path) -> None:
    with terminal("serve", str(model), "--port", "0", "--max-queue-tokens", "50", env=FAKE, cwd=tmp_path) as screen:
        url = until_ready(screen)
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 4, "ignore_eos": True}
            for body in (chat, {**chat, "functions": [{}]}, {**chat, "temperature": 9}, {**chat, "max_tokens": 9999}):
                client.post("/v1/chat/completions", json=body)
            client.get("/nowhere/%1b[31m")
            client.get("/healthz")
            client.get("/v1/models")
        screen.until("/v1/models 200")
    clock, took = r"\d\d:\d\d:\d\d", r"(\d+ ms|\d+\.\d\d s)"
    lines = [line.rstrip() for line in screen.shown.split("Ctrl-C stops the server.")[1].splitlines() if line.strip()]
    expected = [
        rf"{clock} POST /v1/chat/completions 200 {took} 4 tokens [\d.]+ tokens/s \(length\)",
        rf"{clock} POST /v1/chat/completions 400 {took} unsupported: functions",
        rf"{clock} POST /v1/chat/completions 400 {took} invalid: temperature",
        rf"{clock} POST /v1/chat/completions 400 {took} context length exceeded: messages",
        rf"{clock} GET /nowhere/\\u001b\[31m 404 {took} not found",
    ]
    for line, pattern in zip(lines, expected, strict=False):
        assert re.fullmatch(pattern, line), line
    assert len(lines) == len(expected) + 1


@pytest.mark.full
@pytest.mark.parametrize(("args", "env", "colored"), [((), {"NO_COLOR": ""}, True), ((), {}, False)])
def test_colour_is_for_terminals_whose_users_want_it(
    model: Path, tmp_path: Path, args: tuple[str, ...], env: dict[str, str], colored: bool
) -> None:
    with terminal("serve", str(model), "--port", "0", *args, env={**FAKE, **env}, cwd=tmp_path) as screen:
        until_ready(screen)
    assert ("\x1b[" in screen.shown) == colored


@pytest.mark.full
def test_no_color_is_an_option_too(model: Path, tmp_path: Path) -> None:
    args = ("serve", str(model), "--port", "0", "--no-color")
    with terminal(*args, env={**FAKE, "NO_COLOR": ""}, cwd=tmp_path) as screen:
        until_ready(screen)
    assert "\x1b[" not in screen.shown


@pytest.mark.full
def test_ctrl_c_drains_and_a_second_one_ends_at_once(model: Path, tmp_path: Path) -> None:
    args = ("serve", str(model), "--port", "0", "--drain-timeout", "60")
    with terminal(*args, env=SLOW, cwd=tmp_path) as screen:
        url = until_ready(screen)
        body = {"prompt": "the", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            screen.type(CTRL_C)
            screen.until("draining; Ctrl-C again ends at once (1 request running, 60 s at most)")
            screen.type(CTRL_C)
            assert screen.end() == 130
        assert "Traceback" not in screen.shown


@pytest.mark.full
def test_ctrl_c_ends_an_idle_server(model: Path, tmp_path: Path) -> None:
    with terminal("serve", str(model), "--port", "0", env=FAKE, cwd=tmp_path) as screen:
        until_ready(screen)
        screen.type(CTRL_C)
        screen.until("draining; Ctrl-C again ends at once")
        assert screen.end() == 0
        assert "stopped" in screen.shown


def test_a_wrong_path_is_not_listened_for(tmp_path: Path) -> None:
    """It said `listening` first, and then that there was no such model."""
    with terminal("serve", "./nowhere", "--port", "0", cwd=tmp_path) as screen:
        assert screen.end() == 1
    assert "listening" not in screen.shown
    assert screen.shown.splitlines()[-1].startswith("ostro: There is no file or directory nowhere")


# --- JSON -----------------------------------------------------------------------------------------------------------


def test_json_can_be_printed_to_a_terminal(model: Path, tmp_path: Path) -> None:
    args = ("serve", str(model), "--port", "0", "--log-format", "json")
    with terminal(*args, env=FAKE, cwd=tmp_path) as screen:
        screen.until('"ready"}')
    lines = [json.loads(line) for line in screen.shown.splitlines()]
    assert [line["message"] for line in lines] == ["starting", "listening", "ready"]


def test_the_refused_field_is_a_field_of_the_line(model: Path, tmp_path: Path) -> None:
    with live_server(tmp_path, str(model), "--api-key", "k") as server, server.client() as client:
        client.post(
            "/v1/chat/completions", json={"messages": [], "functions": [{}]}, headers={"authorization": "Bearer k"}
        )
        client.get("/v1/models")
    lines = [json.loads(line) for line in server.log_text.splitlines()]
    refused = [(line["error"], line.get("param")) for line in lines if line["message"] == "request"]
    assert refused == [("unsupported", "functions"), ("invalid_api_key", None)]


NOISY = """
import logging, os, subprocess, sys, warnings
from ostro.server.log.setup import configure_logging
from ostro.server.log.setup import stderr_logged

with stderr_logged() as stream:
    configure_logging(stream=stream)
    warnings.warn("an old way", DeprecationWarning, stacklevel=1)
    logging.getLogger("library").warning("careful\\nhere")
    os.write(2, b"native code says\\n\\ntwo lines\\n")
    subprocess.run([sys.executable, "-c", "import sys; print('a child', file=sys.stderr)"])
print("bare again", file=sys.stderr)
"""


@pytest.mark.full
def test_nothing_but_json_reaches_standard_error(tmp_path: Path) -> None:
    """Warnings of libraries were bare lines between the objects."""
    command = [sys.executable, "-W", "default", "-c", NOISY]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    *lines, last = ran.stderr.splitlines()
    assert last == "bare again"
    told = {(line["logger"], line["level"], line["message"]) for line in map(json.loads, lines)}
    assert told == {
        ("py.warnings", "warning", "DeprecationWarning: an old way (<string>:8)"),
        ("library", "warning", "careful\\u000ahere"),
        ("stderr", "warning", "native code says"),
        ("stderr", "warning", "two lines"),
        ("stderr", "warning", "a child"),
    }


@pytest.mark.full
def test_lines_of_the_engine_are_lines_of_the_log(model: Path, tmp_path: Path) -> None:
    """They were lost, or bare."""
    # Native kernels have pages of 16 tokens.
    with live_server(tmp_path, str(model), "--page-size", "32", faults="") as server:
        pass
    lines = [json.loads(line) for line in server.log_text.splitlines()]
    [line] = [line for line in lines if line["logger"] == "ostro.backends.loading"]
    assert line["message"].startswith("the model runs on torch")


@pytest.mark.full
def test_an_engine_that_fails_says_why_in_one_object(model: Path, tmp_path: Path) -> None:
    with live_server(tmp_path, str(model), faults="nonsense", ready=False) as server:
        assert server.process.wait(60) == 1
    *lines, last = server.log_text.splitlines()
    assert last.startswith("ostro: The engine died")
    failures = [line for line in map(json.loads, lines) if "exception" in line]
    assert failures[0]["message"] == "ValueError: OSTRO_FAULTS: unknown nonsense"
    assert failures[0]["exception"].startswith("Traceback (most recent call last):\n")
