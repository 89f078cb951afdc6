"""How much may be under way at a time, in what order, and for how long. Knows requests and token counts; knows no HTTP.

A route goes through the gate like this:

    async with gate.admit(record) as ticket:                  # 429 when the line is full, 503 while draining
        requests = [await ticket.within(service.prepare(...))]
        requests = await ticket.turn(requests)                # waits in line; each request gets its `turn`
        async for deltas in ticket.watch(service.stream(requests[0])): ...      # or
        completion = await ticket.complete(service.complete(requests[0]))

Everything inside ends with RequestTimeout once the request's time is over. The block may end in another task than it
began in, as streamed answers do. `record` is the request's `logging.RequestRecord` (scope["state"]["record"]); the
ticket writes queue time, first token, tokens and finish reasons into it.

The line is served by priority, then by turn. Turns are fair between keys (start-time fair queueing): every key has a
clock that counts the tokens it was given, and a request's turn is its key's clock, or the clock of whoever is being
served if that is later. So a key that asks for much waits behind itself and not before others, and one that was idle
saves up nothing.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Protocol, TypeVar

from ostro.engine.request import Request, Task
from ostro.errors import BadRequest, QueueFull, RequestTimeout, Unavailable
from ostro.outputs import Completion, Delta
from ostro.server.logging import RequestRecord

_T = TypeVar("_T")

# Waits that Retry-After is the mean of, and its bound.
_MEASURED = 64
_LONGEST_RETRY = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    concurrent: int = 128
    """Requests handed to the engine at a time."""
    waiting: int = 1024
    """Requests that may wait for that."""
    waiting_tokens: int = 1_000_000
    """Prompt tokens that may wait for that. One request may always wait, whatever its length."""
    seconds: float = 300.0
    """How long a request may take, waiting included."""
    new_tokens: int | None = None
    """Most tokens that a request may ask for."""
    retry_after_drain: int = 5
    """What a client is told while the server shuts down: another one has taken over by then."""


class Deltas(Protocol):
    """A stream of the model service."""

    def __aiter__(self) -> AsyncIterator[list[Delta]]: ...

    async def __anext__(self) -> list[Delta]: ...

    async def aclose(self) -> None: ...


class FairClock:
    """Start-time fair queueing: turns, in tokens."""

    def __init__(self) -> None:
        self._now = 0
        self._given: dict[str, int] = {}

    def turn(self, key: str, tokens: int) -> int:
        """The turn of a request of `key` that costs so much."""
        start = max(self._now, self._given.get(key, 0))
        self._given[key] = start + tokens
        return start

    def charge(self, key: str, tokens: int) -> None:
        """What a request turned out to cost beyond what was known at its turn."""
        self._given[key] = self._given.get(key, self._now) + tokens

    def serve(self, turn: int) -> None:
        """The request of this turn is being served: nobody starts earlier from now on."""
        self._now = max(self._now, turn)

    def rest(self) -> None:
        """Nothing is under way: all are equal again."""
        self._now = max([self._now, *self._given.values()])
        self._given.clear()


class Ticket:
    """One HTTP request inside the gate, with all its prompts."""

    def __init__(self, gate: "Gate", record: RequestRecord) -> None:
        self._gate = gate
        self._at_work: set[asyncio.Task[object]] = set()
        self._expired = False
        self._turns: list[int] = []
        self._cost = 0
        self._started = False
        self.record = record
        self.holds_slot = False

    async def turn(self, requests: Sequence[Request]) -> list[Request]:
        """Waits until the engine may have them. Raises QueueFull at once if too many tokens are waiting."""
        requests = [self._gate.capped(request) for request in requests]
        costs = [len(request.prompt_ids) + request.params.n for request in requests]
        self.record.prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self._turns = [self._gate.clock.turn(self.record.key, cost) for cost in costs]
        self._cost = sum(costs)
        priority = min(request.priority for request in requests)
        self.record.lined_up = time.monotonic()
        await self.within(self._gate.line_up(self, (priority, self._turns[0]), self.record.prompt_tokens))
        self.record.let_in = time.monotonic()
        return [replace(request, turn=turn) for request, turn in zip(requests, self._turns, strict=True)]

    async def within(self, work: Awaitable[_T]) -> _T:
        """Its result, or RequestTimeout."""
        # One timer serves all of a stream's items: asyncio.timeout would set up one for each, ten microseconds a token.
        if self.expired():
            # It was at something else when the time ran out.
            if isinstance(work, Coroutine):
                work.close()
            raise self._timeout()
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        self._at_work.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self.expired() and task.uncancel() <= cancelling:
                raise self._timeout() from None
            raise
        finally:
            self._at_work.discard(task)

    def expired(self) -> bool:
        return self._expired

    def expire(self) -> None:
        """Its time is over: whatever it waits for ends."""
        self._expired = True
        for task in self._at_work:
            task.cancel()

    def _timeout(self) -> RequestTimeout:
        seconds = self._gate.limits.seconds
        return RequestTimeout(f"The request took longer than the {seconds:g} seconds it may. Ask for less.")

    async def watch(self, stream: Deltas) -> AsyncGenerator[list[Delta], None]:
        """The stream itself, within the request's time. Close it: that closes the stream."""
        try:
            while True:
                deltas = await self.within(anext(stream))
                self.mark_started()
                for delta in deltas:
                    self.record.count(len(delta.token_ids), delta.finish_reason)
                yield deltas
        except StopAsyncIteration:
            return
        finally:
            # This is what aborts the request in the engine: it must not wait for the garbage collector.
            await stream.aclose()

    async def complete(self, work: Awaitable[Completion]) -> Completion:
        completion = await self.within(work)
        self.mark_started()
        for choice in completion.choices:
            self.record.count(len(choice.token_ids), choice.finish_reason)
        return completion

    def mark_started(self) -> None:
        if not self._started:
            self._started = True
            self._gate.clock.serve(self._turns[0])

    def settle(self) -> None:
        """Charges its key what it cost: what it generated too, or nothing if it never got its turn."""
        if self.holds_slot:
            self._gate.clock.serve(self._turns[-1])
            self._gate.clock.charge(self.record.key, self.record.completion_tokens)
        else:
            self._gate.clock.charge(self.record.key, -self._cost)


