"""A server that computes nothing and streams words at a steady pace: `python -m ostro.measure.bench.null_server`.

Each event carries the time.perf_counter() at which it was written and at which its request arrived, so a client on the
same machine can tell how much later it noticed them. Prints its port; exits when its standard input is closed.
"""

import argparse
import asyncio
import json
import os
import threading
import time
from contextlib import suppress
from typing import cast

import msgspec

from ostro.measure.bench.worker import loop_factory

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"choices":[{"index":0,"delta":{"content":" word"},"text":" word","finish_reason":null}],'
    b'"stamp":%r,"received":%r}\n\n'
)


class _Asked(msgspec.Struct):
    max_tokens: int = 16
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


class NullServer(asyncio.Protocol):
    """One connection, one request at a time. Minimal, to add little to a measurement."""

    def __init__(self, *, ttft: float, itl: float) -> None:
        self._ttft = ttft
        self._itl = itl
        self._data = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        received = time.perf_counter()
        self._data += data
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        length = _content_length(head)
        if length is None:
            self._data = rest
            self._list_models()
        elif len(rest) >= length:
            self._data = rest[length:]
            self._answer(msgspec.json.decode(rest[:length], type=_Asked), received)

    def _list_models(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "null", "object": "model"}]}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _answer(self, asked: _Asked, received: float) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time() + self._ttft
        self._transport.write(_HEAD)

        def write(number: int) -> None:
            self._write_event(_EVENT % (time.perf_counter(), received))
            if number + 1 < asked.max_tokens:
                self._timer = loop.call_at(start + (number + 1) * self._itl, write, number + 1)
            else:
                self._finish(asked)

        self._timer = loop.call_at(start, write, 0)

    def _finish(self, asked: _Asked) -> None:
        words = len(bytes(asked.messages or asked.prompt).split())
        ended = {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": words, "completion_tokens": asked.max_tokens}}
        for value in (ended, usage):
            self._write_event(b"data: " + json.dumps(value).encode() + b"\n\n")
        self._write_event(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _write_event(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))


def _content_length(head: bytes) -> int | None:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return None


async def _serve(ttft: float, itl: float) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wait_for_the_end() -> None:
        while os.read(0, 1024):
            pass
        loop.call_soon_threadsafe(ended.set)

    server = await loop.create_server(lambda: NullServer(ttft=ttft, itl=itl), "127.0.0.1", 0, backlog=4096)
    threading.Thread(target=wait_for_the_end, daemon=True).start()
    with suppress(BrokenPipeError):
        os.write(1, b"%d\n" % server.sockets[0].getsockname()[1])
        await ended.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ttft", type=float, default=0.0, help="seconds to the first word")
    parser.add_argument("--itl", type=float, default=0.0, help="seconds from one word to the next")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(args.ttft, args.itl))


if __name__ == "__main__":
    main()
