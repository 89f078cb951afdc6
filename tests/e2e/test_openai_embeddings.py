"""OpenAI's own Python client against `ostro serve` with a model that embeds: the vectors are those of `LLM.embed`."""

import base64
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import openai
import pytest
from live_server import LiveServer, live_server
from model_directory import CONTEXT, HIDDEN, make_embedding_model, write_model
from openai import OpenAI
from openai.types import CreateEmbeddingResponse

from ostro import LLM, Client

TEXTS = ["the quick brown fox", "the dog does not mind", "café 你好"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding_model(write_model(tmp_path_factory.mktemp("embedding") / "vectors"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(directory)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[LiveServer]:
    with live_server(directory.parent, str(directory), faults="") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors_of(answer: CreateEmbeddingResponse) -> list[list[float]]:
    """In order; the client has decoded them."""
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return [entry.embedding for entry in answer.data]


def same(vectors: Sequence[Sequence[float]]) -> list[object]:
    return [pytest.approx(vector, abs=1e-5) for vector in vectors]


@pytest.mark.full
def test_one_text_gives_one_vector_of_length_one(client: OpenAI, llm: LLM) -> None:
    answer = client.embeddings.create(model="default", input=TEXTS[0])
    [vector] = vectors_of(answer)
    assert [vector] == same(llm.embed(TEXTS[0]))
    assert len(vector) == HIDDEN
    assert math.hypot(*vector) == pytest.approx(1.0)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "vectors", "embedding")


def test_several_texts_give_their_vectors_in_order(client: OpenAI, llm: LLM) -> None:
    assert vectors_of(client.embeddings.create(model="vectors", input=TEXTS)) == same(llm.embed(TEXTS))


def test_token_ids_give_the_vector_of_their_text(client: OpenAI, llm: LLM) -> None:
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    expected = same(llm.embed(TEXTS))
    assert vectors_of(client.embeddings.create(model="default", input=ids[0])) == expected[:1]
    assert vectors_of(client.embeddings.create(model="default", input=ids)) == expected


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_encoding_that_was_asked_for_is_the_one_that_comes(
    client: OpenAI, llm: LLM, encoding: Literal["float", "base64"]
) -> None:
    answer = client.embeddings.create(model="default", input=TEXTS, encoding_format=encoding)
    # The client hands on what it was told to ask for, base64 too, whatever its types say.
    found: list[object] = [entry.embedding for entry in answer.data]
    if encoding == "base64":
        found = [struct.unpack(f"<{HIDDEN}f", base64.b64decode(str(text), validate=True)) for text in found]
    assert [list(vector) for vector in found if isinstance(vector, list | tuple)] == same(llm.embed(TEXTS))


def test_usage_counts_the_tokens_of_all_inputs(client: OpenAI, llm: LLM) -> None:
    usage = client.embeddings.create(model="default", input=TEXTS).usage
    count = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    assert (usage.prompt_tokens, usage.total_tokens) == (count, count)


def test_dimensions_may_be_those_of_the_model_and_no_others(client: OpenAI, llm: LLM) -> None:
    whole = client.embeddings.create(model="default", input=TEXTS, dimensions=HIDDEN)
    assert vectors_of(whole) == same(llm.embed(TEXTS))
    for dimensions in (HIDDEN // 2, HIDDEN + 1):
        with pytest.raises(openai.BadRequestError, match=f"{HIDDEN} dimensions") as refused:
            client.embeddings.create(model="default", input="x", dimensions=dimensions)
        assert (refused.value.param, refused.value.code) == ("dimensions", "unsupported")


def test_ranking_by_an_embedding_model_is_by_cosine(server: LiveServer, llm: LLM) -> None:
    [query, *documents] = llm.embed(TEXTS)
    cosines = [sum(a * b for a, b in zip(query, document, strict=True)) for document in documents]
    with Client(server.url) as client:
        scored = client.score(TEXTS[0], TEXTS[1:])
        assert [each.score for each in scored.data] == pytest.approx(cosines, abs=1e-5)
        best = client.rerank(TEXTS[0], TEXTS[1:], top_n=1).results
        assert [each.index for each in best] == [cosines.index(max(cosines))]


def test_input_that_is_too_long_is_refused_and_not_cut(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="default", input=["the fox", "the dog " * CONTEXT])
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
