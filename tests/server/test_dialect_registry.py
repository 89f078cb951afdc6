"""Which dialect a request is in, served or not, and how each dialect tells errors."""

import json

import pytest

from ostro.errors import ContextLengthExceeded, Unavailable
from ostro.server.dialects.chat.framing import DIALECT as CHAT
from ostro.server.dialects.completions.framing import DIALECT as COMPLETIONS
from ostro.server.dialects.dialect import OPENAI, Dialect
from ostro.server.dialects.messages.framing import DIALECT as MESSAGES
from ostro.server.dialects.registry import DIALECTS, dialect_of
from ostro.server.dialects.responses.framing import DIALECT as RESPONSES

ANTHROPIC = [(b"anthropic-version", b"2023-06-01")]


def of(path: str, headers: list[tuple[bytes, bytes]] | None = None) -> Dialect:
    return dialect_of({"type": "http", "path": path, "headers": headers or []})


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETIONS),
        ("/v1/responses", RESPONSES),
        ("/v1/responses/resp_1/cancel", RESPONSES),
        ("/v1/messages", MESSAGES),
        ("/v1/messages/no/such/path", MESSAGES),
        ("/v1/messages2", OPENAI),
        ("/v1/models", OPENAI),
        ("/generate", OPENAI),
        ("/", OPENAI),
    ],
)
def test_a_path_belongs_to_the_dialect_that_it_is_below(path: str, dialect: Dialect) -> None:
    assert of(path) is dialect


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/a/b"])
def test_models_are_listed_in_the_dialect_of_the_header(path: str) -> None:
    assert of(path, ANTHROPIC) is MESSAGES
    assert of("/v1/chat/completions", ANTHROPIC) is CHAT


def test_every_dialect_has_its_own_path() -> None:
    assert len({dialect.path for dialect in DIALECTS}) == len(DIALECTS)
    assert all(of(dialect.path) is dialect for dialect in DIALECTS)


@pytest.mark.parametrize(
    ("dialect", "kinds"),
    [
        (OPENAI, [None, "[DONE]"]),
        (CHAT, [None, "[DONE]"]),
        (COMPLETIONS, [None, "[DONE]"]),
        (RESPONSES, ["error"]),
        (MESSAGES, ["error"]),
    ],
)
def test_a_stream_whose_writer_died_ends_as_its_dialect_ends(dialect: Dialect, kinds: list[str | None]) -> None:
    events = dialect.failed(Unavailable("Gone.")).decode().split("\n\n")[:-1]
    data = [event.split("data: ", 1)[1] for event in events]
    told = json.loads(data[0])
    assert [told.get("type"), *data[1:]] == kinds
    assert "Gone." in data[0]


def test_statuses_and_words_are_the_dialects_own() -> None:
    full = ContextLengthExceeded(limit=8, prompt=9, output=0)
    assert MESSAGES.error_body(full, "req_1").error.message == "prompt is too long: 9 tokens > 8 maximum"
    assert [dialect.status(503) for dialect in (OPENAI, MESSAGES)] == [503, 529]
