"""The ingress alone, over replicas that answer when they are told to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence

import httpx
from live_service import until
from starlette.types import Message

from ostro.ray.forwarded_request import ForwardedRequest
from ostro.ray.ingress import Answering, Ingress
from ostro.ray.replica import WholeAnswer
from ostro.server.admission.auth import Keyring
from ostro.server.http.body import BodyLimits

MIB = 1 << 20


class Patient:
    """Keeps requests until `answers` is set."""

    faults = ()

    def __init__(self) -> None:
        self.num_asked = 0
        self.answers = asyncio.Event()

    def ask(self, call: ForwardedRequest) -> Answering:
        self.num_asked += 1
        return _Answer(self.answers)

    def ask_all(self, call: ForwardedRequest) -> Awaitable[Sequence[WholeAnswer | BaseException]]:
        raise NotImplementedError


class _Answer:
    def __init__(self, answers: asyncio.Event) -> None:
        self._answers = answers

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        await self._answers.wait()
        yield [{"type": "http.response.start", "status": 200, "headers": []}, {"type": "http.response.body"}]

    def cancel(self) -> None:
        pass


def statuses_of_many(limits: BodyLimits, *, number: int, size: int, num_places: int = 0) -> list[int]:
    """Of requests that are all under way before the first is answered."""

    async def scenario() -> list[int]:
        engines = Patient()
        ingress = Ingress(engines, Keyring(), limits, request_seconds=60, num_places=num_places)
        transport = httpx.ASGITransport(ingress)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            posts = [asyncio.create_task(http.post("/v1/completions", content=b"x" * size)) for _ in range(number)]
            await until(lambda: engines.num_asked + sum(post.done() for post in posts) == number)
            engines.answers.set()
            return sorted([(await post).status_code for post in posts])

    return asyncio.run(scenario())


def test_bodies_of_all_requests_together_are_bounded() -> None:
    """Each had a limit, and all together had none."""
    limits = BodyLimits(max_bytes=2 * MIB, max_bytes_together=4 * MIB)
    assert statuses_of_many(limits, number=8, size=MIB) == [200] * 3 + [503] * 5


def test_there_is_room_for_as_many_short_requests_as_a_replica_admits() -> None:
    limits = BodyLimits(max_bytes=MIB, max_bytes_together=MIB)
    assert statuses_of_many(limits, number=50, size=60_000, num_places=50) == [200] * 50
