"""Admission: how many requests may run and wait, in what order, and for how long. Knows token counts; knows no HTTP.

A route goes through the gate like this:

    async with gate.admit(record) as ticket:                  # 429 when the queue is full, 503 while draining
        model = await ticket.take(models.use(name), name)     # 429 when too many wait for this one to be loaded
        requests = ticket.enlist(await ticket.prepare(...))                     # each request gets its `turn`
        await ticket.turn()                                   # waits in the queue
        async for deltas in ticket.watch(model.stream(requests[0])): ...        # or
        completion = await ticket.complete(model.complete(requests[0]))

Everything inside ends with RequestTimeout once the request's time is up. The block may end in another task than it
began in, as streamed responses do. `record` is the request's `logging.RequestRecord` (scope["state"]["record"]); the
ticket writes queue time, first token, tokens and finish reasons into it.

A slot is a request's right to be in an engine. A request that waits for a slot should not hold a model, whose memory
others may need; one that waits for a model should not hold a slot, which others may use: `lend_slot_unless_immediate`
lends it to them.

The queue is ordered by priority, then by turn. Turns are fair between keys (start-time fair queueing): every key has a
clock that counts the tokens it was given, and a request's turn is its key's clock, or the clock of the request being
served if that is later. So a key with many requests waits behind its own and not in front of others, and an idle key
saves up nothing.

Turns decide who is next, shares decide how much each key may hold: with several keys, each has its own share of queue
places, slots and waiting tokens (`server.admission.shares`), and a request takes as many slots as it has sequences. The
engine divides its batch by the same labels.
"""

import asyncio
import itertools
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Protocol, TypeVar

from ostro.engine.request import Request, Task
from ostro.errors import BadRequest, NotAllowed, QueueFull, RequestTimeout, Unavailable
from ostro.frontend.outputs import Completion, Delta
from ostro.server.admission.shares import Shares
from ostro.server.telemetry.record import RequestRecord

_T = TypeVar("_T")

# Number of recent waits averaged for Retry-After, and its upper bound.
_MEASURED = 64
_LONGEST_RETRY = 60
# Extra places per admin key, beyond the shared ones.
_OPERATORS_PLACES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    concurrent: int = 128
    """Sequences in the engine at a time: each prompt of a request counts, and each of its choices."""
    waiting: int = 1024
    """Requests that may wait for a slot."""
    waiting_tokens: int = 1_000_000
    """Prompt tokens that may wait for a slot. One request may always wait, whatever its length."""
    seconds: float = 300.0
    """Maximum duration of a request, including its wait."""
    new_tokens: int | None = None
    """Maximum number of tokens that a request may ask for."""
    retry_after_drain: int = 5
    """Retry-After while the server shuts down: another one should have taken over by then."""

    @property
    def num_places(self) -> int:
        """Requests that may run or wait."""
        return self.concurrent + self.waiting


@dataclass(slots=True)
class Usage:
    """Accumulated usage of one model."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""

    def add(self, record: RequestRecord) -> None:
        """Adds a finished request."""
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens or 0
        self.generated_tokens += record.completion_tokens
        self.cached_tokens += record.cached_tokens or 0


class Deltas(Protocol):
    """A stream of deltas from the model service."""

    def __aiter__(self) -> AsyncIterator[list[Delta]]: ...

    async def __anext__(self) -> list[Delta]: ...

    async def aclose(self) -> None: ...


class FairClock:
    """Start-time fair queueing: turns, in tokens."""

    def __init__(self) -> None:
        self._now = 0
        self._given: dict[str, int] = {}

    def turn(self, key: str, tokens: int) -> int:
        """The turn of a request by `key` that costs this much."""
        start = max(self._now, self._given.get(key, 0))
        self._given[key] = start + tokens
        return start

    def charge(self, key: str, tokens: int) -> None:
        """Adds costs that were not known at the request's turn."""
        self._given[key] = self._given.get(key, self._now) + tokens

    def serve(self, turn: int) -> None:
        """The request with this turn is being served: from now on nobody starts earlier."""
        self._now = max(self._now, turn)

    def rest(self) -> None:
        """Nothing is in progress: all keys are equal again."""
        self._now = max([self._now, *self._given.values()])
        self._given.clear()


