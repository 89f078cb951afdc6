"""The whole command against a real Ostro, whose engine runs no model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from model_directory import write_model

from ostro.cli import main

KEY = "sk-bench"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    # Without a pause between its steps the engine is done before the first event is out, which then holds all tokens.
    faults = "fake,step_seconds=0.003"
    with live_server(tmp_path_factory.mktemp("server"), str(model), "--api-key", KEY, faults=faults) as server:
        yield server


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_API_KEY", KEY)


def bench(server: LiveServer, output: Path, *args: str) -> Any:
    files = ["--output-file", str(output), "--plot", str(output.with_suffix(".html"))]
    assert main(["bench", "--url", server.url, *files, *args]) == 0
    return json.loads(output.read_text())


class Page(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_levels_give_a_table_a_file_and_a_page(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--concurrency", "1,4", "--requests", "6", "--input-len", "8-16", "--output-len", "3-9"]
    limits = ["--slo", "ttft=60s,e2e=100s", "--cost-per-hour", "1.5"]
    found = bench(server, tmp_path / "r.json", *options, *limits)
    assert [level["concurrency"] for level in found["levels"]] == [1, 4]
    for level in found["levels"]:
        figures = level["figures"]
        assert (figures["succeeded"], figures["failed"], figures["goodput"]["good"]) == (6, 0, 6)
        assert all(3 <= row["output_tokens"] == row["max_tokens"] <= 9 for row in level["requests"])
        assert all(row["arrivals"] == sorted(row["arrivals"]) for row in level["requests"])
        assert figures["input_tokens"] == sum(row["input_tokens"] for row in level["requests"])
    assert found["settings"]["ignore_eos"] is True
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["self_test"]["added_ttft"]["p50"] > 0
    assert KEY not in (tmp_path / "r.json").read_text()

    table = capsys.readouterr().out
    for row in (
        "concurrency",
        "output tokens/s",
        "TTFT p50",
        "ITL p99",
        "E2E max",
        "within the SLO",
        "cost/1M in+out",
        "self-test",
    ):
        assert row in table

    page = Page((tmp_path / "r.html").read_text())
    assert page.links == []
    assert "script" not in page.tags
    assert page.tags.count("svg") == 8
    assert "output tokens/s" in page.words


def test_rates_and_completions(server: LiveServer, tmp_path: Path) -> None:
    options = ["--rate", "50,100", "--requests", "10", "--endpoint", "completions", "--vocab-size", "40"]
    found = bench(server, tmp_path / "r.json", *options, "--input-len", "12", "--max-tokens", "4", "--no-self-test")
    for level in found["levels"]:
        assert level["figures"]["succeeded"] == 10
        assert [row["input_tokens"] for row in level["requests"]] == [12] * 10
        assert level["figures"]["late"]["count"] == 10
    assert found["self_test"] is None


@pytest.mark.full
def test_prompts_of_a_file_and_a_trace(server: LiveServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the fox", "output_len": 2}\n{"messages": [{"role": "user", "content": "yes"}]}\n')
    options = ["--max-tokens", "5", "--no-self-test", "--ignore-eos"]
    found = bench(server, tmp_path / "r.json", "--prompts", str(prompts), "--requests", "4", *options)
    assert [row["output_tokens"] for row in found["levels"][0]["requests"]] == [2, 5, 2, 5]

    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 3.2, "input_len": 9, "output_len": 3}, {"timestamp": 3.0, "prompt": "no", "output_len": 2}]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bench(server, tmp_path / "r.json", "--trace", str(trace), "--speed", "1,10", *options)
    assert [level["trace"] for level in found["levels"]] == [1, 10]
    for level in found["levels"]:
        assert [row["output_tokens"] for row in level["requests"]] == [2, 3]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "1.5"], "whole numbers"),
        (["--rate", "1,x"], "--rate"),
        (["--input-len", "9-3"], "--input-len"),
        (["--requests", "0"], "--requests"),
        (["--slo", "ttft=5"], "--slo"),
        (["--body", "[1]"], "--body"),
        (["--header", "no colon"], "--header"),
        (["--url", "ftp://x"], "address"),
        (["--speed", "2"], "--trace"),
        (["--burstiness", "2"], "--rate"),
        (["--vocab-size", "9"], "--vocab-size"),
        (["--prompt", "x", "--shared-prefix", "9"], "--shared-prefix"),
        (["--prompts", "/nowhere.txt"], "Cannot read"),
        (["--trace", "/nowhere.txt", "--input-len", "9"], "--input-len"),
        (["--api-key", "sk\nsecret"], "key"),
    ],
)
def test_wrong_options_are_refused(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *args]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "secret" not in told


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": 1}', '{"timestamp": 1}', '{"prompt": "x"}', '{"timestamp": -1, "prompt": "x"}']
)
def test_line_of_a_trace_that_is_wrong_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"timestamp": 0, "prompt": "x"}}\n{line}\n')
    assert main(["bench", "--trace", str(trace)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_refusal_of_a_server_is_reported(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OSTRO_API_KEY")
    assert main(["bench", "--url", server.url]) == 1
    assert "HTTP 401" in capsys.readouterr().err
    assert main(["bench", "--url", "http://127.0.0.1:1"]) == 1
    assert "Is the server up?" in capsys.readouterr().err


@pytest.mark.full
def test_one_key_of_several_is_sent_and_a_header_replaces_it(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--requests", "1", "--warmup", "0", "--max-tokens", "8", "--prompt", "the fox", "--no-self-test"]
    # Drawn tokens may have no text.
    options += ["--body", '{"temperature": 0}']
    monkeypatch.setenv("OSTRO_API_KEY", f"{KEY}, another")
    assert main(["bench", "--url", server.url, *options]) == 0
    monkeypatch.setenv("OSTRO_API_KEY", "wrong")
    assert main(["bench", "--url", server.url, *options, "--header", f"authorization: Bearer {KEY}"]) == 0


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="interrupts are signals here")
def test_interrupt_shows_what_there_is(server: LiveServer, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    command = [sys.executable, "-m", "ostro", "bench", "--url", server.url, "--concurrency", "2,4"]
    command += ["--duration", "100", "--output-len", "4", "--input-len", "8", "--output-file", str(output)]
    before = _completed(server)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and _completed(server) < before + 20:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "output tokens/s" in said
    found = json.loads(output.read_text())
    assert found["interrupted"]
    [level] = found["levels"]
    assert level["figures"]["succeeded"] > 0


def _completed(server: LiveServer) -> int:
    """Requests that the server has answered since it started, the other tests' among them, by its log."""
    return server.log_text.count('"status": 200')
