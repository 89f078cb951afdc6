"""Requests to other servers by the standard library alone: JSON out, JSON or server-sent events in."""

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from ostro.compare.answers import Recorder
from ostro.errors import OstroError

Event = Mapping[str, object]

_LONGEST_LINE = 32 << 20
_LONGEST_ERROR = 64 << 10
_SHOWN_ERROR = 500


class ServerFailed(OstroError):
    """Another server did not answer, or answered with an error or with nonsense. `status` is HTTP's, if one came."""

    http_status = 502

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    """Without a slash at its end."""
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    """Seconds of silence that are borne."""

    def get(self, path: str) -> object:
        """The JSON at a path."""
        with self._connection() as connection:
            connection.request("GET", self._path(path), headers=self._headers())
            with _response(connection) as response:
                return _json(response.read(_LONGEST_LINE))

    def stream(self, path: str, body: Mapping[str, object], recorder: Recorder) -> Iterator[Event]:
        """The events of an answer. The recorder's clock starts with the request, on a connection that stands."""
        payload = json.dumps(body).encode()
        headers = self._headers() | {"Content-Type": "application/json", "Accept": "text/event-stream"}
        with self._connection() as connection:
            connection.connect()
            recorder.start()
            connection.request("POST", self._path(path), payload, headers)
            with _response(connection) as response:
                yield from _events(response)

    def _path(self, path: str) -> str:
        return urlsplit(self.url).path + path

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    @contextmanager
    def _connection(self) -> Iterator[HTTPConnection]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        connection = (
            HTTPSConnection(parts.hostname, parts.port, timeout=self.timeout, context=ssl.create_default_context())
            if parts.scheme == "https"
            else HTTPConnection(parts.hostname, parts.port, timeout=self.timeout)
        )
        try:
            yield connection
        except TimeoutError as error:
            raise ServerFailed(f"{self.url} was silent for {self.timeout:g} s. Try a longer --timeout.") from error
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            raise ServerFailed(f"{self.url} cannot be reached: {why}. Is the server up?") from error
        except HTTPException as error:
            raise ServerFailed(f"{self.url} broke off: {type(error).__name__} {error}".rstrip()) from error
        finally:
            connection.close()


@contextmanager
def _response(connection: HTTPConnection) -> Iterator[HTTPResponse]:
    with connection.getresponse() as response:
        if response.status != 200:
            told = _told(response.read(_LONGEST_ERROR))
            raise ServerFailed(f"HTTP {response.status}: {told or response.reason}", status=response.status)
        yield response


def _events(response: HTTPResponse) -> Iterator[Event]:
    while line := response.readline(_LONGEST_LINE):
        if not line.startswith(b"data:"):
            continue
        payload = line[len(b"data:") :].strip()
        if payload == b"[DONE]":
            return
        event = _json(payload)
        if not isinstance(event, dict):
            raise ServerFailed(f"An event is no JSON object: {_shortened(payload)}")
        if event.get("error"):
            raise ServerFailed(_told(payload))
        yield event


def _json(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ServerFailed(f"The answer is not JSON: {_shortened(payload)}") from error


def _told(payload: bytes) -> str:
    """What an error's body says, whichever server's form it has, on one line."""
    try:
        body: object = json.loads(payload)
    except (ValueError, RecursionError):
        return _shortened(payload)
    while isinstance(body, dict):
        body = next((body[key] for key in ("error", "detail", "message") if body.get(key)), str(body))
    return _shortened(str(body).encode())


def _shortened(payload: bytes) -> str:
    text = " ".join(payload.decode(errors="replace").split())
    return text if len(text) <= _SHOWN_ERROR else text[:_SHOWN_ERROR] + "…"
