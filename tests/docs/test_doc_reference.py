"""What is generated in the docs is what the code says now."""

import re
from pathlib import Path
from typing import get_args

import pytest
from doc_pages import ROOT, code_spans, name_of, tables

from docs_reference import api_tables, settings_tables
from docs_reference.attributes import notes
from docs_reference.markup import fill
from docs_reference.pages import generated, pages, parts
from ostro.cli.parser import CommandParser
from ostro.cli.serve import add_arguments
from ostro.errors import BadRequest, OstroError, ServerError
from ostro.schemas.chat import ChatCompletionRequest, Message
from ostro.schemas.completions import CompletionRequest
from ostro.schemas.embeddings import EmbeddingRequest
from ostro.schemas.messages import CreateMessage, Tool
from ostro.schemas.native import GenerateRequest
from ostro.schemas.responses import CreateResponse, FunctionTool
from ostro.schemas.wire import RequestModel, parse
from ostro.server.settings import GROUPS, ONLY_IN_FILES, REFUSED, ServeSettings

LEAST: dict[type[RequestModel], dict[str, object]] = {
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
    EmbeddingRequest: {"input": "a"},
    GenerateRequest: {"prompts": ["a"]},
    Message: {"role": "user", "content": "a"},
}
# Fields that another one has to allow.
COMPANIONS: dict[str, dict[str, object]] = {"top_logprobs": {"logprobs": True}}


@pytest.mark.cases(2)
@pytest.mark.parametrize("document", generated(), ids=name_of)
def test_page_is_what_the_generator_makes(document: Path) -> None:
    stale = f"{name_of(document)} is stale: run `make docs-generate`"
    assert document.read_text(encoding="utf-8") == pages()[document], stale


def test_every_generated_part_is_on_a_page() -> None:
    made = parts().keys()
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    assert {each for each in made if f"<!-- generated: {each} -->" not in text} == set()


def test_filling_twice_changes_nothing() -> None:
    page = "a\n\n<!-- generated: x -->\nold\n<!-- end -->\n\nb"
    once = fill(page, {"x": "new"})
    assert once == "a\n\n<!-- generated: x -->\n\nnew\n\n<!-- end -->\n\nb"
    assert fill(once, {"x": "new"}) == once


def test_every_setting_says_what_it_means() -> None:
    assert [name for name, field in ServeSettings.model_fields.items() if not field.description] == []
    assert settings_tables.SEE.keys() <= ServeSettings.model_fields.keys()
    assert GROUPS.keys() <= ServeSettings.model_fields.keys()


@pytest.mark.parametrize("request_model", api_tables.OPENAI, ids=lambda model: model.__name__)
def test_every_field_of_openais_is_served_without_effect_or_refused_by_name(request_model: type[RequestModel]) -> None:
    known = set(request_model.model_fields) | request_model.ignored | set(request_model.unserved)
    assert api_tables.openai_fields(request_model) - known == set()


@pytest.mark.parametrize("request_model", [ChatCompletionRequest, CompletionRequest, Message], ids=lambda m: m.__name__)
def test_fields_that_the_docs_call_refused_are_refused_by_name(request_model: type[RequestModel]) -> None:
    for name, harmless in request_model.unserved.items():
        with pytest.raises(BadRequest, match=f"{name} is not supported") as error:
            parse(request_model, LEAST[request_model] | {name: "something"})
        assert error.value.param == name
        for value in harmless:
            parse(request_model, LEAST[request_model] | {name: value})


@pytest.mark.parametrize("request_model", api_tables.OPENAI, ids=lambda model: model.__name__)
def test_extras_of_vllms_that_the_docs_call_refused_are_refused(request_model: type[RequestModel]) -> None:
    for name in api_tables.VLLM[request_model] - set(request_model.model_fields):
        with pytest.raises(BadRequest, match=name):
            parse(request_model, LEAST[request_model] | {name: "something"})


def ranges() -> list[tuple[type[RequestModel], str, float, float]]:
    """Those that notes on fields tell: "0 to 2" and "Above 0, up to 1"."""
    found: list[tuple[type[RequestModel], str, float, float]] = []
    for model in (ChatCompletionRequest, CompletionRequest, GenerateRequest):
        for name, note in notes(model).items():
            if name in model.model_fields and (numbers := re.match(r"(-?\d+) to (-?\d+)\b", note)):
                found.append((model, name, float(numbers[1]), float(numbers[2])))
            elif numbers := re.match(r"Above (\d+), up to (\d+)", note):
                found.append((model, name, float(numbers[1]) + 0.01, float(numbers[2])))
    return found


@pytest.mark.parametrize(("model", "field", "low", "high"), ranges())
def test_ranges_in_the_docs_are_those_that_hold(model: type[RequestModel], field: str, low: float, high: float) -> None:
    whole = float not in (model.model_fields[field].annotation, *get_args(model.model_fields[field].annotation))

    def check(value: float) -> None:
        given = LEAST[model] | COMPANIONS.get(field, {}) | {field: int(value) if whole else value}
        parse(model, given).sampling_params()  # type: ignore[attr-defined]

    check(low)
    check(high)
    for outside in (low - (1 if whole else 0.02), high + (1 if whole else 0.02)):
        with pytest.raises(BadRequest, match=field):
            check(outside)


def test_ranges_are_documented_for_the_fields_that_have_them() -> None:
    told = {field for _, field, _, _ in ranges()}
    assert told >= {"temperature", "top_p", "min_p", "n", "presence_penalty", "frequency_penalty", "logprobs"}


def test_missing_endpoints_are_absent_and_their_replacements_exist() -> None:
    [table] = [each for each in tables(ROOT / "docs" / "unsupported.md") if each.head == ("endpoint", "instead")]
    served = set(api_tables.openapi()["paths"])
    for absent, instead in table.rows:
        assert not served & set(code_spans(absent))
        assert {name for name in code_spans(instead) if name.startswith("/")} <= served


def test_statuses_in_the_docs_are_those_of_all_errors() -> None:
    [table] = [each for each in tables(ROOT / "docs" / "api" / "index.md") if each.head == ("status", "when")]
    told = {int(status) for status, _ in table.rows}
    kinds: list[type[OstroError]] = [OstroError]
    while kinds:
        kind = kinds.pop()
        # What only clients raise has no status here.
        kinds += [each for each in kind.__subclasses__() if each is not ServerError]
        assert kind.http_status in told, kind.__name__


def test_flags_in_the_docs_are_those_that_the_command_has() -> None:
    [table] = [
        each for each in tables(ROOT / "docs" / "configuration.md") if each.head[:2] == ("setting", "other names")
    ]
    names = [
        *(ServeSettings.model_fields.keys() - ONLY_IN_FILES),
        *(name for row in table.rows for name in code_spans(row[1])),
    ]
    told = {"--" + (name if "." in name else name.replace("_", "-")) for name in names}
    parser = CommandParser(add_help=False)
    add_arguments(parser)
    known = set(parser._option_string_actions)
    known -= {"--config", "--config-path", "--print-config", "--dry-run", "--help-all"}
    known -= {"--" + name.replace("_", "-") for name in REFUSED}
    # Switches can be turned round.
    assert known - told <= {"--no-" + flag[2:] for flag in told}
    assert told <= known


@pytest.mark.parametrize(
    ("kind", "page"),
    [(CreateResponse, "responses"), (FunctionTool, "responses"), (CreateMessage, "messages"), (Tool, "messages")],
)
def test_every_field_without_effect_is_named_in_the_docs(kind: type[RequestModel], page: str) -> None:
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text()
    assert {name for name in kind.ignored if f"`{name}`" not in text} == set()
