"""Every example of Ostro's own client in docs/client.md, as it is written there but for the server's address."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, live_server
from model_directory import write_model

DOCS = Path(__file__).parents[2] / "docs" / "client.md"
ADDRESS = "http://127.0.0.1:8000"
# What the example needs of a browser.
PAGE = "globalThis.document = { body: { append: (text) => process.stdout.write(text) } };\n"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCS.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    with live_server(tmp_path_factory.mktemp("server"), str(model), "--default-temperature", "0") as server:
        yield server


@pytest.mark.cases(2)
@pytest.mark.parametrize("code", [code for code in blocks("python") if "from ostro " in code])
def test_python_examples_work_as_written(server: LiveServer, code: str, tmp_path: Path) -> None:
    assert ADDRESS in code
    script = tmp_path / "example.py"
    script.write_text(code.replace(ADDRESS, server.url))
    done = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def run_script(code: str, path: Path) -> "subprocess.CompletedProcess[str]":
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, whose fetch is a browser's")
    path.write_text(code)
    return subprocess.run([node, path], capture_output=True, text=True, encoding="utf-8", timeout=120)


def test_the_browsers_example_works_as_written(server: LiveServer, tmp_path: Path) -> None:
    [code] = blocks("js")
    done = run_script(PAGE + code.replace(ADDRESS, server.url), tmp_path / "example.mjs")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_browsers_example_shows_the_servers_message(server: LiveServer, tmp_path: Path) -> None:
    [code] = blocks("js")
    wrong = code.replace(ADDRESS, server.url).replace("max_tokens: 64", "max_tokens: -1")
    done = run_script(PAGE + wrong, tmp_path / "example.mjs")
    assert done.returncode == 1
    assert "max_tokens" in done.stderr


@pytest.mark.full
def test_the_terminals_options_exist() -> None:
    helped = subprocess.run(
        [sys.executable, "-m", "ostro", "chat", "--help"], capture_output=True, text=True, check=True
    )
    used = set(re.findall(r"--[a-z-]+", "".join(line for line in blocks("bash") if "ostro chat" in line)))
    assert used
    assert all(option in helped.stdout for option in used)
