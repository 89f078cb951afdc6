"""The OpenAPI document is true: what it promises is what the server does, whatever it is sent."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, live_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
PATHS = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/responses/{id}/input_items",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/generate",
    "/generate_stream",
    "/loglikelihood",
    "/pseudo_loglikelihood",
    "/hrm/solve",
    "/v1/models",
    "/v1/models/{id}",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/healthz",
    "/readyz",
    "/health",
    "/version",
    "/admin/load/{model}",
    "/admin/unload/{model}",
    "/admin/pin/{model}",
    "/admin/unpin/{model}",
    "/admin/profile",
    "/admin/stats",
    "/admin/available",
    "/admin/plan/{model}",
    "/prefill",
]
# Each has a body of some fifty fields, or takes that of another endpoint: to go through every value that is documented
# as a bound takes minutes. They are sent random bodies only, unless the tests may be slow.
LARGE = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/completions",
    "/generate",
    "/generate_stream",
    "/loglikelihood",
    "/pseudo_loglikelihood",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    # A list of two thousand prompts is a request like any other: on a busy machine long answers to it take minutes.
    with live_server(tmp_path_factory.mktemp("openapi"), "--max-new-tokens", "16") as live:
        yield live


@pytest.mark.full
def test_document_describes_every_endpoint_and_all_references_resolve(server: LiveServer) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()
    assert sorted(document["paths"]) == sorted(PATHS)
    schemas = document["components"]["schemas"]
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    # An event is an object to those who check streams, and was called a string.
    answer = document["paths"]["/v1/completions"]["post"]["responses"]["200"]
    assert "type" not in answer["content"]["text/event-stream"]["schema"]


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_whatever_is_sent_the_answers_are_as_documented(server: LiveServer, tmp_path: Path) -> None:
    check_answers(server, tmp_path, "--phases", "fuzzing", "--max-examples", "3")


@pytest.mark.full
def test_answers_are_as_documented_for_more_examples_and_at_every_bound(server: LiveServer, tmp_path: Path) -> None:
    large = f"[[operations]]\ninclude-path = {json.dumps(LARGE)}\nphases.coverage.enabled = false\n"
    check_answers(server, tmp_path, "--phases", "coverage,fuzzing", "--max-examples", "10", settings=large)


@pytest.mark.slow
def test_answers_are_as_documented_at_every_bound_of_a_large_body(server: LiveServer, tmp_path: Path) -> None:
    included = (word for path in LARGE for word in ("--include-path", path))
    check_answers(server, tmp_path, "--phases", "coverage", *included)


def check_answers(server: LiveServer, directory: Path, *options: str, settings: str = "") -> None:
    """By all that a phase of Schemathesis comes up with. `settings` are lines of its configuration."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json", *options]
    command += ["--checks", ",".join(CHECKS), "--seed", "1", "--request-timeout", "120", "--no-color"]
    # A list that is too long may be refused as a body that is too large.
    refusals = ["400", "401", "404", "405", "413", "415", "422"]
    (directory / "schemathesis.toml").write_text(
        f"{settings}[checks.negative_data_rejection]\nexpected-statuses = {json.dumps(refusals)}\n"
    )
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Traceback" not in server.log_text
