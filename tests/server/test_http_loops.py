"""Outputs that run in a loop, over HTTP, offline and by commands, on a model that does nothing else."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import CONTEXT, write_cycling_model
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from warm_start import warm_run

from ostro import LLM, Client, SamplingParams
from ostro.config import EngineConfig

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "the fox"}]
LOOP = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cycling_model(tmp_path_factory.mktemp("loops") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with live_server(model.parent, str(model), "--threads", "1", faults="") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.full
def test_a_chat_without_a_limit_ends_with_repetition(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=HELLO, n=2, logprobs=True)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * LOOP
    for choice in answer.choices:
        assert str(choice.finish_reason) == "repetition"
        assert choice.message.content == "abc" * (LOOP // 3)
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == LOOP


def test_a_stream_without_a_limit_ends_with_repetition(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="default", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for index in range(2):
        own = [choice for choice in choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "abc" * (LOOP // 3)
        assert [str(choice.finish_reason) for choice in own if choice.finish_reason] == ["repetition"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * LOOP


@pytest.mark.full
def test_a_response_that_ran_in_a_loop_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(model="default", input="the fox")
    assert response.status == "incomplete"
    assert response.output_text == "abc" * (LOOP // 3)


def test_a_request_that_names_its_limit_may_loop_to_it(client: OpenAI) -> None:
    named = client.chat.completions.create(model="default", messages=HELLO, max_tokens=150)
    newer = client.chat.completions.create(model="default", messages=HELLO, max_completion_tokens=150)
    whole = client.completions.create(model="default", prompt="the fox", max_tokens=150)
    for answer in (named, newer, whole):
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 150


def test_a_request_with_ignore_eos_ignores_loops(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=HELLO, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT


def test_a_loop_waits_for_min_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=HELLO, extra_body={"min_tokens": 120})
    assert answer.usage is not None
    assert (str(answer.choices[0].finish_reason), answer.usage.completion_tokens) == ("repetition", 120)


def test_a_stop_string_ends_an_output_before_its_loop_does(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=HELLO, stop="cab")
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "ab")


def test_the_native_endpoint_tells_it_in_its_events(server: LiveServer) -> None:
    with server.client() as http:
        assert http.post("/generate", json={"prompts": ["a"]}).json()["usage"]["completion_tokens"] == LOOP
        assert _native_reasons(http) == ["repetition"]
        assert _native_reasons(http, max_tokens=120) == ["length"]


def _native_reasons(http: httpx.Client, **fields: object) -> list[str]:
    lines = http.post("/generate_stream", json={"prompts": ["a"], **fields}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [event["finish_reason"] for event in events if event.get("finish_reason")]


def test_our_own_client_gathers_it(server: LiveServer) -> None:
    with Client(server.url) as client:
        assert client.chat("the fox").choices[0].finish_reason == "repetition"
        with client.stream_chat("the fox") as stream:
            text = "".join(stream.text)
        assert stream.answer.choices[0].finish_reason == "repetition"
        assert text == "abc" * (LOOP // 3)


def test_metrics_and_the_log_know_it(server: LiveServer, client: OpenAI) -> None:
    client.chat.completions.create(model="default", messages=HELLO)
    with server.client() as http:
        metrics = http.get("/metrics").text
    assert 'vllm:request_success_total{finished_reason="repetition",model_name="model"}' in metrics
    assert '"finish_reason": "repetition"' in server.log_text


@pytest.mark.full
def test_a_strict_server_says_stop(model: Path, tmp_path: Path) -> None:
    with live_server(tmp_path, str(model), "--threads", "1", "--openai-strict", faults="") as live:
        with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="default", messages=HELLO)
            assert (whole.choices[0].finish_reason, len(whole.choices[0].message.content or "")) == ("stop", LOOP)
            with client.chat.completions.stream(model="default", messages=HELLO) as stream:
                final = stream.get_final_completion()
            assert final.choices[0].finish_reason == "stop"
        with live.client() as http:
            assert _native_reasons(http) == ["stop"]
            assert 'finished_reason="repetition"' in http.get("/metrics").text


@pytest.mark.full
def test_the_operators_number_is_no_limit_of_the_requests(model: Path, tmp_path: Path) -> None:
    args = (str(model), "--threads", "1", "--default-max-tokens", "110")
    with live_server(tmp_path, *args, faults="") as live, live.client() as http:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
            choice = http.post(path, json=body).json()["choices"][0]
            assert choice["finish_reason"] == "repetition"
            choice = http.post(path, json=body | {"ignore_eos": True}).json()
            assert choice["usage"]["completion_tokens"] == 110


def test_offline_outputs_end_alike(model: Path) -> None:
    llm = LLM(model, EngineConfig(threads=1))
    assert llm.chat(HELLO).choices[0].finish_reason == "repetition"
    endless = SamplingParams(max_tokens=None)
    together = llm.generate(["a", "the fox", "ab"], endless)
    assert [(each.choices[0].finish_reason, each.num_generated) for each in together] == [("repetition", LOOP)] * 3
    *_, last = llm.stream("a", endless)
    assert last.finish_reason == "repetition"
    [named] = llm.generate("a", SamplingParams(max_tokens=120))
    assert (named.choices[0].finish_reason, named.num_generated) == ("length", 120)


@pytest.mark.full
def test_commands_end_loops_alike(model: Path, tmp_path: Path) -> None:
    def ostro(*args: str) -> str:
        done = warm_run([*args, "--model", str(model), "--threads", "1"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert ostro("generate", "the fox") == "abc" * (LOOP // 3) + "\n"
    ostro("generate", "the fox", "--output", "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["choices"][0]["finish_reason"] == "repetition"
    assert ostro("generate", "the fox", "--max-tokens", "120") == "abc" * 40 + "\n"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HELLO}}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + os.linesep)
    [choice] = json.loads(ostro("batch", "batch.jsonl"))["response"]["body"]["choices"]
    assert choice["finish_reason"] == "repetition"
