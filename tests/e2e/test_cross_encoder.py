"""`ostro serve` with a cross-encoder: /v1/rerank and /v1/score give what `LLM.relevance` gives, in their own shapes."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from encoder_directory import CASES, reference, write_encoder
from live_server import LiveServer, live_server

from ostro import LLM, Client
from ostro.errors import ContextLengthExceeded, Unsupported

QUERY = "what is the capital of france"
DOCUMENTS = ["the quick brown fox", "paris is the capital of france", "france"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "judge", reference(CASES["bert"], labels=1))


@pytest.fixture(scope="module")
def scores(directory: Path) -> list[float]:
    return LLM(directory).relevance([(QUERY, document) for document in DOCUMENTS])


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[LiveServer]:
    with live_server(directory.parent, str(directory), faults="") as live:
        yield live


@pytest.mark.full
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_order_of_their_relevance(server: LiveServer, scores: list[float], path: str) -> None:
    body = {"model": "judge", "query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]}
    answer = httpx.post(f"{server.url}{path}", json={**body, "return_documents": True}).json()
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [each["index"] for each in answer["results"]] == order
    assert [each["document"] for each in answer["results"]] == [{"text": DOCUMENTS[index]} for index in order]
    found = [each["relevance_score"] for each in answer["results"]]
    assert found == pytest.approx([scores[index] for index in order], abs=1e-6)
    assert (answer["model"], answer["id"][:7]) == ("judge", "rerank-")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 30
    [best] = httpx.post(f"{server.url}{path}", json={**body, "top_n": 1}).json()["results"]
    # The last bits depend on which texts share a step.
    assert best == {"index": order[0], "relevance_score": pytest.approx(found[0], abs=1e-6)}


@pytest.mark.parametrize(
    "texts",
    [
        {"text_1": QUERY, "text_2": DOCUMENTS},
        {"text_1": [QUERY] * 3, "text_2": DOCUMENTS},
        {"queries": QUERY, "documents": DOCUMENTS},
    ],
)
def test_pairs_are_scored_in_order(server: LiveServer, scores: list[float], texts: dict[str, object]) -> None:
    answer = httpx.post(f"{server.url}/v1/score", json=texts).json()
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    assert [each["score"] for each in answer["data"]] == pytest.approx(scores, abs=1e-6)
    assert answer["object"] == "list"


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("texts", "param"),
    [
        ({"text_1": QUERY}, "text_2"),
        ({"text_2": QUERY}, "text_1"),
        ({"text_1": QUERY, "queries": QUERY, "documents": QUERY}, "text_1"),
        ({"text_1": [QUERY] * 2, "text_2": DOCUMENTS}, "text_1"),
        ({"text_1": QUERY, "text_2": []}, "text_2"),
        ({"text_1": QUERY, "text_2": [1]}, "text_2"),
        ({"text_1": QUERY, "text_2": QUERY, "instruction": "x"}, "instruction"),
    ],
)
def test_malformed_pairs_are_refused_by_name(server: LiveServer, texts: dict[str, object], param: str) -> None:
    answer = httpx.post(f"{server.url}/v1/score", json=texts)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "texts", "param"),
    [
        ("/v1/rerank", {"query": "the dog " * 300, "documents": ["paris"]}, "query"),
        ("/v1/rerank", {"query": "paris", "documents": ["the dog " * 300]}, "documents"),
        ("/v1/score", {"queries": "the dog " * 300, "documents": "paris"}, "queries"),
        ("/v1/score", {"text_1": "paris", "text_2": "the dog " * 300}, "text_2"),
        ("/v1/rerank", {"query": QUERY, "documents": ["paris"], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
def test_a_text_that_does_not_fit_is_named(server: LiveServer, path: str, texts: dict[str, object], param: str) -> None:
    answer = httpx.post(f"{server.url}{path}", json=texts)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_client_ranks_and_is_told_what_the_model_cannot_do(server: LiveServer, scores: list[float]) -> None:
    with Client(server.url) as client:
        assert client.rerank(QUERY, DOCUMENTS, top_n=1).results[0].relevance_score == pytest.approx(max(scores))
        with pytest.raises(ContextLengthExceeded):
            client.score(QUERY, "the dog " * 40)
        assert len(client.score(QUERY, "the dog " * 40, truncate_prompt_tokens=-1).data) == 1
        with pytest.raises(Unsupported, match="ranks texts"):
            client.embed("the fox")
        with pytest.raises(Unsupported, match="cannot generate"):
            client.complete("the fox")
