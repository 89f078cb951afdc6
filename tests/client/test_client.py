"""Both clients against a real server, over the same tiny model or the fake runner."""

import asyncio
import inspect
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from either_client import Asker
from live_server import LiveServer, live_server
from model_directory import write_model

from ostro import LLM, AsyncClient, Client, OstroError, SamplingParams
from ostro.client import options
from ostro.client.gathering import read
from ostro.config import EngineConfig
from ostro.errors import BadRequest, ContextLengthExceeded, NotAuthorized, UnknownModel, Unsupported
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.completions import CompletionRequest
from ostro.schemas.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from ostro.schemas.models import Version
from ostro.schemas.native import GenerateRequest, LoglikelihoodRequest
from ostro.schemas.tokenizer import TokenizeRequest

KEY, ADMIN_KEY = "sk-client", "sk-admin"
MESSAGES = [{"role": "system", "content": "yes"}, {"role": "user", "content": "the fox"}]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = ["--api-key", KEY, "--admin-key", ADMIN_KEY]
    with live_server(tmp_path_factory.mktemp("server"), str(model), *keys, faults="") as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, server: LiveServer) -> Asker:
    return Asker(request.param, server.url, {"api_key": KEY, "admin_key": ADMIN_KEY})


def told(answer: Any) -> dict[str, Any]:
    """What two answers to the same question have in common."""
    found: dict[str, Any] = json.loads(answer.model_dump_json(exclude={"id", "created"}))
    found["usage"].pop("prompt_tokens_details", None)
    return found


# --- answers --------------------------------------------------------------------------------------------------------


def test_an_answer_may_be_read_as_a_dict_is(ask: Asker) -> None:
    """Clients of other servers give dicts, and code was written for them."""
    answer = ask.call("chat", "the fox", **GREEDY)
    assert answer["choices"][0]["message"]["content"] == answer.choices[0].message.content
    assert answer["usage"]["completion_tokens"] == 12
    assert "usage" in answer
    assert "tokens" not in answer
    assert (answer.get("tokens", 7), answer.get("object")) == (7, "chat.completion")
    with pytest.raises(KeyError, match="tokens"):
        answer["tokens"]


@pytest.mark.full
def test_texts_are_those_of_the_model_in_process(ask: Asker, model: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    llm = LLM(model, EngineConfig(threads=1))
    assert ask.call("chat", MESSAGES, **GREEDY).choices[0].message.content == llm.chat(MESSAGES, params).text
    assert ask.call("complete", "the fox", **GREEDY).choices[0].text == llm.generate("the fox", params)[0].text


def test_a_lone_text_is_what_a_user_says(ask: Asker) -> None:
    as_message = ask.call("chat", [{"role": "user", "content": "the fox"}], **GREEDY)
    assert told(ask.call("chat", "the fox", **GREEDY)) == told(as_message)


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("name", "prompt", "given"),
    [
        ("chat", MESSAGES, {**GREEDY, "n": 2, "seed": 3}),
        ("chat", MESSAGES, {**GREEDY, "logprobs": True, "top_logprobs": 2}),
        ("complete", ["the fox", "the dog"], {**GREEDY, "n": 2, "temperature": 0.9, "seed": 3}),
        ("complete", "the fox", {**GREEDY, "logprobs": 2, "stop": ["the"]}),
        ("generate", ["the fox", "the dog"], {"max_tokens": 12, "temperature": 0.9, "seed": 3}),
    ],
)
def test_a_stream_comes_to_the_same_answer(ask: Asker, name: str, prompt: object, given: dict[str, Any]) -> None:
    whole = ask.call(name, prompt, **given)
    streamed = ask.read(f"stream_{name}", prompt, **given)
    assert told(streamed.answer) == told(whole)
    assert streamed.chunks
    pieces = ask.read(f"stream_{name}", prompt, text=True, **given).chunks
    first = whole.completions[0] if name == "generate" else whole.choices[0]
    assert "".join(pieces) == (first if name == "generate" else first.message.content if name == "chat" else first.text)


def test_chat_streams_on_demand_and_has_the_name_of_other_clients(ask: Asker) -> None:
    whole = ask.call("chat_completion", MESSAGES, **GREEDY)
    assert told(whole) == told(ask.call("chat", MESSAGES, stream=False, **GREEDY))
    for name in ("chat", "chat_completion"):
        streamed = ask.read(name, MESSAGES, text=False, stream=True, **GREEDY)
        assert len(streamed.chunks) > 1
        assert told(streamed.answer) == told(whole)


