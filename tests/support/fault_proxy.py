"""A proxy in front of an object store that injects faults and counts what it passes on.

client ──> FaultProxy ──> store        one request a connection

A request is a read, of a range of an object, or a look: a listing, or an object's description. Only reads are counted.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

Kind = Literal["read", "look"]

_HEAD_END = b"\r\n\r\n"
_TRICKLE_SECONDS = 0.2


class Fault(Enum):
    TRUNCATED = "half of the body, then the end; of what has no body, half of the head"
    STALLED = "the same, then nothing"
    TRICKLED = "half of the body, then a byte now and then"
    RESET = "no answer, the connection is cut"
    STATUS_503 = "503"
    STATUS_429 = "429"
    STATUS_403 = "403"
    FLIPPED = "one bit is another"


class FaultProxy:
    """Listens on the loopback, in a thread of its own, until it is closed. From then on connections are refused."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self._loop = asyncio.new_event_loop()
        self._plan: list[tuple[Fault, str, Kind]] = []
        self._always: dict[Kind, Fault | None] = {}
        self._headers: list[tuple[str, str, str | None]] = []
        self.reads: list[str] = []
        """The paths of all reads, in order; those that were broken too."""
        self.ranges: list[tuple[str, int, int]] = []
        """File name, start and end of all reads, in order."""
        self._open: set[asyncio.Task[None]] = set()
        self.targets: list[str] = []
        """Targets of all requests, in order."""
        self.num_bytes = 0
        """Bytes of bodies that were read and passed on."""
        self.before_read: Callable[[int], None] | None = None
        """Called with the number of the read, from 1."""
        self.seconds_a_read = 0.0
        self.keeps_preconditions = True
        """Whether a read of another generation than the current is refused, as GCS does and its emulator does not."""
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def fail(self, fault: Fault, *, times: int = 1, path: str = "", of: Kind = "read") -> None:
        """Breaks the next reads or looks of this path."""
        self._plan += [(fault, path, of)] * times

    @property
    def faults_left(self) -> int:
        return len(self._plan)

    def always_fail(self, fault: Fault | None, *, of: Kind = "read") -> None:
        self._always[of] = fault

    def describe(self, path: str, header: str, value: str | None) -> None:
        """Sets a header in the descriptions of this path, or removes it."""
        self._headers.append((path, header, value))

    def forget_counts(self) -> None:
        self.reads.clear()
        self.ranges.clear()
        self.targets.clear()
        self.num_bytes = 0

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(60)

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        self._stopping = asyncio.Event()
        self._turns = asyncio.Semaphore(4)
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stopping.wait()
        # Closing would come between a connection that is accepted and its task, which attaches it to the server: its
        # socket would be left to the garbage collector.
        for listening in server.sockets:
            self._loop.remove_reader(listening)
        await _end_other_tasks()
        server.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Asyncio itself keeps no task alive whose client is gone.
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()  # Its client may never read the rest.
            raise
        finally:
            await _closed(writer)
            self._open.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(_HEAD_END)
        body = await reader.readexactly(int(_header(head, "content-length") or 0))
        target = head.split(b" ", 2)[1].decode()
        self.targets.append(target)
        wanted = _header(head, "range") if head.startswith(b"GET ") else None
        is_read = wanted is not None
        fault = self._next_fault("read" if is_read else "look", target)
        if wanted is not None:
            self.reads.append(urlsplit(target).path)
            self.ranges.append((unquote(self.reads[-1]).rsplit("/")[-1], *_bounds(wanted)))
            if self.before_read is not None:
                await asyncio.to_thread(self.before_read, len(self.reads))
            await asyncio.sleep(self.seconds_a_read)
            if self.keeps_preconditions and await self._is_another_generation(target):
                await _send(writer, b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n")
                return
        answer = await self._ask(_closing(head) + body)
        for path, name, value in self._headers:
            if head.startswith(b"HEAD ") and path in target:
                answer = _with_header(answer, name, value)
        await self._pass_on(writer, answer, fault, is_read)

    async def _pass_on(self, writer: asyncio.StreamWriter, answer: bytes, fault: Fault | None, is_read: bool) -> None:
        head, _, body = answer.partition(_HEAD_END)
        if fault is Fault.RESET:
            writer.transport.abort()
            return
        if fault in (Fault.STATUS_503, Fault.STATUS_429, Fault.STATUS_403):
            await _send(writer, f"HTTP/1.1 {fault.value} Broken\r\nContent-Length: 0\r\n".encode())
            return
        if fault is Fault.FLIPPED:
            body = body[:-1] + bytes([body[-1] ^ 1])
        half = len(body) // 2 if fault in (Fault.TRUNCATED, Fault.STALLED, Fault.TRICKLED) else len(body)
        if fault in (Fault.TRUNCATED, Fault.STALLED) and not body:
            writer.write(head[: len(head) // 2])
            await writer.drain()
        else:
            await _send(writer, _closing(head + _HEAD_END)[:-2], body[:half])
        self.num_bytes += half if is_read else 0
        if fault is Fault.STALLED:
            await asyncio.sleep(60)
        if fault is Fault.TRICKLED:
            await _trickle(writer, body[half:])

    def _next_fault(self, kind: Kind, target: str) -> Fault | None:
        for each in self._plan:
            if each[1] in target and each[2] == kind:
                self._plan.remove(each)
                return each[0]
        return self._always.get(kind)

    async def _is_another_generation(self, target: str) -> bool:
        parts = urlsplit(target)
        wanted = parse_qs(parts.query).get("ifGenerationMatch")
        if wanted is None:
            return False
        path = parts.path.removeprefix("/download")
        answer = await self._ask(f"GET {path} HTTP/1.1\r\nHost: store\r\nConnection: close\r\n\r\n".encode())
        head, _, body = answer.partition(_HEAD_END)
        return b" 200 " in head.split(b"\r\n")[0] and json.loads(body)["generation"] != wanted[0]

    async def _ask(self, request: bytes) -> bytes:
        # The emulator answers one at a time and lets five wait; a sixth would come again after a second.
        async with self._turns:
            reader, writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
            try:
                writer.write(request)
                return await reader.read()
            finally:
                await _closed(writer)


async def _end_other_tasks() -> None:
    """Those too that come of connections accepted last: a connection becomes a task, which makes another."""
    while True:
        # Each of them begins: one that is cancelled before would close nothing.
        for _ in range(3):
            await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Returns when the socket is closed: the loop may end next, and would leave it to the garbage collector."""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, head: bytes, body: bytes = b"") -> None:
    writer.write(head + (b"" if b"onnection: close" in head else b"Connection: close\r\n") + b"\r\n" + body)
    await writer.drain()


async def _trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    for position in range(len(data)):
        writer.write(data[position : position + 1])
        await writer.drain()
        await asyncio.sleep(_TRICKLE_SECONDS)


def _closing(head: bytes) -> bytes:
    """The same head, for a connection that ends after it."""
    lines = [line for line in head[: -len(_HEAD_END)].split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"Connection: close"]) + _HEAD_END


def _with_header(answer: bytes, name: str, value: str | None) -> bytes:
    head, _, body = answer.partition(_HEAD_END)
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(f"{name.lower()}:".encode())]
    if value is not None:
        lines.append(f"{name}: {value}".encode())
    return b"\r\n".join(lines) + _HEAD_END + body


def _header(head: bytes, name: str) -> str | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.decode().lower() == name:
            return value.strip().decode()
    return None


def _bounds(value: str) -> tuple[int, int]:
    """Start and end of a range header: 0 and 100 for `bytes=0-99`."""
    start, _, last = value.removeprefix("bytes=").partition("-")
    return int(start), int(last) + 1
