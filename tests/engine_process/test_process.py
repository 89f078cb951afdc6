"""The engine process by itself: started as the handle starts it, spoken to over its socket."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ostro.config import EngineConfig
from ostro.engine.request import Request
from ostro.engine_process.messages import (
    LENGTH,
    Abort,
    Boot,
    FromEngine,
    Heartbeat,
    LoadFailed,
    Loading,
    Located,
    Profiled,
    Ready,
    Refused,
    StartProfile,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    body_length,
    decode_from_engine,
    frame,
)
from ostro.processes.log_relay import Logged
from ostro.sampling_params import SamplingParams


class Engine:
    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self.sock = sock
        self._file = sock.makefile("rb")

    def send(self, *messages: ToEngine) -> None:
        self.sock.sendall(b"".join(map(frame, messages)))

    def receive(self) -> FromEngine | None:
        """The next message other than loading progress; None once the engine is gone."""
        while isinstance(message := self._next(), Loading):
            pass
        return message

    def _next(self) -> FromEngine | None:
        header = self._file.read(LENGTH.size)
        return decode_from_engine(self._file.read(body_length(header))) if header else None

    def receive_but_heartbeats(self) -> FromEngine | None:
        while isinstance(message := self.receive(), Heartbeat):
            pass
        return message

    def hang_up(self) -> None:
        self._file.close()
        self.sock.close()

    def exit_status(self) -> int:
        return self.process.wait(60)


@contextmanager
def engine(config: EngineConfig | None = None) -> Iterator[Engine]:
    """An engine that has been sent its Boot."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "ostro.engine_process.process", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0)
    ours.settimeout(30)
    running = Engine(process, ours)
    try:
        running.send(Boot(config or EngineConfig()))
        yield running
    finally:
        running.hang_up()
        process.kill()
        process.wait()


def request(id: int = 1, prompt_ids: tuple[int, ...] = (1, 2, 3), max_tokens: int = 3) -> Request:
    return Request(id=id, prompt_ids=prompt_ids, params=SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed=0)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_FAULTS", "fake")


def ready(running: Engine) -> Ready:
    assert isinstance(running.receive(), Located)
    message = running.receive()
    assert isinstance(message, Ready)
    return message


def tokens(running: Engine, count: int) -> dict[int, list[int]]:
    """The next tokens, by request."""
    found: dict[int, list[int]] = {}
    while sum(map(len, found.values())) < count:
        message = running.receive_but_heartbeats()
        assert isinstance(message, Stepped)
        for progress in message.progress:
            found.setdefault(progress.request_id, []).extend(progress.token_ids)
    return found


@pytest.mark.full
def test_engine_says_where_the_model_is_then_that_it_is_ready_then_works() -> None:
    with engine() as running:
        located = running.receive()
        assert isinstance(located, Located)
        assert Path(located.path).exists()
        message = running.receive()
        assert isinstance(message, Ready)
        assert message.info.name == located.name
        running.send(Submit(request(1)), Submit(request(2, max_tokens=2)))
        found = tokens(running, 5)
        assert {id: len(ids) for id, ids in found.items()} == {1: 3, 2: 2}
        running.send(Stop())
        assert running.receive_but_heartbeats() is None
        assert running.exit_status() == 0


@pytest.mark.full
def test_bad_request_fails_alone() -> None:
    with engine() as running:
        vocab_size = ready(running).info.vocab_size
        running.send(Submit(request(1, (vocab_size,))), Submit(request(2)))
        refused = running.receive_but_heartbeats()
        assert isinstance(refused, Refused)
        assert (refused.request_id, refused.param) == (1, "prompt")
        assert len(tokens(running, 3)[2]) == 3


def test_heartbeat_shows_the_work_and_that_aborted_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_FAULTS", "fake,step_seconds=0.01")
    with engine() as running:
        ready(running)
        running.send(Submit(request(1, max_tokens=8000)))
        while not isinstance(heartbeat := running.receive(), Heartbeat) or not heartbeat.running:
            pass
        assert heartbeat.pages_free < heartbeat.pages_total
        running.send(Abort(1), Abort(1), Abort(99))
        while not isinstance(heartbeat := running.receive(), Heartbeat) or heartbeat.running:
            pass
        assert heartbeat.pages_free + heartbeat.pages_cached == heartbeat.pages_total


@pytest.mark.full
def test_heartbeat_shows_that_a_profile_is_being_written(tmp_path: Path) -> None:
    part = tmp_path / ".trace"
    # Whoever writes into it waits for a reader.
    os.mkfifo(part)
    with engine() as running:
        ready(running)
        running.send(Submit(request(1, max_tokens=8000)), StartProfile(str(tmp_path / "trace"), 2))
        while not isinstance(message := running.receive(), Heartbeat) or not message.writing:
            pass
        for _ in range(3):
            message = running.receive()
            assert isinstance(message, Heartbeat)
            assert message.writing
        part.read_bytes()
        assert isinstance(running.receive_but_heartbeats(), Profiled)
        while not isinstance(message := running.receive(), Heartbeat):
            assert isinstance(message, Stepped)
        assert not message.writing


def test_model_that_cannot_be_found_is_reported_and_the_engine_ends() -> None:
    with engine(EngineConfig(model="./no/such/model")) as running:
        assert running.receive() == LoadFailed("ModelNotFound", "There is no file or directory no/such/model.")
        assert running.receive() is None
        assert running.exit_status() == 1


@pytest.mark.full
@pytest.mark.parametrize("faults", ["fake", "fake,load_seconds=60", "fake,stall_after=0"])
def test_engine_ends_when_its_socket_does(monkeypatch: pytest.MonkeyPatch, faults: str) -> None:
    """Idle, loading, and stuck in a step."""
    monkeypatch.setenv("OSTRO_FAULTS", faults)
    with engine() as running:
        assert isinstance(running.receive(), Located)
        if "load" not in faults:
            assert isinstance(running.receive(), Ready)
            running.send(Submit(request()))
        running.hang_up()
        assert running.exit_status() in (0, -signal.SIGKILL)


@pytest.mark.full
def test_ctrl_c_in_the_terminal_is_not_for_the_engine() -> None:
    with engine() as running:
        ready(running)
        assert os.getpgid(running.process.pid) != os.getpgid(0)


@pytest.mark.full
def test_unexpected_engine_failure_is_logged_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_FAULTS", "fake,crash_affter=3")
    with engine() as running:
        last_words = running.receive()
        assert isinstance(last_words, Logged)
        assert "unknown crash_affter" in last_words.text
        assert "Traceback" in (last_words.exception or "")
        assert running.receive() is None
        assert running.exit_status() != 0
