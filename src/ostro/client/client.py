"""`Client`: `async_client` over blocking connections. Made by tools/sync_client.py: edit that one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, overload
from weakref import WeakSet

import httpx

from ostro.client import calls
from ostro.client.calls import Call, Question, StreamCall, documented
from ostro.client.failures import LONGEST_BODY
from ostro.client.gathering import Gathering, StreamReader
from ostro.client.options import ChatOptions, Messages
from ostro.client.target import Awaited, Target, Tries
from ostro.errors import OstroError, RequestTimeout, Unreachable
from ostro.schemas.chat import ChatCompletionChunk, ChatCompletionResponse
from ostro.schemas.models import Readiness

P = ParamSpec("P")
T = TypeVar("T")
Chunk = TypeVar("Chunk")
Whole = TypeVar("Whole")


class Stream(Generic[Chunk, Whole]):
    """A streamed answer: iterate over it, or over its `text`, once. The request is sent when the first chunk is read.

    Leaving the `with` block closes the connection; the server then stops generating. Leaving a loop without one
    does so too: at once in a `Client`, once the event loop gets to it in an `AsyncClient`. Close a `Client`'s stream in
    the thread that reads it; to stop a stream from elsewhere, use an `AsyncClient`.
    """

    def __init__(self, client: "Client", question: Question, gathering: Gathering[Chunk, Whole]) -> None:
        self._client = client
        self._question = question
        self._gathering = gathering
        self._tries: Tries | None = None
        self._begun = self._over = self._closed = False
        self._response: httpx.Response | None = None
        self._chunks: Iterator[Chunk] = iter(())

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while (chunk := self._next()) is not None:
                yield chunk
        finally:
            self.close()

    @property
    def text(self) -> Iterator[str]:
        """New text of the first choice, piece by piece, instead of chunks."""
        try:
            while (chunk := self._next()) is not None:
                if piece := self._gathering.text(chunk):
                    yield piece
        finally:
            self.close()

    @property
    def answer(self) -> Whole:
        """The non-streamed form of the answer, available once the stream was read to its end."""
        return self._gathering.whole()

    def close(self) -> None:
        self._over = self._closed = True
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # No nested generators: when an event loop ends, it finalises them all at once, and they would conflict.
    def _next(self) -> Chunk | None:
        """None at the end."""
        tries = self._tries = self._tries or self._client._target.tries()
        while not self._over:
            try:
                if (chunk := next(self._chunks, None)) is not None:
                    self._begun = True
                    return chunk
                self._read_on(tries)
                continue
            except OstroError as error:
                self._drop()
                if self._closed:
                    return None
                if self._begun:
                    raise
                pause = tries.wait_after(error)
            time.sleep(pause)
        return None

    def _read_on(self, tries: Tries) -> None:
        if self._response is None:
            self._timeout = tries.remaining
        with self._client._target.translated_errors(self._timeout):
            if self._response is None:
                self._response = self._client._open(self._question, self._timeout)
                if self._closed:
                    # Closed by another task while this one waited.
                    self._drop()
                    return
                self._client._streams.add(self)
                self._reading = StreamReader(self._gathering.take)
                self._data = self._response.iter_bytes()
            data = next(self._data, None)
        if data is not None:
            self._chunks = self._reading.feed(data)
            return
        self._over = True
        self._reading.finish()

    def _drop(self) -> None:
        self._chunks = iter(())
        response, self._response = self._response, None
        if response is not None:
            response.close()


def _method(endpoint: Callable[P, Call[T]]) -> "Callable[Concatenate[Client, P], T]":
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._send(endpoint(*args, **kwargs))

    return documented(method, endpoint)


def _streaming(
    endpoint: Callable[P, StreamCall[Chunk, Whole]],
) -> "Callable[Concatenate[Client, P], Stream[Chunk, Whole]]":
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Stream[Chunk, Whole]:
        call = endpoint(*args, **kwargs)
        return Stream(self, call.question, call.gathering())

    return documented(method, endpoint)


def _beginning(response: httpx.Response) -> bytes:
    body = b""
    for data in response.iter_bytes(LONGEST_BODY):
        body += data
        if len(body) >= LONGEST_BODY:
            break
    return body[:LONGEST_BODY]


class Client:
    """An Ostro server. Methods raise the server's errors, and Unreachable if there is no server."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        admin_key: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        """Omitted keys are read from OSTRO_API_KEY and OSTRO_ADMIN_KEY; an empty string means no key.

        `timeout` is the maximum duration of a call in seconds, including retries; for a stream, the longest silence.
        """
        self._target = Target.of(base_url, api_key, admin_key, timeout, max_retries)
        self._http = httpx.Client(**self._target.options())
        self._streams: WeakSet[Stream[Any, Any]] = WeakSet()

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletionResponse: ...

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Stream[ChatCompletionChunk, ChatCompletionResponse]: ...

    def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletionResponse | Stream[ChatCompletionChunk, ChatCompletionResponse]:
        """The next message of a conversation; a plain string is a single user message. With `stream`, as `stream_chat`
        gives it.
        """
        return self.stream_chat(messages, **options) if stream else self._send(calls.chat(messages, **options))

    chat_completion = chat
    stream_chat = _streaming(calls.stream_chat)
    complete = _method(calls.complete)
    stream_complete = _streaming(calls.stream_complete)
    generate = _method(calls.generate)
    stream_generate = _streaming(calls.stream_generate)
    loglikelihood = _method(calls.loglikelihood)
    pseudo_loglikelihood = _method(calls.pseudo_loglikelihood)
    solve = _method(calls.solve)
    embed = _method(calls.embed)
    rerank = _method(calls.rerank)
    score = _method(calls.score)
    tokenize = _method(calls.tokenize)
    detokenize = _method(calls.detokenize)
    tokenizer_info = _method(calls.tokenizer_info)
    models = _method(calls.models)
    model = _method(calls.model)
    version = _method(calls.version)
    load = _method(calls.load)
    unload = _method(calls.unload)
    pin = _method(calls.pin)
    unpin = _method(calls.unpin)
    stats = _method(calls.stats)

    @property
    def url(self) -> str:
        """The server's address, without /v1."""
        return self._target.url

    def healthy(self, timeout: float = 5.0) -> bool:
        """Whether the server is up."""
        try:
            self._once(calls.alive(), timeout)
        except OstroError:
            return False
        return True

    def ready(self, timeout: float = 5.0) -> bool:
        """Whether the server accepts requests: its model is loaded."""
        try:
            return (self._once(calls.readiness(), timeout)).status == "ready"
        except OstroError:
            return False

    def wait_until_ready(self, timeout: float = 600.0) -> None:
        """Also waits for a server to start; raises OstroError if it cannot load its model, or not in time."""
        awaited = Awaited(self._target, timeout)
        while not awaited.is_over(self._readiness()):
            time.sleep(awaited.pause)

    def close(self) -> None:
        for stream in list(self._streams):
            stream.close()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def exchange(
        self, question: Question, timeout: float, *, on_send: Callable[[], None] | None = None
    ) -> Iterator[httpx.Response]:
        """One attempt. The response has an accepted status, and its body has yet to be read.

        `on_send` is called once the connection is established, just before the request is sent.
        """
        with self._target.translated_errors(timeout):
            response = self._open(question, timeout, on_send)
            try:
                yield response
            finally:
                response.close()

    def _open(self, question: Question, timeout: float, on_send: Callable[[], None] | None = None) -> httpx.Response:
        """The same for a caller that reads the body and closes the response itself."""

        def trace(event: str, details: object) -> None:
            if on_send is not None and event.endswith("send_request_headers.started"):
                on_send()

        extensions = {} if on_send is None else {"trace": trace}
        request = self._http.build_request(**self._target.request(question, timeout), extensions=extensions)
        response = self._http.send(request, stream=True)
        if response.status_code == httpx.codes.OK or response.status_code in question.also:
            return response
        try:
            raise question.refusal(response.status_code, response.headers, _beginning(response))
        finally:
            response.close()

    def _send(self, call: Call[T]) -> T:
        tries = self._target.tries()
        while True:
            try:
                return self._once(call, tries.remaining)
            except OstroError as error:
                pause = tries.wait_after(error)
            time.sleep(pause)

    def _once(self, call: Call[T], timeout: float) -> T:
        with self.exchange(call.question, timeout) as response:
            return call.read(response.read())

    def _readiness(self) -> Readiness | Unreachable | RequestTimeout:
        try:
            return self._once(calls.readiness(), 5.0)
        except (Unreachable, RequestTimeout) as error:
            return error
