"""Requests with a known answer: what to ask, how to read the answer, and whether it is the right one."""

import json
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

CHAT, COMPLETIONS, GENERATE, SCORE = "/v1/chat/completions", "/v1/completions", "/generate", "/loglikelihood"
_STREAMED = {CHAT: CHAT, COMPLETIONS: COMPLETIONS, GENERATE: "/generate_stream"}
_SCORE_TOLERANCE = 1e-3
# A few common beginnings, so that requests share prefixes in the cache.
_OPENINGS = (
    "the quick brown fox jumps over the lazy dog and",
    "the dog does not mind. Tell me about the",
    "Once upon a time there was a",
    "",
)
_WORDS = ("fox", "dog", "lazy", "quick", "brown", "jumps", "over", "mind", "river", "house", "winter", "letter", "the")
_SETTINGS: Sequence[Mapping[str, object]] = (
    {"temperature": 0},
    {"temperature": 0, "stop": [" the", "."]},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.3, "seed": 11, "top_p": 0.8},
)
# What /generate does not take.
_OPENAI_SETTINGS: Sequence[Mapping[str, object]] = (
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0.8, "seed": 3, "top_k": 20, "min_p": 0.02},
    {"temperature": 1, "seed": 5, "n": 2},
    {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {"5": -3}},
)


class Manner(StrEnum):
    WHOLE = "whole"
    STREAM = "stream"
    LEAVE = "leave"
    """Read a few events, then hang up."""


@dataclass(frozen=True, eq=False)
class Case:
    model: str
    path: str
    body: Mapping[str, object]

    @property
    def manners(self) -> tuple[Manner, ...]:
        return (Manner.WHOLE,) if self.path == SCORE else tuple(Manner)


@dataclass(frozen=True)
class Answer:
    """Texts and finish reasons by choice, or scores by pair. Whoever left early has a part of the texts."""

    texts: tuple[str, ...] = ()
    reasons: tuple[str | None, ...] = ()
    scores: tuple[float, ...] = ()

    def agrees(self, reference: "Answer") -> bool:
        """Texts to the letter. Scores nearly: on torch their last bits depend on the batch."""
        return (
            (self.texts, self.reasons, len(self.scores)) == (reference.texts, reference.reasons, len(reference.scores))
        ) and all(map(_nearly, self.scores, reference.scores))

    def begins(self, reference: "Answer") -> bool:
        """Whether each text so far is the beginning of the right one."""
        return len(self.texts) <= len(reference.texts) and all(
            whole.startswith(part) for part, whole in zip(self.texts, reference.texts, strict=False)
        )


def _nearly(ours: float, theirs: float) -> bool:
    return math.isclose(ours, theirs, abs_tol=_SCORE_TOLERANCE)


class Refusal(Exception):
    """An error that the server told in its own words, by status or within a stream."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(f"{status} {error.get('code')}: {error.get('message')}")
        self.code = error.get("code")


def make_cases(model: str, count: int, dice: random.Random, *, longest: int) -> list[Case]:
    """Distinct ones, a quarter of each kind, with outputs of up to `longest` tokens."""
    makers = (_chat, _completion, _generation, _scoring)
    return [makers[number % 4](model, _text(number, dice), _length(longest, dice), dice) for number in range(count)]


def _text(number: int, dice: random.Random) -> str:
    # The number keeps cases apart: whatever the server remembers of one request says nothing about another.
    return f"{dice.choice(_OPENINGS)} {' '.join(dice.choices(_WORDS, k=dice.choice((2, 5, 12))))} {number}"


def _length(longest: int, dice: random.Random) -> dict[str, object]:
    return {"max_tokens": dice.choice((1, 4, longest // 3, longest))}


def _chat(model: str, text: str, length: Mapping[str, object], dice: random.Random) -> Case:
    messages = [{"role": "user", "content": text}]
    return Case(model, CHAT, {"messages": messages, **length, **dice.choice((*_SETTINGS, *_OPENAI_SETTINGS))})


def _completion(model: str, text: str, length: Mapping[str, object], dice: random.Random) -> Case:
    return Case(model, COMPLETIONS, {"prompt": text, **length, **dice.choice((*_SETTINGS, *_OPENAI_SETTINGS))})


def _generation(model: str, text: str, length: Mapping[str, object], dice: random.Random) -> Case:
    prompts = [f"{text}{end}" for end in ("", " fox", " dog")[: dice.choice((1, 3))]]
    return Case(model, GENERATE, {"prompts": prompts, **length, **dice.choice(_SETTINGS)})


def _scoring(model: str, text: str, length: Mapping[str, object], dice: random.Random) -> Case:
    continuations = [f" {word}" for word in dice.sample(_WORDS, dice.choice((1, 4)))]
    return Case(model, SCORE, {"prompts": [text] * len(continuations), "continuations": continuations})


async def ask(client: httpx.AsyncClient, case: Case, manner: Manner, key: str, *, patience: int = 0) -> Answer:
    """Raises Refusal for an error in the server's words, httpx's own errors for all else.

    `patience` is how many events somebody who leaves reads first.
    """
    body = {"model": case.model, **case.body}
    headers = {"authorization": f"Bearer {key}"}
    if manner is Manner.WHOLE:
        response = await client.post(case.path, json=body, headers=headers)
        _check(response.status_code, response.content)
        return _whole(case, response.json())
    path = _STREAMED[case.path]
    if path != "/generate_stream":
        body["stream"] = True
    async with client.stream("POST", path, json=body, headers=headers) as response:
        if response.status_code != 200:
            _check(response.status_code, await response.aread())
        return await _read(response, most=patience if manner is Manner.LEAVE else None)


def _check(status: int, content: bytes) -> None:
    if status != 200:
        raise Refusal(status, json.loads(content)["error"])


def _whole(case: Case, answer: Mapping[str, Any]) -> Answer:
    if case.path == SCORE:
        return Answer(scores=tuple(answer["ll"]))
    if case.path == GENERATE:
        texts = tuple(answer["completions"])
        # /generate tells no reasons.
        return Answer(texts, (None,) * len(texts))
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    texts = tuple(choice["text"] if case.path == COMPLETIONS else choice["message"]["content"] for choice in choices)
    return Answer(texts, tuple(choice["finish_reason"] for choice in choices))


async def _read(response: httpx.Response, most: int | None) -> Answer:
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    events = 0
    async for event in _events(response):
        if "error" in event:
            raise Refusal(200, event["error"])
        for index, text, reason in _pieces(event):
            texts[index] = texts.get(index, "") + text
            reasons[index] = reason or reasons.get(index)
        events += 1
        if events == most:
            break
    else:
        if most is None and not response.extensions.get("done"):
            raise httpx.RemoteProtocolError("the stream ended without [DONE]")
    indices = range(max(texts, default=-1) + 1)
    return Answer(tuple(texts.get(at, "") for at in indices), tuple(reasons.get(at) for at in indices))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            response.extensions["done"] = True
        elif line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def _pieces(event: Mapping[str, Any]) -> list[tuple[int, str, str | None]]:
    """Index, text and finish reason of each choice in an event."""
    if "index" in event:
        # /generate tells no reasons, so those of its stream are not compared.
        return [(event["index"], event["text"], None)]
    return [
        (
            choice["index"],
            choice["delta"].get("content") or "" if "delta" in choice else choice["text"],
            choice["finish_reason"],
        )
        for choice in event.get("choices", ())
    ]