def test_an_asynchronous_stream_may_be_awaited_first(server: LiveServer) -> None:
    """As other clients' are: `async for chunk in await client.chat_completion(…, stream=True)`."""

    async def text() -> str:
        async with AsyncClient(server.url, KEY) as client:
            stream = await client.chat_completion(MESSAGES, stream=True, temperature=0.0, max_tokens=12)
            return "".join([piece async for piece in stream.text])

    assert asyncio.run(text())


def test_a_stream_left_early_has_no_whole_answer(server: LiveServer) -> None:
    with Client(server.url, KEY) as client, client.stream_chat("the fox", max_tokens=12) as stream:
        for _ in stream:
            break
        with pytest.raises(OstroError, match="not read to its end"):
            _ = stream.answer
        assert list(stream) == []


def test_scores_and_tokens(ask: Asker, model: Path) -> None:
    [score] = LLM(model, EngineConfig(threads=1)).score(["the fox"], [" the dog"])
    scored = ask.call("loglikelihood", ["the fox"], [" the dog"])
    assert (scored.ll, scored.num_tokens) == ([pytest.approx(score.logprob, abs=1e-4)], [score.num_tokens])
    tokens = ask.call("tokenize", "the fox").tokens
    assert ask.call("detokenize", tokens).prompt.endswith("the fox")
    assert ask.call("tokenize", MESSAGES).count > len(tokens)
    assert ask.call("tokenizer_info").vocab_size > 0
    assert ask.call("tokenizer_info", "tiny") == ask.call("tokenizer_info")


def test_the_server_and_its_models(ask: Asker) -> None:
    assert ask.call("healthy")
    assert ask.call("ready")
    assert ask.call("wait_until_ready", timeout=30) is None
    assert [card.id for card in ask.call("models").data] == ["tiny"]
    assert ask.call("model", "tiny").state == "ready"
    assert ask.call("version").version
    assert ask.call("stats").models[0].id == "tiny"
    assert ask.call("pin", "tiny").pinned
    assert not ask.call("unpin", "tiny").pinned


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_model_goes_and_comes(slow_server: LiveServer, kind: str) -> None:
    ask = Asker(kind, slow_server.url, {})
    assert ask.call("unload", "tiny").state == "available"
    assert ask.call("load", "tiny").state == "ready"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1(server: LiveServer, suffix: str) -> None:
    with Client(server.url + suffix, KEY) as client:
        assert client.url == server.url
        assert client.models().data
        assert client.version().version


def test_unknown_fields_of_a_newer_server_are_passed_over() -> None:
    assert read(Version, b'{"version": "9", "flavour": {"name": "salt"}}') == Version(version="9")


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "given", "cls", "param"),
    [
        ("chat", ["x"], {"temperature": 9.0}, BadRequest, "temperature"),
        ("chat", ["x"], {"colour": "red"}, BadRequest, "colour"),
        ("chat", ["x"], {"functions": [{}]}, Unsupported, "functions"),
        ("chat", ["x"], {"max_tokens": 100_000}, ContextLengthExceeded, "messages"),
        ("complete", ["x"], {"model": "nobody"}, UnknownModel, "model"),
        ("complete", ["x"], {"temperature": float("nan")}, BadRequest, None),
        ("complete", [object()], {}, BadRequest, None),
        ("model", ["no/such model?"], {}, UnknownModel, "model"),
        ("embed", ["x"], {}, Unsupported, "model"),
        ("rerank", ["x", ["y"]], {}, Unsupported, "model"),
        ("score", ["x", ["y", "z"]], {}, Unsupported, "model"),
        ("score", [["x", "y"], ["x", "y", "z"]], {}, BadRequest, "text_1"),
    ],
)
def test_errors_are_those_that_the_server_raised(
    ask: Asker, name: str, args: list[object], given: dict[str, Any], cls: type[OstroError], param: str | None
) -> None:
    with pytest.raises(cls) as caught:
        ask.call(name, *args, **given)
    assert caught.value.param == param
    if name in ("chat", "complete"):
        with pytest.raises(cls):
            ask.read(f"stream_{name}", *args, **given)


