import json
import time
from email.utils import formatdate

import pytest

from ostro.client.failures import error_in, error_of
from ostro.errors import (
    BadCheckpoint,
    BadRequest,
    ContextLengthExceeded,
    ModelError,
    NotAuthorized,
    OstroError,
    QueueFull,
    ServerError,
    TryLater,
    Unavailable,
    UnsupportedModel,
)
from ostro.schemas.wire import ErrorBody
from ostro.server.error_handlers import error_response


def tree(cls: type[OstroError]) -> list[type[OstroError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in tree(child))]


ALL = [cls for cls in tree(OstroError) if cls.__module__ == OstroError.__module__]
# Classes that look alike from outside arrive as their base class; one without a code, as a server's failure.
SEEN_AS: dict[type[OstroError], type[OstroError]] = {
    BadCheckpoint: ModelError,
    UnsupportedModel: ModelError,
    OstroError: ServerError,
}


def made(cls: type[OstroError]) -> OstroError:
    if cls is ContextLengthExceeded:
        return cls(limit=8, prompt=9, output=1, param="messages")
    if issubclass(cls, TryLater):
        return cls("Not now.", retry_after=7)
    return cls("What is wrong. The cure.", param="seed")


@pytest.mark.parametrize("cls", ALL)
def test_an_error_comes_out_as_the_server_raised_it(cls: type[OstroError]) -> None:
    raised = made(cls)
    response = error_response(raised)
    error = error_of(response.status_code, response.headers, bytes(response.body))
    assert type(error) is SEEN_AS.get(cls, cls)
    assert (error.message, error.param) == (raised.public, raised.param)
    if isinstance(error, TryLater):
        assert error.retry_after == 7
    if isinstance(error, ContextLengthExceeded):
        assert (error.limit, error.prompt, error.output) == (8, 9, 1)


@pytest.mark.parametrize("cls", ALL)
def test_an_error_within_a_stream_comes_out_as_the_server_raised_it(cls: type[OstroError]) -> None:
    raised = made(cls)
    error = error_in(ErrorBody.of(raised).model_dump_json().encode())
    assert error is not None
    # An event has no status, by which a model's files that are missing differ from those that are damaged.
    assert error.openai_code == SEEN_AS.get(cls, cls).openai_code
    assert (error.message, error.param) == (raised.public, raised.param)


def test_a_prompt_that_is_too_long_by_itself_keeps_its_numbers() -> None:
    response = error_response(ContextLengthExceeded(limit=8, prompt=9, output=0))
    error = error_of(400, response.headers, bytes(response.body))
    assert isinstance(error, ContextLengthExceeded)
    assert (error.limit, error.prompt, error.output) == (8, 9, 0)


@pytest.mark.parametrize(
    ("status", "body", "cls", "told"),
    [
        (404, b'{"detail": "Not Found"}', BadRequest, "Not Found"),
        (422, b'{"error": "no such field"}', BadRequest, "no such field"),
        (403, b"<html>\nForbidden</html>", NotAuthorized, "<html> Forbidden</html>"),
        (429, b"{}", QueueFull, "{}"),
        (503, b"", Unavailable, "HTTP 503"),
        (502, b"Bad\ngateway", ServerError, "Bad gateway"),
        (500, b'{"error": {"message": 1}}', ServerError, "1"),
        (400, b'{"error": {"message": "long", "code": "context_length_exceeded"}}', BadRequest, "long"),
        (418, b"x" * 5000, BadRequest, "x" * 500 + "…"),
        (500, b"[" * 100_000, ServerError, "[["),
        (500, b"\xff\xfe", ServerError, "\ufffd"),
        (500, b'{"error": {"message": "half \\ud83d"}}', ServerError, "half ?"),
    ],
)
def test_answers_of_other_servers_and_proxies_are_understood(
    status: int, body: bytes, cls: type[OstroError], told: str
) -> None:
    error = error_of(status, {}, body)
    assert type(error) is cls
    assert told in error.message
    assert "\n" not in error.message
    if isinstance(error, ServerError):
        assert error.status == status


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3), ("0.2", 1), ("-4", 0), ("soon", 1), ("nan", 1), ("inf", 1), ("1e999", 1)],
)
def test_retry_after_is_read_in_seconds(header: str, seconds: int) -> None:
    error = error_of(429, {"retry-after": header}, b"{}")
    assert isinstance(error, QueueFull)
    assert error.retry_after == seconds


def test_retry_after_may_be_a_date() -> None:
    soon = error_of(503, {"retry-after": formatdate(time.time() + 30, usegmt=True)}, b"{}")
    past = error_of(503, {"retry-after": formatdate(0, usegmt=True)}, b"{}")
    assert isinstance(soon, Unavailable)
    assert isinstance(past, Unavailable)
    assert 1 <= soon.retry_after <= 31
    assert past.retry_after == 0


@pytest.mark.parametrize("event", [{"choices": []}, {"error": None}, [], "error"])
def test_other_events_are_no_errors(event: object) -> None:
    assert error_in(json.dumps(event).encode()) is None
