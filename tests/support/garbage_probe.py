"""Prints how many objects requests leave to the garbage collector, as JSON: by kind of request, after MANY of them. In
a process of its own, as the collector is told to keep what it finds.
"""

import asyncio
import gc
import json
import sys
from collections.abc import Mapping
from types import CoroutineType, FrameType, TracebackType

from http_app import live_app
from live_service import until
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ostro.server.api import HttpOptions
from ostro.server.models.service import ModelService

MANY = 32
HELLO = [{"role": "user", "content": "Hello."}]
SHORT = {"max_tokens": 4, "stream": True}
KINDS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "completion": ("/v1/completions", {"prompt": "x", **SHORT}),
    "whole": ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 4}),
    "chat": ("/v1/chat/completions", {"messages": HELLO, **SHORT}),
    "message": ("/v1/messages", {"model": "default", "messages": HELLO, **SHORT}),
    "response": ("/v1/responses", {"input": "x", "max_output_tokens": 4, "stream": True}),
    "background": ("/v1/responses", {"input": "x", "max_output_tokens": 4, "stream": True, "background": True}),
    # More tokens than the context has room for.
    "failed": ("/v1/responses", {"input": "x " * 20_000, "stream": True, "background": True}),
    "too long": ("/v1/responses", {"input": "x " * 20_000, "stream": True}),
    "refused": ("/v1/responses", {"input": "x", "model": "missing", "stream": True}),
    "invalid": ("/v1/completions", {"prompt": "x", "temperature": -1}),
    "left": ("/v1/completions", {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}),
}
# What a request is made of. Not a connection: asyncio's own transports are cycles.
PARTS = (asyncio.Task, CoroutineType, FrameType, TracebackType, RequestResponseCycle)


def parts_of_requests(garbage: list[object]) -> int:
    return sum(isinstance(each, PARTS) or type(each).__module__.startswith("ostro.") for each in garbage)


async def ask(host: str, port: int, path: str, body: Mapping[str, object]) -> None:
    """Reads the whole answer; of one that would be long, the first event."""
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
    if "ignore_eos" in body:
        await reader.readuntil(b"data: ")
    else:
        await reader.read()
    writer.close()
    await writer.wait_closed()


async def garbage_of(host: str, port: int, service: ModelService, path: str, body: Mapping[str, object]) -> int:
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for _ in range(MANY):
        await ask(host, port, path, body)
    await until(lambda: service.num_requests == 0)
    # The tasks of the last request end in the loop's next turns.
    await asyncio.sleep(0.05)
    gc.collect()
    gc.enable()
    return parts_of_requests(gc.garbage)


async def main() -> None:
    async with live_app(HttpOptions()) as (host, port, service):
        found = {}
        for name, (path, body) in KINDS.items():
            # Whatever the first request of a kind sets up is no garbage of requests.
            await ask(host, port, path, body)
            found[name] = await garbage_of(host, port, service, path, body)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
