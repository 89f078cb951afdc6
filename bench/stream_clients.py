"""Streaming clients that do as little as clients can, in one process: started by the other benchmarks.

python bench/stream_clients.py '{"host": "127.0.0.1", "port": 8000, "clients": 64, "requests": 4, "bodies": [{…}]}'

Each client sends its requests one after the other over one connection; client k of the m-th request sends body
(m · clients + k) modulo their number. Prints one JSON line.
"""

import asyncio
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial

_EVENT, _DONE, _END = b"data: {", b"data: [DONE]", b"0\r\n\r\n"


@dataclass(slots=True)
class Counts:
    streams: int = 0
    events: int = 0
    bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    first_event_seconds: float = 0.0
    """Mean, from a request sent to its first event."""


class Client(asyncio.Protocol):
    def __init__(self, requests: list[bytes], counts: Counts) -> None:
        self._requests = iter(requests)
        self._counts = counts
        self._tail = b""
        self._sent = 0.0
        self._waiting = False
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send_next()

    def data_received(self, data: bytes) -> None:
        counts = self._counts
        if self._waiting and _EVENT in data:
            self._waiting = False
            counts.first_event_seconds += time.perf_counter() - self._sent
        counts.bytes += len(data)
        # An event's beginning may lie in two pieces: too seldom to matter here.
        counts.events += data.count(_EVENT)
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(_END):
            if _DONE not in self._tail:
                self._fail(f"no stream: {data!r}")
                return
            counts.streams += 1
            self._send_next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished.done():
            self._fail(f"the connection was lost ({exc})")

    def _fail(self, why: str) -> None:
        self.finished.set_exception(RuntimeError(why))

    def _send_next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self.finished.set_result(None)
            self._transport.close()
        else:
            self._tail, self._waiting, self._sent = b"", True, time.perf_counter()
            self._transport.write(request)


def http_request(host: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def run(host: str, port: int, clients: int, requests: int, bodies: list[object]) -> Counts:
    counts = Counts()
    loop = asyncio.get_running_loop()
    encoded = [http_request(host, body) for body in bodies]
    shares = [[encoded[(m * clients + k) % len(encoded)] for m in range(requests)] for k in range(clients)]
    cpu, began = time.process_time(), time.perf_counter()
    connections = [loop.create_connection(partial(Client, share, counts), host, port) for share in shares]
    protocols = [protocol for _, protocol in await asyncio.gather(*connections)]
    await asyncio.gather(*(protocol.finished for protocol in protocols))
    counts.seconds, counts.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    counts.first_event_seconds /= max(counts.streams, 1)
    return counts


def main() -> None:
    job = json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    counts = asyncio.run(run(job["host"], job["port"], job["clients"], job["requests"], job["bodies"]))
    print(json.dumps(asdict(counts)))


if __name__ == "__main__":
    main()
