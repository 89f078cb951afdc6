"""A load balancer as small as can be: each connection goes to the next of the servers that are in turn."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class RoundRobin:
    def __init__(self) -> None:
        self._servers: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        self._taken = 0
        # By server, its connections that have brought no response yet.
        self._fresh: Counter[tuple[str, int]] = Counter()
        self.url = ""

    def add(self, url: str) -> None:
        with self._lock:
            self._servers.append(_address(url))

    def remove(self, url: str) -> None:
        """No new connection goes there; those that are open stay. Returns once each has brought a response, which is
        what a pause before the signal is for.
        """
        with self._lock:
            self._servers.remove(_address(url))
        while self._fresh[_address(url)]:
            time.sleep(0.01)

    def _next(self) -> tuple[str, int]:
        with self._lock:
            self._taken += 1
            chosen = self._servers[self._taken % len(self._servers)]
            self._fresh[chosen] += 1
            return chosen

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chosen = self._next()
        responded = False

        def respond() -> None:
            nonlocal responded
            if not responded:
                responded = True
                self._fresh[chosen] -= 1

        try:
            inner_reader, inner_writer = await asyncio.open_connection(*chosen)
            await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer, respond))
        finally:
            respond()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: Callable[[], None] = lambda: None
) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
            passed()
    writer.close()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@contextmanager
def round_robin() -> Iterator[RoundRobin]:
    """Listens on the loopback, in a thread of its own."""
    balancer, loop = RoundRobin(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(balancer.serve, "127.0.0.1", 0)

    async def stop(server: asyncio.Server) -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    balancer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield balancer
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