class Ticket:
    """One HTTP request inside the gate, with all its prompts."""

    def __init__(self, gate: "Gate", record: RequestRecord) -> None:
        self._gate = gate
        self._at_work: set[asyncio.Task[object]] = set()
        self._expired = False
        self._turns: list[int] = []
        self._priority = 0
        self._cost = 0
        self._started = False
        self._held = AsyncExitStack()
        self.record = record
        self.holds_slot = False
        self.num_slots = 1
        """Number of slots that it takes, all at once."""

    async def take(self, model: AbstractAsyncContextManager[_T], name: str) -> _T:
        """Waits for a model, and holds it until `let_go` or until the request leaves. Raises QueueFull if too many
        requests already wait for it, unless this one has been in the queue before.
        """
        with self._gate.loading(name, is_new=not self._turns):
            return await self.within(self._held.enter_async_context(model))

    async def let_go(self) -> None:
        """Releases the model, if it holds one."""
        await self._held.aclose()

    def enlist(self, requests: Sequence[Request]) -> list[Request]:
        """The requests, ready for the engine. Requests that are prepared again keep their turns."""
        requests = self._gate.capped(requests)
        key = self.record.key
        if not self._turns:
            costs = [len(request.prompt_ids) + request.params.n for request in requests]
            self.record.prompt_tokens = sum(len(request.prompt_ids) for request in requests)
            self._priority = min(request.priority for request in requests)
            self._check_priority()
            self.num_slots = self._gate.slots_for(sum(request.params.n for request in requests))
            self._turns = [self._gate.clock.turn(key, cost) for cost in costs]
            self._cost = sum(costs)
        return [
            replace(request, turn=turn, tenant=key, cache_salt=self._gate.salt(key, request.cache_salt))
            for request, turn in zip(requests, self._turns, strict=True)
        ]

    def _check_priority(self) -> None:
        if self._priority < 0 and not self.record.may_raise_priority:
            raise NotAllowed(
                "A negative priority goes ahead of all other requests, and this key may not ask for one. Leave "
                "out priority, or list the key in --priority-key.",
                param="priority",
            )

    async def turn(self) -> None:
        """Waits for a slot. A new request raises QueueFull at once if too many tokens are already waiting."""
        is_new = self.record.queued_at is None
        self.record.queued_at = self.record.queued_at or time.monotonic()
        rank = self._priority, self._turns[0]
        await self.within(self._gate.wait_for_slot(self, rank, self.record.prompt_tokens or 0, is_new=is_new))
        self.record.admitted_at = time.monotonic()

    def enter(self) -> bool:
        """Takes a slot if one is free; returns whether it has one."""
        if not self.holds_slot and self._gate.take_slot(self):
            self.record.admitted_at = time.monotonic()
            self.record.queued_at = self.record.queued_at or self.record.admitted_at
        return self.holds_slot

    @contextmanager
    def lend_slot_unless_immediate(self) -> Iterator[None]:
        """Gives the slot to the next in the queue, unless the block finishes before anything else can run."""
        stepping_back = asyncio.get_running_loop().call_soon(self._lend_slot)
        try:
            yield
        finally:
            stepping_back.cancel()

    def _lend_slot(self) -> None:
        self.record.admitted_at = None
        self._gate.give_back_slot(self)

    async def within(self, work: Awaitable[_T]) -> _T:
        """The result of `work`, or RequestTimeout."""
        # One timer for the whole request: asyncio.timeout would create one per stream item, costing 10 µs per token.
        if self.expired():
            # The time ran out while it was doing something else.
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
            # An error that ends the task keeps this frame, and the task keeps the error.
            del task

    async def prepare(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Runs slow text processing, within the request's time. If there are several keys, each has only one request in
        preparation at a time, so that a key with very slow texts does not block the others.
        """
        return await self.within(self._gate.in_turn(self.record.key, work))

    def expired(self) -> bool:
        return self._expired

    def expire(self) -> None:
        """Its time is up: cancels whatever it is waiting for."""
        self._expired = True
        for task in self._at_work:
            task.cancel()

    def _timeout(self) -> RequestTimeout:
        seconds = self._gate.limits.seconds
        return RequestTimeout(f"The request took longer than the allowed {seconds:g} seconds. Ask for less.")

    async def watch(self, stream: Deltas) -> AsyncGenerator[list[Delta], None]:
        """The stream, limited to the request's time. Closing it closes the stream."""
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
            # This aborts the request in the engine, so it must not wait for the garbage collector.
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
        """Charges its key the actual cost: also for generated tokens, or nothing if it never had its turn."""
        if self.holds_slot:
            self._gate.clock.serve(self._turns[-1])
            self._gate.clock.charge(self.record.key, self.record.completion_tokens)
        else:
            self._gate.clock.charge(self.record.key, -self._cost)


class Gate:
    """Use within one event loop."""

    def __init__(
        self,
        limits: GateLimits,
        *,
        many_models: bool = False,
        num_keys: int = 1,
        share_prefixes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With many models, requests waiting for one to be loaded leave places for others. `num_keys` is the number of
        different API keys, and `share_prefixes` whether one may reuse cached prefixes of prompts that another has sent.
        """
        self.limits = limits
        self.clock = FairClock()
        self.draining = False
        self.num_inside = 0
        self.used: defaultdict[str, Usage] = defaultdict(Usage)
        """Usage by the model's name in responses."""
        self.num_waiting = 0
        self._time = clock
        self.num_keys = num_keys
        self.num_places = limits.num_places
        self._places = Shares(self.num_places, num_keys=num_keys)
        self._slots = Shares(limits.concurrent, num_keys=num_keys)
        self._tokens = Shares(limits.waiting_tokens, num_keys=num_keys)
        self._many_keys = num_keys > 1
        self._preparing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._share_prefixes = share_prefixes or num_keys <= 1
        self._many_models = many_models
        self._loading: Counter[str] = Counter()
        self._order = itertools.count()
        self._lines: dict[str, list[_Waiting]] = {}
        self._waits: deque[float] = deque(maxlen=_MEASURED)
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def admit(self, record: RequestRecord) -> AsyncIterator[Ticket]:
        """Raises QueueFull or Unavailable if there is no room for another request."""
        self.check(record)
        ticket = Ticket(self, record)
        timer = asyncio.get_running_loop().call_later(self.limits.seconds, ticket.expire)
        self.num_inside += 1
        self._places.take(record.key)
        self._empty.clear()
        try:
            yield ticket
        finally:
            timer.cancel()
            try:
                await ticket.let_go()
            finally:
                self._leave(ticket)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of queued requests."""
        return self._tokens.used

    def slots_for(self, sequences: int) -> int:
        """How many slots a request takes. At most half of them, so that no single request blocks all others."""
        return min(sequences, max(1, self.limits.concurrent // 2))

    def salt(self, key: str, given: str) -> str:
        """Separates a request's cached prefixes from others': with several keys, each has its own."""
        return given if self._share_prefixes else f"{key} {given}"

    def check(self, record: RequestRecord) -> None:
        """Raises what `admit` would raise now; called before reading a body, which may be long."""
        if self.draining:
            raise Unavailable("The server is shutting down.", retry_after=self.limits.retry_after_drain)
        if not self._places.has_room(record.key) and not self._has_operators_place(record):
            raise self._full(self._places, record.key, "requests", "running or waiting")

    def drain(self) -> None:
        """Admits nobody any more; requests inside may finish."""
        self.draining = True

    async def emptied(self) -> None:
        """Waits until nobody is inside."""
        await self._empty.wait()

    def retry_after(self) -> int:
        """Seconds until a retry is worthwhile: the recent average wait."""
        mean = sum(self._waits) / len(self._waits) if self._waits else 0.0
        return min(max(1, math.ceil(mean)), _LONGEST_RETRY)

    async def in_turn(self, key: str, work: Callable[[], Awaitable[_T]]) -> _T:
        if not self._many_keys:
            return await work()
        async with self._preparing[key]:
            return await work()

    def capped(self, requests: Sequence[Request]) -> list[Request]:
        """Raises BadRequest if a request asks for more tokens than allowed."""
        capped: list[Request] = []
        for number, request in enumerate(requests):
            if number and request.params is requests[number - 1].params and request.task is requests[number - 1].task:
                # All prompts of a request share their params; copying them again would repeat their validation.
                params = capped[-1].params
                capped.append(request if request.params is params else replace(request, params=params))
            else:
                capped.append(self._capped(request))
        return capped

    def _capped(self, request: Request) -> Request:
        cap, params = self.limits.new_tokens, request.params
        if cap is None or request.task is not Task.GENERATE:
            return request
        if params.max_tokens is None:
            most = min(cap, params.default_max_tokens or cap)
            return replace(request, params=params.with_changes(default_max_tokens=most))
        if params.max_tokens > cap:
            raise BadRequest(
                f"max_tokens is {params.max_tokens}, but this server allows at most {cap}. Lower it.",
                param="max_tokens",
            )
        return request

    @contextmanager
    def loading(self, model: str, *, is_new: bool) -> Iterator[None]:
        """Wraps a wait for the model. Raises QueueFull if a new request is one too many.

        As many may wait for one model as there are places left, for itself and others: a single popular model gets half
        of them, two get a third each, and no number of them gets all.
        """
        waiting = self._loading[model]
        if is_new and self._many_models and waiting >= max(1, self.num_places - self.num_inside):
            raise QueueFull(
                f"{waiting} requests are already waiting for this model to be loaded. Try again later.",
                retry_after=self.retry_after(),
            )
        self._loading[model] += 1
        try:
            yield
        finally:
            self._loading[model] -= 1
            if not self._loading[model]:
                del self._loading[model]

    def take_slot(self, ticket: Ticket) -> bool:
        """Takes a slot if one is free; the ticket returns it when it leaves."""
        # If its key has room, none of its requests is waiting: returned slots go to the queue first.
        if not self._slots.has_room(ticket.record.key):
            return False
        self._slots.take(ticket.record.key, ticket.num_slots)
        ticket.holds_slot = True
        self._waits.append(0.0)
        return True

    async def wait_for_slot(self, ticket: Ticket, rank: tuple[int, int], tokens: int, *, is_new: bool) -> None:
        """Waits for a slot."""
        if self.take_slot(ticket):
            return
        key = ticket.record.key
        if is_new and not self._tokens.has_room(key, tokens):
            raise self._full(self._tokens, key, "prompt tokens", "waiting")
        since = self._time()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (*rank, next(self._order), place, ticket)
        heappush(self._lines.setdefault(key, []), entry)
        self.num_waiting += 1
        self._tokens.take(key, tokens)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave_queue(entry)
            else:
                # The slot was granted at the very moment of cancellation.
                self.give_back_slot(ticket)
            raise
        finally:
            self.num_waiting -= 1
            self._tokens.give_back(key, tokens)
            self._waits.append(self._time() - since)

    def give_back_slot(self, ticket: Ticket) -> None:
        ticket.holds_slot = False
        self._slots.give_back(ticket.record.key, ticket.num_slots)
        self._serve_queues()

    def _has_operators_place(self, record: RequestRecord) -> bool:
        """Whether this admin key still has one of its reserved places."""
        return record.is_operator and self._places.used_by(record.key) < _OPERATORS_PLACES

    def _full(self, shares: Shares, key: str, what: str, how: str) -> QueueFull:
        """With several keys, mentions only the key's own requests."""
        amount = f"{shares.used_by(key)} {what} of this key" if self._many_keys else f"{shares.used} {what}"
        return QueueFull(f"{amount} are already {how}. Try again later.", retry_after=self.retry_after())

    def _leave(self, ticket: Ticket) -> None:
        self.num_inside -= 1
        self._places.give_back(ticket.record.key)
        ticket.settle()
        if ticket.record.model is not None and ticket.record.admitted_at is not None:
            self.used[ticket.record.model].add(ticket.record)
        if ticket.holds_slot:
            self.give_back_slot(ticket)
        if not self.num_inside:
            self.clock.rest()
            self._empty.set()

    def _serve_queues(self) -> None:
        """Gives free slots to the next requests, key by key, while any fits."""
        while lines := [line for key, line in self._lines.items() if self._slots.has_room(key)]:
            entry = min(line[0] for line in lines)
            *_, place, ticket = entry
            self._leave_queue(entry)
            # A request that is being cancelled has already cancelled its place.
            if not place.done():
                self._slots.take(ticket.record.key, ticket.num_slots)
                ticket.holds_slot = True
                place.set_result(None)

    def _leave_queue(self, entry: "_Waiting") -> None:
        key = entry[-1].record.key
        line = self._lines.get(key, [])
        if line and line[0] is entry:
            heappop(line)
        elif entry in line:
            line.remove(entry)
            heapify(line)
        if not line:
            self._lines.pop(key, None)


_Waiting = tuple[int, int, int, asyncio.Future[None], Ticket]
"""Priority, turn, order of arrival; then the future that is set when the slot comes, and its ticket."""
