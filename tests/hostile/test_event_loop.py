"""What a request's content makes the server do is done off its event loop, and once, however many prompts there are.

Where the work ran is recorded, not how long it took; `bench/event_loop.py` has the times.
"""

import asyncio
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from typing import Any

import httpx
import pytest
from http_app import live_app
from live_service import set_faults

from event_loop import everything, fields
from ostro.sampling_params import MAX_CHOICES
from ostro.schemas.chat import MAX_PARTS, Message
from ostro.schemas.fields import MAX_PROMPTS
from ostro.server import api
from ostro.server.api import HttpOptions
from ostro.server.http import body
from ostro.server.models.service import ModelService
from ostro.text.jinja_template import JinjaTemplate
from ostro.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOOP = "the event loop"


class Places:
    """By the name of a function, where each call of it ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loop: int) -> None:
        self.of: defaultdict[str, list[str]] = defaultdict(list)
        self._loop = loop
        for owner, name in (
            (Tokenizer, "bad_word_ids"),
            (Tokenizer, "encode_batch"),
            (Tokenizer, "encode_rendered"),
            (JinjaTemplate, "render"),
            (Message, "for_template"),
            (body, "_decode_long"),
            (api, "written"),
        ):
            monkeypatch.setattr(owner, name, self._recorded(name, getattr(owner, name)))

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            thread = threading.current_thread()
            self.of[name].append(LOOP if thread.ident == self._loop else thread.name.rpartition("_")[0])
            return function(*args, **kwargs)

        return recorded


@dataclass(frozen=True)
class Server:
    """The app in this process, with its event loop in a thread of its own."""

    url: str
    service: ModelService
    loop: int

    def post(self, path: str, **request: object) -> httpx.Response:
        return httpx.post(self.url + path, json=request, timeout=120, trust_env=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started: Future[tuple[Server, asyncio.AbstractEventLoop]] = Future()
    over = asyncio.Event()

    async def serve() -> None:
        async with live_app(HttpOptions()) as (host, port, service):
            found = Server(f"http://{host}:{port}", service, threading.get_ident())
            started.set_result((found, asyncio.get_running_loop()))
            await over.wait()

    with pytest.MonkeyPatch.context() as monkeypatch, ThreadPoolExecutor(1) as threads:
        set_faults(monkeypatch)
        serving = threads.submit(asyncio.run, serve())
        found, loop = started.result(timeout=120)
        yield found
        loop.call_soon_threadsafe(over.set)
        serving.result()


@pytest.fixture
def places(server: Server, monkeypatch: pytest.MonkeyPatch) -> Places:
    return Places(monkeypatch, server.loop)


@pytest.mark.full
@pytest.mark.parametrize("num_prompts", [1, MAX_PROMPTS])
def test_bad_words_are_tokenised_once_a_request_and_off_the_loop(
    server: Server, places: Places, num_prompts: int
) -> None:
    """A megabyte of them, tokenised on the loop once for each prompt, kept /healthz waiting for 5.6 seconds."""
    asked = fields(num_prompts)["bad_words"]
    response = server.post(COMPLETIONS, prompt=["Hello"] * num_prompts, max_tokens=1, **asked)
    assert response.status_code == 200
    assert places.of["bad_word_ids"] == ["text"]


def test_bad_words_without_a_cap_are_refused(server: Server, places: Places) -> None:
    words = ["x" * 1000] * 17
    assert server.post(COMPLETIONS, prompt="Hello", bad_words=words).json()["error"]["param"] == "bad_words"
    over_all = server.post(COMPLETIONS, prompt=["Hello"] * MAX_PROMPTS, bad_words=words[:1])
    assert over_all.json()["error"]["param"] == "bad_words"
    assert places.of["bad_word_ids"] == []


@pytest.mark.full
@pytest.mark.parametrize(("num_prompts", "n"), [(1, MAX_CHOICES), (MAX_PROMPTS, 1)])
def test_request_with_every_field_at_its_maximum_is_worked_on_off_the_loop(
    server: Server, places: Places, num_prompts: int, n: int
) -> None:
    request = {"prompt": ["Hello"] * num_prompts, "max_tokens": 1, "n": n, **everything(num_prompts)}
    response = server.post(COMPLETIONS, **request)
    assert response.status_code == 200, response.text[:500]
    assert len(response.json()["choices"]) == num_prompts * n
    if len(json.dumps(request)) > 64 << 10:
        assert places.of["_decode_long"] == ["body"]
    assert places.of["bad_word_ids"] == places.of["written"] == ["text"]
    if num_prompts > 1:
        assert set(places.of["encode_batch"]) == {"text"}


@pytest.mark.full
def test_long_texts_are_tokenised_off_the_loop(server: Server, places: Places) -> None:
    text = "a b, " * 100_000
    assert server.post("/tokenize", prompt=text).status_code == 200
    assert set(places.of["encode_batch"]) == {"text"}
    said = [{"role": "user", "content": text}]
    assert server.post(CHAT, messages=said, max_tokens=1, truncate_prompt_tokens=5).status_code == 200
    assert places.of["encode_rendered"] == ["text"]


@pytest.mark.parametrize(
    ("path", "others", "num_parts", "place"),
    [
        (CHAT, {"max_tokens": 1, "truncate_prompt_tokens": 5}, 2, LOOP),
        (CHAT, {"max_tokens": 1, "truncate_prompt_tokens": 5}, MAX_PARTS, "text"),
        ("/tokenize", {}, MAX_PARTS, "text"),
    ],
    ids=["chat, few", "chat, many", "tokenize, many"],
)
def test_messages_of_many_parts_are_made_ready_for_the_template_off_the_loop(
    server: Server, places: Places, path: str, others: dict[str, int], num_parts: int, place: str
) -> None:
    """A chat of 36,000 parts took 25 ms of the loop."""
    said = [{"role": "user", "content": [{"type": "text", "text": "a"}] * num_parts}] * 2
    assert server.post(path, messages=said, **others).status_code == 200
    assert places.of["for_template"] == [place] * 2


def test_templates_are_rendered_in_another_process(server: Server, places: Places) -> None:
    said = [{"role": "user", "content": "Hello"}]
    assert server.post(CHAT, messages=said, max_tokens=1).status_code == 200
    assert server.service.tokenizer.renderer.pid not in (None, os.getpid())
    assert places.of["render"] == []
