"""The tables of docs/coming-from: what they say of Ostro exists, what they call the same is accepted as it stands."""

import re
from dataclasses import dataclass
from functools import cache

import pytest
from doc_pages import ROOT, code_spans, tables

from docs_reference.api_tables import openapi
from ostro.cli import COMMANDS, _parser
from ostro.cli.parser import CommandParser
from ostro.cli.serve import add_arguments
from ostro.errors import BadRequest
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.completions import CompletionRequest
from ostro.schemas.native import GenerateRequest, GenerateResponse
from ostro.server.settings import ALIASES, REFUSED, ServeSettings, variables_of

PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
# Served besides what the OpenAPI document tells.
OTHER_PATHS = {"/docs", "/redoc", "/openapi.json", "/metrics", "/"}
OTHER_VARIABLES = {"OSTRO_CACHE", "LOCAL_MODEL_CACHE"}
KINDS = ("flag", "variable", "endpoint", "field", "command")


@cache
def flags() -> set[str]:
    parser = CommandParser()
    add_arguments(parser)
    return set(parser._option_string_actions) - {"--" + name.replace("_", "-") for name in REFUSED}


@cache
def variables() -> set[str]:
    return {each for name in ServeSettings.model_fields for each in variables_of(name)} | OTHER_VARIABLES


@cache
def fields() -> set[str]:
    models = (ChatCompletionRequest, CompletionRequest, GenerateRequest, GenerateResponse)
    return {name for model in models for name in model.model_fields}


@dataclass(frozen=True)
class Row:
    kind: str
    theirs: str
    ours: str
    note: str
    place: str


def rows() -> list[Row]:
    found = []
    for page in PAGES:
        for table in tables(page):
            if table.head[0] in KINDS:
                assert table.head[1] == "Ostro", f"{table.page}: {table.head}"
                found += [
                    Row(table.head[0], theirs, ours, note, f"{table.page}: {theirs}")
                    for theirs, ours, note in table.rows
                ]
    return found


@pytest.fixture(scope="module")
def paths() -> set[str]:
    return set(openapi()["paths"]) | OTHER_PATHS


def exists(name: str, paths: set[str]) -> bool:
    """Whether Ostro has it: a flag, a variable, an endpoint, a command, a field."""
    if name.startswith("--"):
        return name.split()[0] in flags()
    if name.startswith("ostro "):
        return name.split()[1] in COMMANDS
    if endpoint := re.fullmatch(r"(?:GET |POST )?(/.*)", name):
        return endpoint[1] in paths
    if re.fullmatch(r"[A-Z][A-Z_]+", name):
        return name in variables()
    return name in fields()


def test_there_are_tables_of_each_kind() -> None:
    assert {row.kind for row in rows()} == set(KINDS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.place)
def test_what_a_row_says_of_ostro_is_true(row: Row, paths: set[str]) -> None:
    theirs = code_spans(row.theirs)
    match row.ours:
        case "the same":
            assert theirs, "nothing on the left is named"
            accepted = flags() if row.kind == "flag" else variables() if row.kind == "variable" else paths
            assert [name for name in theirs if name.split()[0] not in accepted] == []
        case "refused":
            for name in theirs:
                with pytest.raises((BadRequest, SystemExit)):
                    _parser(["serve", name]).parse_args(["serve", name])
        case "none":
            if row.kind == "flag":
                assert [name for name in theirs if name.split()[0] in flags()] == []
            if row.kind == "endpoint":
                assert [name for name in theirs if name in paths] == []
        case _:
            assert code_spans(row.ours), "say what, in code, or: the same, refused, none"
            assert [name for name in code_spans(row.ours) if not exists(name, paths)] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.place)
def test_flags_and_endpoints_in_notes_exist(row: Row, paths: set[str]) -> None:
    named = [name for name in code_spans(row.note) if re.match(r"--[a-z]|/[a-z]|OSTRO_", name)]
    assert [name for name in named if not exists(name, paths)] == []


def test_every_alias_is_in_a_table() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    # No other server has these two.
    ours = {"--max-cached-models", "--model-name-or-path"}
    names = {name for each in ALIASES.values() for name in (*each.flags, *each.foreign)} - ours
    assert {
        name for name in names if f"`{name}" not in text and f"{name} " not in text and f"{name}=" not in text
    } == set()
