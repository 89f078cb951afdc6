"""OpenAI's own Python client against `ostro serve`."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from live_server import LiveServer, live_server
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Say hello."}]
KEY = "sk-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("openai"), env={"OSTRO_API_KEY": KEY}) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_chat_completion(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=HELLO, max_tokens=5, n=2, logprobs=True)
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].message.content
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) == 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer._request_id is not None


def test_chat_stream(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="default", messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_stream_helper_gathers_the_whole_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="default", messages=HELLO, max_tokens=20, temperature=0)
    text = whole.choices[0].message.content or ""
    stop = text[40:46]
    with client.chat.completions.stream(
        model="default", messages=HELLO, max_tokens=20, temperature=0, n=2, logprobs=True, stop=stop
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        # Raises for an answer that was cut off at its limit, which this one is not.
        final = stream.get_final_completion()
    assert pieces
    assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]
    assert final.choices[0].message.content == text[: text.index(stop)]


def test_completion_and_its_stream(client: OpenAI) -> None:
    whole = client.completions.create(model="default", prompt=["a", "b"], max_tokens=6, temperature=0, logprobs=2)
    stream = client.completions.create(model="default", prompt="a", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.choices[1].logprobs is not None
    assert len(whole.choices[1].logprobs.tokens or ()) == 6


@pytest.mark.full
def test_async_client_streams_many_at_once(server: LiveServer) -> None:
    async def one(client: AsyncOpenAI, number: int) -> int:
        stream = await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": str(number)}], max_tokens=30, stream=True
        )
        return sum([len(chunk.choices) async for chunk in stream])

    async def all_of_them() -> list[int]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(16))))

    assert all(count >= 3 for count in asyncio.run(all_of_them()))


def test_stream_that_is_closed_early_leaves_the_client_usable(client: OpenAI) -> None:
    stream = client.chat.completions.create(model="default", messages=HELLO, max_tokens=5000, stream=True)
    next(iter(stream))
    stream.close()
    assert client.models.retrieve("default").object == "model"


def test_models_are_listed(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve(model.id) == model


def test_error_classes_are_those_that_people_catch(client: OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="default", messages=HELLO, temperature=9)
    assert (bad.value.param, bad.value.type, bad.value.code) == ("temperature", "invalid_request_error", None)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="default", prompt=[5] * 9000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.chat.completions.create(model="default", messages=HELLO)
    assert refused.value.code == "invalid_api_key"


@pytest.mark.full
def test_error_inside_a_stream_is_raised(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        live_server(tmp_path_factory.mktemp("crash"), faults="fake,crash_after=30,step_seconds=0.01") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="default", messages=HELLO, max_tokens=1000, stream=True)
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)


def test_embeddings_of_a_model_without_them_are_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not an embedding model"):
        client.embeddings.create(model="default", input="x")
