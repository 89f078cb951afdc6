"""`docker run --env-file .env`: a file that is read as `.env` elsewhere means the same there."""

import os
import re
from pathlib import Path

import pytest
from warm_start import warm_run

from ostro.errors import BadRequest
from ostro.system.env_file import as_in_dotenv

FILE = """\
# A comment on a line of its own.
AIOS_MODEL_PATH="./my brain"
OSTRO_SERVED_MODEL_NAME='a b'
OSTRO_MAX_BATCH_SEQS=7

OSTRO_CHAT_TEMPLATE=
OSTRO_CORS_ORIGINS=http://a#b,http://c
OSTRO_API_KEY="k=1"
"""


def docker_reads(text: str) -> dict[str, str]:
    """As Docker documents it: blank lines and those that begin with # are left out; the rest stands as it is."""
    lines = [line.lstrip() for line in text.splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def settings(directory: Path, env: dict[str, str]) -> dict[str, str]:
    ran = warm_run(["serve", "--print-config"], cwd=directory, environment=env)
    ran.check_returncode()
    found = re.findall(r"^(\w+): (.*?) +# (?!default)", ran.stdout, re.MULTILINE)
    return dict(found)


def test_the_file_means_the_same_to_docker_and_as_dotenv(tmp_path: Path) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / ".env").write_text(FILE)
    by_dotenv = settings(there, kept)
    by_docker = settings(here, kept | docker_reads(FILE))
    assert by_docker == by_dotenv
    assert by_docker["model"] == '["./my brain"]'
    assert by_docker["cors_origins"] == '["http://a#b", "http://c"]'
    assert by_docker["api_key"] == '["***"]'


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ('"a b"', "a b"),
        ("'a'", "a"),
        ("a 'b'", "a 'b'"),
        ('"', '"'),
        ('""', ""),
        ("a#b", "a#b"),
        (' "a" ', "a"),
        ("'it\"", "'it\""),
    ],
)
def test_quotes_around_a_value_are_taken_off_and_no_others(value: str, plain: str) -> None:
    assert as_in_dotenv("X", value) == plain


@pytest.mark.parametrize("value", ["9000 # the port", "9000\t# the port", "./m #"])
def test_a_comment_behind_a_value_is_refused_by_name(value: str) -> None:
    with pytest.raises(BadRequest, match=r"OSTRO_PORT in the environment ends in a comment.*line of its own"):
        as_in_dotenv("OSTRO_PORT", value)