def test_keys_open_what_they_should(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(server.url) as client, pytest.raises(NotAuthorized, match="no API key"):
        client.models()
    with Client(server.url, KEY) as client, pytest.raises(NotAuthorized, match="admin key"):
        client.stats()
    monkeypatch.setenv("OSTRO_API_KEY", f"{KEY}, another")
    monkeypatch.setenv("OSTRO_ADMIN_KEY", ADMIN_KEY)
    with Client(server.url) as client:
        assert client.models().data
        assert client.stats().models
    with Client(server.url, "") as client, pytest.raises(NotAuthorized, match="no API key"):
        client.models()


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("127.0.0.1:8000", {}),
        ("ftp://host", {}),
        ("http://", {}),
        ("http://host:port", {}),
        ("http://[::1", {}),
        ("http://user:secret@[::1", {}),
        ("http://user:secret@host", {}),
        ("http://host/?key=secret", {}),
        ("http://host", {"api_key": "secret\n"}),
        ("http://host", {"api_key": "secrét"}),
        ("http://host", {"timeout": 0}),
        ("http://host", {"max_retries": -1}),
    ],
)
@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_settings_that_make_no_sense_are_refused(cls: type, url: str, given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        cls(url, **given)
    assert "secret" not in str(caught.value) or "key=secret" in url


def test_a_proxy_is_not_asked_for_a_server_on_this_machine(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with Client(server.url, KEY) as client:
        assert client.healthy()
        assert client.models().data


# --- leaving --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """It would write for minutes."""
    with live_server(tmp_path_factory.mktemp("slow"), str(model), faults="fake,step_seconds=0.5") as server:
        yield server


def until_idle(server: LiveServer) -> None:
    with Client(server.url) as client:
        deadline = time.monotonic() + 30
        while client.stats().models[0].requests:
            assert time.monotonic() < deadline, "the server goes on"
            time.sleep(0.05)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_leaving_the_loop_stops_the_server(
    slow_server: LiveServer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop complained of generators that it finalised while they were closed."""
    with caplog.at_level(logging.WARNING):
        Asker(kind, slow_server.url, {}).first("stream_complete", "the fox", max_tokens=200, ignore_eos=True)
    until_idle(slow_server)
    assert caplog.records == []


def test_a_stream_that_is_still_held_is_closed_with_its_loop(slow_server: LiveServer) -> None:
    with Client(slow_server.url) as client:
        stream = client.stream_complete("the fox", max_tokens=200, ignore_eos=True)
        for _ in stream:
            assert client.stats().models[0].requests == 1
            break
        until_idle(slow_server)
        pieces = client.stream_complete("the fox", max_tokens=200, ignore_eos=True).text
        assert next(pieces)
        assert client.stats().models[0].requests == 1
        del pieces
        until_idle(slow_server)


def test_an_async_stream_is_closed_with_its_block(slow_server: LiveServer) -> None:
    async def run() -> None:
        async with AsyncClient(slow_server.url) as client:
            async with client.stream_complete("the fox", max_tokens=200, ignore_eos=True) as stream:
                async for _ in stream.text:
                    assert (await client.stats()).models[0].requests == 1
                    break
            await asyncio.to_thread(until_idle, slow_server)

    asyncio.run(run())


def test_cancelling_a_task_stops_the_server(slow_server: LiveServer) -> None:
    async def run() -> None:
        async with AsyncClient(slow_server.url) as client:
            task = asyncio.create_task(client.complete("the fox", max_tokens=200, ignore_eos=True))
            while not (await client.stats()).models[0].requests:
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(until_idle, slow_server)

    asyncio.run(run())


# --- one description ------------------------------------------------------------------------------------------------


def public(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and callable(value)}


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    sync, awaited = public(Client), public(AsyncClient)
    assert sync.keys() == awaited.keys()
    for name in awaited:
        assert inspect.signature(sync[name]).parameters == inspect.signature(awaited[name]).parameters
        assert name in ("close",) or sync[name].__doc__ or name == "version"


@pytest.mark.parametrize(
    ("given", "schema", "named"),
    [
        (options.ChatOptions, ChatCompletionRequest, {"messages", "stream", "stream_options"}),
        (options.CompletionOptions, CompletionRequest, {"prompt", "stream", "stream_options"}),
        (options.GenerateOptions, GenerateRequest, {"prompts"}),
        (options.ScoreOptions, LoglikelihoodRequest, {"prompts", "continuations"}),
        (options.EmbeddingOptions, EmbeddingRequest, {"input"}),
        (options.RerankOptions, RerankRequest, {"query", "documents"}),
        (
            options.RelevanceOptions,
            ScoreRequest,
            {"text_1", "text_2", "queries", "documents", "encoding_format"},
        ),
        (options.TokenizeOptions, TokenizeRequest, {"prompt", "messages"}),
    ],
)
def test_options_are_the_fields_that_the_server_knows(given: type, schema: Any, named: set[str]) -> None:
    assert set(given.__annotations__) == set(schema.model_fields) - named


def test_importing_ostro_loads_no_http() -> None:
    code = "import sys, ostro; print([name for name in ('httpx', 'pydantic', 'numpy', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.full
def test_the_client_loads_no_engine_and_no_server() -> None:
    never = (
        "torch",
        "numpy",
        "fastapi",
        "uvicorn",
        "tokenizers",
        "ostro.engine.core",
        "ostro.pool",
        "ostro.server.app",
    )
    code = (
        f"import sys; from ostro import Client, AsyncClient; print([each for each in {never} if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
