"""Requests to any server over our own client's connections: JSON out, JSON or server-sent events in."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ostro.client.calls import Question, as_json
from ostro.client.client import Client
from ostro.client.events import DONE, EventDecoder
from ostro.client.failures import error_in, shortened, words
from ostro.errors import BadAnswer, OstroError, ServerError
from ostro.measure.compare.answers import Recorder

Event = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    """Maximum seconds of silence."""

    def get(self, path: str) -> object:
        """The JSON at a path."""
        question = Question("GET", path, refusal=_refusal)
        with self._client() as client, client.exchange(question, self.timeout) as answer:
            return _json(answer.read())

    def stream(self, path: str, body: Mapping[str, object], recorder: Recorder) -> Iterator[Event]:
        """The events of an answer. The recorder's clock starts when the request is sent, after connecting."""
        question = Question("POST", path, as_json(body), accept="text/event-stream", refusal=_refusal)
        decoder = EventDecoder()
        with self._client() as client, client.exchange(question, self.timeout, on_send=recorder.start) as answer:
            for data in answer.iter_bytes():
                for payload in decoder.feed(data):
                    if payload == DONE:
                        return
                    yield _event(payload)

    def _client(self) -> Client:
        """A new client per request, for a fresh connection. No key means none: never send our own to other servers."""
        return Client(self.url, self.key or "")


def _event(payload: bytes) -> Event:
    event = _json(payload)
    if not isinstance(event, dict):
        raise BadAnswer(f"An event is not a JSON object: {shortened(payload)}")
    if event.get("error") and (error := error_in(payload)) is not None:
        raise error
    return event


def _json(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"The answer is not JSON: {shortened(payload)}") from error


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> OstroError:
    return ServerError(f"HTTP {status}: {words(body) or 'no words with it'}", status=status)
