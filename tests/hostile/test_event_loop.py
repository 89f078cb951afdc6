"""What a request's content makes the server do is done off its event loop, and once, however many prompts there are.

Where the work ran is recorded, not how long it took; `bench/event_loop.py` has the times.
"""

import asyncio
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

import httpx
import pytest
from http_app import live_app
from live_service import set_faults

from event_loop import everything, fields
from ostro.sampling_params import MAX_CHOICES
from ostro.schemas.chat import MAX_PARTS, Message
from ostro.schemas.prompts import MAX_PROMPTS
from ostro.server import api, body
from ostro.server.api import HttpOptions
from ostro.text.jinja_template import JinjaTemplate
from ostro.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOOP = "the event loop"


class Places:
    """By the name of a function, where each call of it ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: defaultdict[str, list[str]] = defaultdict(list)
        self._loop = threading.get_ident()
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


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    set_faults(monkeypatch)
    return Places(monkeypatch)


def post(places: Places, path: str, **request: object) -> httpx.Response:
    """From a client in the server's own event loop, once it serves."""

    async def scenario() -> httpx.Response:
        async with live_app(HttpOptions()) as (host, port, _), httpx.AsyncClient(timeout=120) as client:
            places.of.clear()
            return await client.post(f"http://{host}:{port}{path}", json=request)

    return asyncio.run(scenario())


@pytest.mark.parametrize("num_prompts", [1, MAX_PROMPTS])
def test_bad_words_are_tokenised_once_a_request_and_off_the_loop(places: Places, num_prompts: int) -> None:
    """A megabyte of them, tokenised on the loop once for each prompt, kept /healthz waiting for 5.6 seconds."""
    asked = fields(num_prompts)["bad_words"]
    response = post(places, COMPLETIONS, prompt=["Hello"] * num_prompts, max_tokens=1, **asked)
    assert response.status_code == 200
    assert places.of["bad_word_ids"] == ["text"]


def test_bad_words_without_a_cap_are_refused(places: Places) -> None:
    words = ["x" * 1000] * 17
    assert post(places, COMPLETIONS, prompt="Hello", bad_words=words).json()["error"]["param"] == "bad_words"
    over_all = post(places, COMPLETIONS, prompt=["Hello"] * MAX_PROMPTS, bad_words=words[:1])
    assert over_all.json()["error"]["param"] == "bad_words"
    assert places.of["bad_word_ids"] == []


@pytest.mark.parametrize(("num_prompts", "n"), [(1, MAX_CHOICES), (MAX_PROMPTS, 1)])
def test_request_with_every_field_at_its_maximum_is_worked_on_off_the_loop(
    places: Places, num_prompts: int, n: int
) -> None:
    request = {"prompt": ["Hello"] * num_prompts, "max_tokens": 1, "n": n, **everything(num_prompts)}
    response = post(places, COMPLETIONS, **request)
    assert response.status_code == 200, response.text[:500]
    assert len(response.json()["choices"]) == num_prompts * n
    if len(json.dumps(request)) > 64 << 10:
        assert places.of["_decode_long"] == ["body"]
    assert places.of["bad_word_ids"] == places.of["written"] == ["text"]
    if num_prompts > 1:
        assert set(places.of["encode_batch"]) == {"text"}


def test_long_texts_are_tokenised_off_the_loop(places: Places) -> None:
    text = "a b, " * 100_000
    assert post(places, "/tokenize", prompt=text).status_code == 200
    assert set(places.of["encode_batch"]) == {"text"}
    said = [{"role": "user", "content": text}]
    assert post(places, CHAT, messages=said, max_tokens=1, truncate_prompt_tokens=5).status_code == 200
    assert places.of["encode_rendered"] == ["text"]


@pytest.mark.parametrize(("num_parts", "place"), [(2, LOOP), (MAX_PARTS, "asyncio")], ids=["few", "many"])
@pytest.mark.parametrize(
    ("path", "others"),
    [(CHAT, {"max_tokens": 1, "truncate_prompt_tokens": 5}), ("/tokenize", {})],
    ids=["chat", "tokenize"],
)
def test_messages_of_many_parts_are_made_ready_for_the_template_off_the_loop(
    places: Places, path: str, others: dict[str, int], num_parts: int, place: str
) -> None:
    """A chat of 36,000 parts took 25 ms of the loop."""
    said = [{"role": "user", "content": [{"type": "text", "text": "a"}] * num_parts}] * 2
    assert post(places, path, messages=said, **others).status_code == 200
    assert places.of["for_template"] == [place] * 2


def test_templates_are_rendered_in_another_process(places: Places) -> None:
    async def scenario() -> None:
        async with live_app(HttpOptions()) as (host, port, service), httpx.AsyncClient(timeout=120) as client:
            said = [{"role": "user", "content": "Hello"}]
            asked = {"messages": said, "max_tokens": 1}
            assert (await client.post(f"http://{host}:{port}{CHAT}", json=asked)).status_code == 200
            assert service.tokenizer.renderer.pid not in (None, os.getpid())

    asyncio.run(scenario())
    assert places.of["render"] == []
