import asyncio
import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import structlog
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from ostro.errors import BadRequest
from ostro.server.log.setup import RequestLog, configure_logging
from ostro.server.telemetry.record import RequestRecord

Lines = list[dict[str, object]]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers, root.level = before[0], before[1]
    structlog.reset_defaults()


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    record = scope["state"]["record"]
    if scope["path"] == "/work":
        record.model, record.key, record.stream = "a-model", "key-1234", True
        record.prompt_tokens, record.queued_at = 7, record.started
        record.admitted_at = record.began = record.started + 0.5
        record.count(3, None)
        record.count(2, "stop")
    if scope["path"] == "/fault":
        raise ZeroDivisionError
    status = 503 if scope["path"] in ("/down", "/unready") else 200
    await PlainTextResponse("ok", status, {"x-request-id": "not-mine"})(scope, receive, send)


def ask(
    path: str, headers: dict[str, str] | None = None, *, access_log: bool = True
) -> tuple[httpx.Response, list[RequestRecord]]:
    ended: list[RequestRecord] = []

    async def get() -> httpx.Response:
        app = RequestLog(answer, on_end=ended.append, access_log=access_log, quiet=["/healthz", "/unready"])
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return await client.post(path, content=b"the secret prompt")

    return asyncio.run(get()), ended


def written(capsys: pytest.CaptureFixture[str]) -> str:
    for handler in logging.getLogger().handlers:
        handler.flush()
    return capsys.readouterr().err


def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return [json.loads(line) for line in written(capsys).splitlines()]


def test_request_is_one_line_that_tells_its_course(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    response, ended = ask("/work", {"authorization": "Bearer the-secret-key"})
    [line] = lines(capsys)
    assert line["request_id"] == response.headers["x-request-id"] == ended[0].id
    told = {name: line[name] for name in ("message", "method", "path", "status", "key", "model", "level", "stream")}
    assert told == {
        "message": "request",
        "method": "POST",
        "path": "/work",
        "status": 200,
        "key": "key-1234",
        "model": "a-model",
        "level": "info",
        "stream": True,
    }
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reason"]) == (7, 5, "stop")
    assert line["queue_seconds"] == 0.5
    assert {"ttft_seconds", "tokens_per_second", "seconds", "timestamp"} <= line.keys()
    assert "secret" not in json.dumps(line)


def test_the_start_of_a_request_is_logged_at_debug_level(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level="debug")
    _, [record] = ask("/work")
    ask("/healthz")
    ask("/work", access_log=False)
    begun, ended = [line for line in lines(capsys) if line["logger"] == "ostro.access"]
    told = {name: begun[name] for name in ("message", "request_id", "method", "path", "level")}
    assert told == {
        "message": "request begins",
        "request_id": record.id,
        "method": "POST",
        "path": "/work",
        "level": "debug",
    }
    assert ended["message"] == "request"


def test_probes_and_switched_off_logs_are_silent_unless_something_fails(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    ask("/healthz")
    ask("/unready")
    ask("/work", access_log=False)
    assert lines(capsys) == []
    ask("/down", access_log=False)
    assert [(line["level"], line["status"]) for line in lines(capsys)] == [("warning", 503)]


def test_request_without_an_answer_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    _, ended = ask("/fault")
    assert [record.status for record in ended] == [None]
    assert len(lines(capsys)) == 1


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2:3_x", True), ("a b", False), ("x" * 129, False), ("", False)])
def test_clients_own_id_is_kept_if_it_is_sane(given: str, kept: bool, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    response, _ = ask("/work", {"x-request-id": given})
    assert (response.headers["x-request-id"] == given) == kept
    assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]


@pytest.mark.parametrize("form", ["json", "text"])
def test_control_characters_cannot_forge_a_line(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(form="json" if form == "json" else "text")
    ask("/a%0a%1b%5b31mforged%e2%80%a8")
    text = written(capsys)
    assert len(text.splitlines()) == 1
    assert "\x1b[31mforged" not in text
    assert "\\u000a" in text


def test_lines_of_libraries_have_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    logging.getLogger("uvicorn.error").warning("careful: %s", "here\nthere")
    logging.getLogger("uvicorn.error").info("not worth a line")
    [line] = lines(capsys)
    assert (line["message"], line["level"], line["logger"]) == ("careful: here\\u000athere", "warning", "uvicorn.error")


def test_level_holds(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level="error")
    ask("/work")
    assert lines(capsys) == []


def test_logging_yaml_is_honoured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`%(message)s` used to write a dict."""
    config, log = tmp_path / "logging.yaml", tmp_path / "access.log"
    config.write_text(
        "version: 1\n"
        "formatters: {plain: {format: '%(levelname)s %(name)s: %(message)s'}}\n"
        "handlers:\n"
        f"  file: {{class: logging.FileHandler, filename: {log}, formatter: plain}}\n"
        "loggers:\n"
        "  ostro.access: {handlers: [file], level: INFO, propagate: false}\n"
    )
    configure_logging(config=config)
    ask("/work")
    handlers = logging.getLogger("ostro.access").handlers
    for handler in handlers[:]:
        handler.close()
        logging.getLogger("ostro.access").removeHandler(handler)
    logging.getLogger("ostro.access").propagate = True
    assert lines(capsys) == []
    assert re.fullmatch(r"INFO ostro\.access: POST /work 200 .+ ms\b.*\n", log.read_text())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "Cannot read"),
        ("[1]", "not a logging config"),
        ("handlers: {a: {class: no.Such}}", "not a logging config"),
    ],
)
def test_bad_logging_yaml_is_one_clear_line(tmp_path: Path, text: str | None, complaint: str) -> None:
    config = tmp_path / "logging.yaml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(BadRequest, match=complaint) as error:
        configure_logging(config=config)
    assert "\n" not in str(error.value)


class Pipe(io.StringIO):
    """Takes nothing until it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = threading.Event()

    def write(self, text: str) -> int:
        self.is_read.wait()
        return super().write(text)


def test_lines_that_nobody_reads_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody read held up the event loop once."""
    pipe = Pipe()
    monkeypatch.setattr("sys.stderr", pipe)
    monkeypatch.setattr("ostro.server.log.setup._MOST_LINES", 3)
    configure_logging()
    for number in range(50):
        logging.getLogger("test").warning("line %d", number)
    pipe.is_read.set()
    logging.getLogger().handlers[0].flush()
    told = [json.loads(line)["message"] for line in pipe.getvalue().splitlines()]
    losses = [int(message.split()[0]) for message in told if "were dropped" in message]
    assert losses
    assert sum(losses) + len(told) - len(losses) == 50
