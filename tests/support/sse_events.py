"""Reads a stream of server-sent events strictly: what a lenient client forgives is an error here."""

import json
from typing import Any

import httpx

Chunk = dict[str, Any]


def events_of(body: str) -> list[Chunk]:
    """The JSON of each event; asserts the framing and that [DONE] comes last, once."""
    assert body.endswith("\n\n")
    blocks = [block for block in body.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    assert payloads[-1] == "[DONE]"
    assert payloads.count("[DONE]") == 1
    return [json.loads(payload) for payload in payloads[:-1]]


def streamed(client: httpx.Client, path: str, body: dict[str, object]) -> list[Chunk]:
    """The events of one streamed answer."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    return events_of(response.text)
