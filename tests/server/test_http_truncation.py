"""`truncate_prompt_tokens`: prompts lose their beginning by request only, on every endpoint and offline."""

import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import CONTEXT, make_embedding_model, write_model

from ostro import LLM, SamplingParams
from ostro.errors import BadRequest, ContextLengthExceeded

LONG = "the quick brown fox jumps over the lazy dog and the dog does not mind " * 40
SAY = [{"role": "user", "content": LONG}]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding_model(write_model(tmp_path_factory.mktemp("truncated") / "model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with live_server(model.parent, str(model), "--threads", "1", faults="") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


ASKED: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 8},
    "/v1/chat/completions": {"messages": SAY, "max_tokens": 8},
    "/generate": {"prompts": [LONG], "max_tokens": 8},
    "/generate_stream": {"prompts": [LONG], "max_tokens": 8},
    "/loglikelihood": {"prompts": [LONG], "continuations": [" yes"]},
    "/v1/embeddings": {"input": LONG},
}


@pytest.mark.parametrize("path", ASKED)
def test_without_the_field_a_prompt_that_is_too_long_is_refused(client: httpx.Client, path: str) -> None:
    refused = client.post(path, json=ASKED[path])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("count", [-1, 12])
def test_with_the_field_it_is_served(client: httpx.Client, path: str, count: int) -> None:
    answer = client.post(path, json=ASKED[path] | {"truncate_prompt_tokens": count})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_the_usage_shows_what_was_used(client: httpx.Client, path: str) -> None:
    def used(count: int) -> int:
        body = ASKED[path] | {"truncate_prompt_tokens": count}
        return int(client.post(path, json=body).json()["usage"]["prompt_tokens"])

    assert used(12) == 12
    assert used(-1) == CONTEXT - 8


def test_an_embeddings_usage_shows_what_was_used(client: httpx.Client) -> None:
    body = {"input": [LONG, "the fox"], "truncate_prompt_tokens": -1}
    short = client.post("/tokenize", json={"prompt": "the fox"}).json()["count"]
    assert client.post("/v1/embeddings", json=body).json()["usage"]["prompt_tokens"] == CONTEXT + short


def test_the_last_tokens_are_kept(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": LONG}).json()["tokens"]
    asked = {"max_tokens": 8, "temperature": 0}
    cut = client.post("/v1/completions", json=asked | {"prompt": LONG, "truncate_prompt_tokens": 20}).json()
    whole = client.post("/v1/completions", json=asked | {"prompt": ids[-20:]}).json()
    assert cut["choices"][0]["text"] == whole["choices"][0]["text"]


def test_an_echo_is_of_what_was_kept(client: httpx.Client) -> None:
    body = {"prompt": LONG, "max_tokens": 0, "echo": True, "logprobs": 0, "truncate_prompt_tokens": 5}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert LONG.endswith(choice["text"])
    assert len(choice["logprobs"]["tokens"]) == 5


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("count", [0, -2, 1.5])
def test_a_meaningless_count_is_refused_by_name(client: httpx.Client, path: str, count: float) -> None:
    refused = client.post(path, json=ASKED[path] | {"truncate_prompt_tokens": count})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_a_prompt_that_fits_is_left_alone(llm: LLM) -> None:
    [plain] = llm.generate("the fox", GREEDY)
    for count in (-1, 100):
        [kept] = llm.generate("the fox", GREEDY.with_changes(truncate_prompt_tokens=count))
        assert (kept.prompt_ids, kept.text) == (plain.prompt_ids, plain.text)


def test_offline_prompts_are_truncated_alike(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.generate(LONG, GREEDY)
    [cut] = llm.generate(LONG, GREEDY.with_changes(truncate_prompt_tokens=-1))
    assert cut.prompt_ids == tuple(llm.tokenizer.encode(LONG)[-(CONTEXT - 8) :])
    assert llm.chat([{"role": "user", "content": LONG}], GREEDY.with_changes(truncate_prompt_tokens=9)).prompt_ids
    [short] = llm.embed([LONG], truncate_prompt_tokens=7)
    [same] = llm.embed([llm.tokenizer.encode(LONG)[-7:]])
    assert short == pytest.approx(same)


def test_a_prompt_without_a_limit_on_its_output_leaves_half_of_a_short_context(llm: LLM) -> None:
    request = llm.prepare(LONG, SamplingParams(max_tokens=None, truncate_prompt_tokens=-1))
    assert len(request.prompt_ids) == CONTEXT // 2
    request = llm.prepare(LONG, SamplingParams(max_tokens=None, default_max_tokens=20, truncate_prompt_tokens=-1))
    assert len(request.prompt_ids) == CONTEXT - 20


def test_a_score_truncates_the_prompt_and_never_the_continuation(llm: LLM) -> None:
    ids, rest = llm.tokenizer.encode(LONG), llm.tokenizer.encode(" yes no")
    [score] = llm.score([ids], [rest], truncate_prompt_tokens=-1)
    [same] = llm.score([ids[-(CONTEXT - len(rest)) :]], [rest])
    assert math.isclose(score.logprob, same.logprob, rel_tol=1e-4)
    assert score.num_tokens == len(rest)
    with pytest.raises(ContextLengthExceeded):
        llm.score([ids[:5]], [ids], truncate_prompt_tokens=-1)
    with pytest.raises(BadRequest, match="truncate_prompt_tokens must be -1 or at least 1"):
        llm.score([ids], [rest], truncate_prompt_tokens=0)
