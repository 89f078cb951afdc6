import re

import pytest

from ostro import errors
from ostro.errors import (
    BadRequest,
    ContextLengthExceeded,
    DiskFull,
    DownloadFailed,
    ModelError,
    ModelNotFound,
    OstroError,
    SequenceFailed,
    from_process,
    without_places,
)


def tree(cls: type[OstroError]) -> list[type[OstroError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in tree(child))]


ALL = [cls for cls in tree(OstroError) if cls.__module__ == errors.__name__]


def made(cls: type[OstroError]) -> OstroError:
    return cls(limit=8, prompt=9, output=1) if cls is ContextLengthExceeded else cls("What is wrong. The cure.")


def test_drawing_at_the_top_shows_the_tree_as_it_is() -> None:
    """Name, depth and HTTP status of each class, in order."""
    assert errors.__doc__ is not None
    lines = re.findall(r"^    ([│├└─ ]*)(\w+)(?: +(\d{3}) )?.*$", errors.__doc__, flags=re.MULTILINE)
    drawn = [(name, len(indent) // 4, int(status or 500)) for indent, name, status in lines]
    assert drawn == [(cls.__name__, len(cls.__mro__) - len(OstroError.__mro__), cls.http_status) for cls in ALL]


@pytest.mark.parametrize("cls", ALL)
def test_each_error_carries_its_message_status_and_openai_type(cls: type[OstroError]) -> None:
    error = made(cls)
    assert str(error) == error.message
    assert error.http_status in range(400, 600)
    blame = "invalid_request_error" if error.http_status < 500 else "server_error"
    assert error.openai_type == ("rate_limit_error" if error.http_status == 429 else blame)


def test_caller_mends_bad_requests_only() -> None:
    assert {cls for cls in ALL if cls.http_status == 400} == set(tree(BadRequest)) & set(ALL)


@pytest.mark.parametrize("cls", ALL)
def test_message_is_one_line(cls: type[OstroError]) -> None:
    assert "\n" not in made(cls).message


def test_what_may_name_files_of_the_server_is_not_for_clients() -> None:
    """Paths of the machine went out with the reason why a model could not be loaded."""
    silent = {cls for cls in ALL if made(cls).public != made(cls).message}
    assert silent == {DownloadFailed, DiskFull}
    models: list[type[OstroError]] = [ModelNotFound, *tree(ModelError)]
    for cls in models:
        assert cls("/srv/models/tiny holds no weights.").public == "tiny holds no weights."
    assert all(made(cls).http_status >= 500 for cls in (*silent, *models))


@pytest.mark.parametrize(
    ("message", "public"),
    [
        ("Cannot read /srv/models/tiny/config.json: it is gone.", "Cannot read config.json: it is gone."),
        (
            "There is no tokenizer.json in /srv/my models/a b/tiny. Copy it.",
            "There is no tokenizer.json in tiny. Copy it.",
        ),
        ("Nothing at gs://bucket/models/acme/tiny. Check.", "Nothing at tiny. Check."),
        ("('~/models/tiny/'), or ./here/it.gguf", "('tiny/'), or it.gguf"),
        ("a.bin of org/name and/or 3/4 https://user:secret@host/simple/", "a.bin of org/name and/or 3/4 simple/"),
        ("Nothing at https://user:secret@host/?sig=secret. Check.", "Nothing at host. Check."),
        ("Nothing at https://host/a/b.gguf?sig=secret#part.", "Nothing at b.gguf."),
    ],
)
def test_places_are_cut_down_to_their_last_part(message: str, public: str) -> None:
    assert without_places(message) == public


def test_parameter_at_fault_is_named() -> None:
    assert BadRequest("n must be at least 1.", param="n").param == "n"
    assert ModelNotFound("No such model.").param == "model"
    assert SequenceFailed("It failed.").param is None


def test_context_error_counts_prompt_and_output() -> None:
    error = ContextLengthExceeded(limit=4096, prompt=4000, output=100)
    assert error.message == (
        "This model's maximum context length is 4096 tokens, but you asked for 4100 tokens (4000 in the prompt, "
        "100 to generate). Shorten the prompt or lower max_tokens."
    )
    assert (error.limit, error.prompt, error.output) == (4096, 4000, 100)
    assert (error.http_status, error.openai_code, error.param) == (400, "context_length_exceeded", "prompt")


def test_context_error_without_output_speaks_of_the_prompt_alone() -> None:
    message = ContextLengthExceeded(limit=4096, prompt=5000, output=0).message
    assert message.endswith("but you asked for 5000 tokens in the prompt. Shorten the prompt.")


@pytest.mark.parametrize("cls", ALL)
def test_each_error_crosses_from_one_process_to_another(cls: type[OstroError]) -> None:
    """ContextLengthExceeded is made from numbers, not from a message: that raised a TypeError."""
    error = made(cls)
    there = from_process(cls.__name__, error.message, param=error.param)
    assert isinstance(error, type(there))
    assert (there.message, there.param) == (error.message, error.param)
    assert (there.http_status, there.public) == (error.http_status, error.public)
    assert type(there) is (BadRequest if cls is ContextLengthExceeded else cls)


@pytest.mark.parametrize("name", ["KeyError", "re", "OstroErrors", ""])
def test_an_unknown_error_of_another_process_keeps_its_message(name: str) -> None:
    assert type(from_process(name, "What is wrong.")) is ModelError
    assert type(from_process(name, "What is wrong.", otherwise=DownloadFailed)) is DownloadFailed
