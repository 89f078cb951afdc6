"""/generate, /generate_stream, /loglikelihood and /pseudo_loglikelihood over a real socket."""

import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from live_server import LiveServer, live_server
from model_directory import CONTEXT, write_model
from sse_events import events_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny and random, with a real tokenizer."""
    return write_model(tmp_path_factory.mktemp("native") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with live_server(model.parent, str(model), "--threads", "1", "--max-new-tokens", "64", faults="") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def answer(client: httpx.Client, path: str, **body: object) -> dict[str, list[float]]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    parsed: dict[str, list[float]] = response.json()
    return parsed


def completed(client: httpx.Client, prompt: str, **body: object) -> str:
    return str(client.post("/v1/completions", json={"prompt": prompt, **body}).json()["choices"][0]["text"])


def test_each_prompt_gets_what_it_gets_alone_by_the_openai_api(client: httpx.Client) -> None:
    prompts = ["Hello", "Once upon a time", "Hello"]
    body = client.post("/generate", json={"prompts": prompts, "max_tokens": 8, "temperature": 0.7, "seed": 3}).json()
    assert set(body) == {"completions", "usage"}
    expected = [completed(client, prompt, max_tokens=8, temperature=0.7, seed=3) for prompt in prompts]
    assert body["completions"] == expected
    usage = body["usage"]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24


def test_without_a_number_an_answer_is_as_long_as_the_server_allows(client: httpx.Client) -> None:
    body = client.post(
        "/generate", json={"prompts": ["Hello", "a " * 100], "temperature": 0, "max_tokens": None}
    ).json()
    tokens = client.post("/tokenize", json={"prompt": "a " * 100}).json()["count"]
    assert body["usage"]["completion_tokens"] <= 64 + min(64, CONTEXT - tokens)
    assert body["usage"]["completion_tokens"] > 0


def test_a_lone_prompt_is_a_list_of_one(client: httpx.Client) -> None:
    one = client.post("/generate", json={"prompts": "Hello", "max_tokens": 4, "temperature": 0}).json()
    assert one["completions"] == [completed(client, "Hello", max_tokens=4, temperature=0)]


def test_a_stream_adds_up_to_the_same_texts(client: httpx.Client) -> None:
    body = {"prompts": ["Hello", "Once upon a time"], "max_tokens": 9, "temperature": 0.9, "seed": 5}
    whole = client.post("/generate", json=body).json()
    response = client.post("/generate_stream", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = events_of(response.text)
    texts = ["".join(each["text"] for each in events if each["index"] == index) for index in (0, 1)]
    assert texts == whole["completions"]
    assert [each["finish_reason"] for each in events if each["finish_reason"]] == ["length", "length"]
    assert last == {"usage": whole["usage"]}


def test_stop_texts_end_a_completion(client: httpx.Client) -> None:
    text = completed(client, "Hello", max_tokens=12, temperature=0)
    stop = text[4:6]
    body = {"prompts": ["Hello"], "max_tokens": 12, "temperature": 0, "stop": [stop]}
    given = client.post("/generate", json=body).json()
    assert given["completions"] == [text[: text.index(stop)]]


def test_the_likelihood_is_the_sum_of_the_echoed_log_probabilities(client: httpx.Client) -> None:
    prompts = ["Hello", "Once upon a", "The cat"]
    continuations = [" world", " time there was", " sat on the mat."]
    given = answer(client, "/loglikelihood", prompts=prompts, continuations=continuations)
    for at, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        border = client.post("/tokenize", json={"prompt": prompt}).json()["count"]
        body = {"prompt": prompt + continuation, "max_tokens": 0, "echo": True, "logprobs": 1}
        logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        own = logprobs["token_logprobs"][border:]
        assert math.isclose(given["ll"][at], sum(own), rel_tol=1e-6, abs_tol=1e-5)
        assert given["num_tokens"][at] == len(own)
        best = [max(top.values()) for top in logprobs["top_logprobs"][border:]]
        assert given["is_greedy"][at] == (own == best)


@pytest.mark.full
def test_the_likelihood_is_that_of_transformers(client: httpx.Client, model: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompts, continuations = ["the quick", "Hello there, you"], [" brown fox jumps", " lazy dog"]
    given = answer(client, "/loglikelihood", prompts=prompts, continuations=continuations)
    for at, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        border = client.post("/tokenize", json={"prompt": prompt}).json()["count"]
        ids = client.post("/tokenize", json={"prompt": prompt + continuation}).json()["tokens"]
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(float(logprobs[place - 1, ids[place]]) for place in range(border, len(ids)))
        assert math.isclose(given["ll"][at], expected, abs_tol=1e-4)


@pytest.mark.full
def test_a_greedy_continuation_is_known_as_one(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "Hello there"}).json()["tokens"]
    body = {"prompt": ids, "max_tokens": 5, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    continuation = _likeliest(client, ids, 5)
    given = answer(client, "/loglikelihood", prompts=[ids], continuations=[continuation])
    assert given["is_greedy"] == [True]
    assert math.isclose(given["ll"][0], sum(choice["logprobs"]["token_logprobs"]), abs_tol=1e-4)


def _likeliest(client: httpx.Client, ids: list[int], count: int) -> list[int]:
    """The likeliest next tokens, one after the other, each found among all."""
    size = client.get("/tokenizer_info").json()["vocab_size"]
    found: list[int] = []
    for _ in range(count):
        scores = answer(
            client,
            "/loglikelihood",
            prompts=[[*ids, *found]] * size,
            continuations=[[token] for token in range(size)],
        )["ll"]
        found.append(max(range(size), key=scores.__getitem__))
    return found


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        ("/generate", {"prompts": []}, "prompts"),
        ("/generate", {}, "prompts"),
        ("/generate", {"prompts": ["a"], "temperature": 2.5}, "temperature"),
        ("/generate", {"prompts": ["a"], "temperature": -0.1}, "temperature"),
        ("/generate", {"prompts": ["a"], "top_p": 0}, "top_p"),
        ("/generate", {"prompts": ["a"], "max_tokens": 65}, "max_tokens"),
        ("/generate", {"prompts": ["a"], "max_new_tokens": 5}, "max_new_tokens"),
        ("/generate", {"prompts": [""]}, "prompt"),
        ("/generate_stream", {"prompts": ["a"], "seed": "x"}, "seed"),
        ("/loglikelihood", {"prompts": ["a"], "continuations": []}, "continuations"),
        ("/loglikelihood", {"prompts": ["a"], "continuations": ["b", "c"]}, "continuations"),
        ("/loglikelihood", {"prompts": ["a"], "continuations": [""]}, "continuation"),
        ("/loglikelihood", {"prompts": [""], "continuations": ["b"]}, "prompt"),
        ("/loglikelihood", {"prompts": ["a"], "continuations": [[1]]}, "both"),
        ("/pseudo_loglikelihood", {"prompts": ["a"], "continuations": ["b"]}, "log-likelihood takes one pass"),
        ("/hrm/solve", {"inputs": [[1, 2]]}, "/hrm/solve is for HRM checkpoints of upstream's dialect"),
        ("/hrm/solve", {"inputs": []}, "inputs"),
        ("/hrm/solve", {"inputs": ["a"]}, "inputs"),
        ("/hrm/solve", {"inputs": [[1]], "puzzle_ids": [-1]}, "puzzle_ids"),
        ("/hrm/solve", {"inputs": [[1]], "puzzle_ids": [1, 2]}, "must be as many as inputs"),
    ],
)
def test_unservable_requests_are_refused_with_the_reason(
    client: httpx.Client, path: str, body: dict[str, object], complaint: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert complaint in response.json()["error"]["message"]


def test_an_unknown_model_is_a_404(client: httpx.Client) -> None:
    assert client.post("/generate", json={"prompts": ["a"], "model": "nobody"}).status_code == 404
