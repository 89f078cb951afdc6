"""`ostro ps` and `ostro stop`: which servers are listed, and how they end."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from terminal import PATIENCE, terminal

from ostro import Client
from ostro.cli import main
from ostro.cli.ps import uptime
from ostro.cli.servers import running_servers
from ostro.system.processes import identity, tree_bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the servers of this test are listed, and no others."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ostro" / "servers"


@pytest.fixture
def server(model: Path, tmp_path: Path, records: Path) -> Iterator[LiveServer]:
    with live_server(tmp_path, str(model), "--max-seq-len", "256") as server:
        until_listed_as("ready")
        yield server


def until_listed_as(state: str) -> None:
    """Its record follows what it is with a delay."""
    deadline = time.monotonic() + PATIENCE
    while [record.state for record in running_servers()] != [state]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["ps", "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_without_servers_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps"]) == 0
    assert "`ostro serve`" in capsys.readouterr().out
    assert listed(capsys) == []
    assert main(["stop", "--all"]) == 0
    assert main(["stop"]) == 1
    assert "None of your servers runs here" in capsys.readouterr().err


def test_a_server_is_listed_from_its_start_to_its_end(
    server: LiveServer, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [record] = listed(capsys)
    assert (record["pid"], record["url"]) == (server.process.pid, server.url)
    assert [model["name"] for model in record["models"]] == ["tiny"]  # type: ignore[attr-defined]
    assert isinstance(record["memory_bytes"], int)
    assert record["memory_bytes"] > 1 << 20
    assert main(["ps"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert all(each in line for each in (str(server.process.pid), server.url, "MB", "tiny"))

    # It tells of its prompts' models, which are nobody else's business.
    [path] = records.iterdir()
    assert (path.stat().st_mode & 0o777, records.stat().st_mode & 0o777) == (0o600, 0o700)

    assert main(["stop", f"{server.url.replace('127.0.0.1', 'localhost')}/v1"]) == 0
    assert f"Stopped {server.url} (pid {server.process.pid}, tiny)" in capsys.readouterr().out
    assert server.process.wait(60) == 0
    assert list(records.iterdir()) == []
    assert listed(capsys) == []


@pytest.mark.full
def test_a_server_finishes_what_it_answers_before_it_stops(model: Path, tmp_path: Path) -> None:
    pieces: list[str] = []
    begun = threading.Event()

    def read(url: str) -> None:
        with Client(url) as client, client.stream_complete("the fox", max_tokens=150, ignore_eos=True) as stream:
            for piece in stream.text:
                pieces.append(piece)
                begun.set()
            pieces.append(str(stream.answer.usage.completion_tokens))

    with live_server(tmp_path, str(model), "--drain-timeout", "600", faults="fake,step_seconds=0.1") as server:
        reading = threading.Thread(target=read, args=(server.url,))
        reading.start()
        assert begun.wait(60)
        with terminal("stop", "tiny") as screen:
            screen.until(f"Stopping {server.url}")
            screen.until("1 request to finish")
            screen.until("Stopped")
            assert screen.end() == 0
        reading.join(60)
        assert server.process.wait(60) == 0
    assert pieces[-1] == "150"


@pytest.mark.full
def test_now_waits_for_nobody(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(tmp_path, str(model), "--drain-timeout", "600", faults="fake,step_seconds=0.5") as server:
        with Client(server.url) as client, client.stream_complete("the fox", max_tokens=200, ignore_eos=True) as stream:
            next(iter(stream))
            assert main(["stop", "--now", str(server.process.pid)]) == 0
        # The two signals come at once, and the system delivers them in any order.
        assert server.process.wait(60) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert listed(capsys) == []


@pytest.mark.full
def test_of_several_servers_one_must_be_named(
    server: LiveServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    with live_server(tmp_path / "other", str(model), "--served-model-name", "other") as other:
        for words, told in (
            (["stop"], "Several servers run here"),
            (["launch", "codex", "--dry-run"], "Choose one with --url"),
            (["stop", "--all", "tiny"], "leave it or the names out"),
        ):
            assert main(words) == 2
            assert told in capsys.readouterr().err
        assert main(["stop", "nobody"]) == 1
        told = capsys.readouterr().err
        assert "No server of yours is nobody" in told
        assert all(f"{each.url} (pid {each.process.pid}" in told for each in (server, other))
        port = other.url.rpartition(":")[2]
        assert main(["stop", "other", str(other.process.pid), port]) == 0
        assert other.process.wait(60) == 0
        assert [record["url"] for record in listed(capsys)] == [server.url]
        assert main(["stop", "--all"]) == 0
        assert server.process.wait(60) == 0


def test_a_killed_server_is_forgotten(server: LiveServer, records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.process.kill()
    server.process.wait(60)
    assert len(list(records.iterdir())) == 1
    assert listed(capsys) == []
    assert list(records.iterdir()) == []


def test_a_process_that_got_the_id_of_a_server_is_not_taken_for_it(
    server: LiveServer, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be told to end."""
    [path] = records.iterdir()
    record = json.loads(path.read_text())
    record["pid"] = os.getpid()
    forged = path.with_name(path.name.replace(f"-{server.process.pid}.", f"-{os.getpid()}."))
    forged.touch(mode=0o600)
    forged.write_text(json.dumps(record))
    assert main(["stop", "--all"]) == 0
    assert capsys.readouterr().out.count("Stopped") == 1
    assert not forged.exists()


def test_damaged_records_are_passed_over(server: LiveServer, records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [path] = records.iterdir()
    for number, text in enumerate(["", "[]", "{}", '{"pid": "x"}', "\x00"]):
        damaged = path.with_name(path.name.replace(f"-{server.process.pid}.", f"-1{number}."))
        damaged.touch(mode=0o600)
        damaged.write_text(text)
    assert [record["url"] for record in listed(capsys)] == [server.url]
    # Others could have written this one.
    path.chmod(0o666)
    assert listed(capsys) == []


@pytest.mark.full
def test_where_nothing_can_be_written_a_server_runs_unlisted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("no directory")
    with live_server(tmp_path, str(model)) as server, Client(server.url) as client:
        assert client.ready()
        assert listed(capsys) == []


def test_a_server_may_stay_unlisted(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(tmp_path, str(model), "--no-listed"):
        assert listed(capsys) == []


@pytest.mark.full
def test_the_server_of_a_conversation_is_not_listed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has a key that nobody else knows, and ends with the conversation."""
    with terminal("chat", str(model), env={"OSTRO_FAULTS": "fake"}) as screen:
        screen.until("\n> ")
        assert listed(capsys) == []


def test_uptimes_are_told_in_two_units() -> None:
    told = {0.4: "0 s", 59: "59 s", 61: "1 min 1 s", 3600: "1 h", 3659: "1 h", 7325: "2 h 2 min", 90061: "1 d 1 h"}
    assert {seconds: uptime(seconds) for seconds in told} == told


def test_processes_are_told_apart() -> None:
    assert identity(os.getpid()) == identity(os.getpid())
    with subprocess.Popen(["sleep", "600"]) as other:
        assert identity(other.pid) not in (None, identity(os.getpid()))
        other.kill()
    with subprocess.Popen(["true"]) as ended:
        # It has ended, and nobody has asked how.
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert identity(ended.pid) is None
    assert tree_bytes(ended.pid) is None