class Gate:
    """Use within one event loop."""

    def __init__(self, limits: GateLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = FairClock()
        self.draining = False
        self.num_inside = 0
        self.num_served = 0
        self.num_waiting = 0
        self.waiting_tokens = 0
        self._time = clock
        self._slots = limits.concurrent
        self._order = itertools.count()
        self._line: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._waits: deque[float] = deque(maxlen=_MEASURED)
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def admit(self, record: RequestRecord) -> AsyncIterator[Ticket]:
        """Raises QueueFull or Unavailable if there is no room for one more."""
        self._check()
        ticket = Ticket(self, record)
        timer = asyncio.get_running_loop().call_later(self.limits.seconds, ticket.expire)
        self.num_inside += 1
        self._empty.clear()
        try:
            yield ticket
        finally:
            timer.cancel()
            self._leave(ticket)

    def drain(self) -> None:
        """Lets nobody in any more; who is inside may finish."""
        self.draining = True

    async def emptied(self) -> None:
        """Waits until nobody is inside."""
        await self._empty.wait()

    def retry_after(self) -> int:
        """Seconds until it is worth another try: how long requests have been waiting of late."""
        mean = sum(self._waits) / len(self._waits) if self._waits else 0.0
        return min(max(1, math.ceil(mean)), _LONGEST_RETRY)

    def capped(self, request: Request) -> Request:
        """Raises BadRequest if it asks for more tokens than it may."""
        cap, asked = self.limits.new_tokens, request.params.max_tokens
        if cap is None or request.task is not Task.GENERATE or (asked is not None and asked <= cap):
            return request
        if asked is not None:
            raise BadRequest(
                f"max_tokens is {asked}, but this server allows at most {cap}. Lower it.", param="max_tokens"
            )
        return replace(request, params=request.params.with_changes(max_tokens=cap))

    async def line_up(self, ticket: Ticket, rank: tuple[int, int], tokens: int) -> None:
        """Waits for a slot; the ticket gives it back when it leaves."""
        if self._slots:
            # A free slot means that nobody waits: one that is given back goes to the line first.
            self._slots -= 1
            ticket.holds_slot = True
            self._waits.append(0.0)
            return
        if self.waiting_tokens and self.waiting_tokens + tokens > self.limits.waiting_tokens:
            raise QueueFull(
                f"{self.waiting_tokens} prompt tokens are waiting already. Try again later.",
                retry_after=self.retry_after(),
            )
        since = self._time()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (*rank, next(self._order), place)
        heappush(self._line, entry)
        self.num_waiting += 1
        self.waiting_tokens += tokens
        try:
            await place
            ticket.holds_slot = True
        except asyncio.CancelledError:
            if place.cancelled():
                if entry in self._line:
                    self._line.remove(entry)
                    heapify(self._line)
            else:
                # The slot came in the same moment as the end.
                self._give_back_slot()
            raise
        finally:
            self.num_waiting -= 1
            self.waiting_tokens -= tokens
            self._waits.append(self._time() - since)

    def _check(self) -> None:
        if self.draining:
            raise Unavailable("The server is shutting down.", retry_after=self.limits.retry_after_drain)
        if self.num_inside >= self.limits.concurrent + self.limits.waiting:
            raise QueueFull(
                f"{self.num_inside} requests are under way or waiting already. Try again later.",
                retry_after=self.retry_after(),
            )

    def _leave(self, ticket: Ticket) -> None:
        self.num_inside -= 1
        self.num_served += 1
        ticket.settle()
        if ticket.holds_slot:
            self._give_back_slot()
        if not self.num_inside:
            self.clock.rest()
            self._empty.set()

    def _give_back_slot(self) -> None:
        """To the first in line."""
        while self._line:
            *_, place = heappop(self._line)
            # One that is about to be told of its end has cancelled its place already.
            if not place.done():
                place.set_result(None)
                return
        self._slots += 1
