"""Requests to /v1/responses and /v1/messages, for tests: answers, and streams read strictly."""

import json
from typing import Any

import httpx

Json = dict[str, Any]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def answered(client: httpx.Client, path: str, **body: object) -> Json:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    parsed: Json = response.json()
    return parsed


def refused(client: httpx.Client, path: str, status: int, **body: object) -> Json:
    """The `error` object of the refused request's body."""
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    error: Json = response.json()["error"]
    return error


def events(client: httpx.Client, path: str, **body: object) -> list[Json]:
    """The events of a streamed answer."""
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_in(response.text)


def events_in(text: str) -> list[Json]:
    """Asserts that every event names its type twice, and that nothing but events and comments is there."""
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def output_text(response: Json) -> str:
    """The text of a Responses object."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])
