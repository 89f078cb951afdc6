"""Replicas behind a router, event by event, on one virtual clock. Knows no files and no reports.

    client ──choose──> replica's inbox ──step──> tokens ──> client
           request costs                step costs

An event is a time and what happens then. Replicas step independently: each one's next event is the end of its step,
when it takes what reached it meanwhile. Events at the same time run in the order in which they were planned, so the
same load gives the same run.
"""

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count

from ostro.engine.core import EngineCore
from ostro.engine.counters import Counters
from ostro.engine.request import Request
from ostro.engine.runner import RunnerSpec
from ostro.engine.scheduler import Progress
from ostro.engine.tiers import Tiers
from ostro.errors import BadRequest
from ostro.measure.bench.outcomes import Outcome
from ostro.sampling_params import SamplingParams
from ostro.simulation.clock_device import ClockRunner, ClockStore
from ostro.simulation.costs import CostTable, EndpointCosts, TierPages, Work, step_seconds
from ostro.simulation.prompts import Prompt
from ostro.simulation.routing import Routing, chooser

# Root of the digests of all pages on disk: there is one model.
_ROOT = b"model"


class Replica:
    def __init__(
        self,
        spec: RunnerSpec,
        seconds: Callable[[Work], float],
        *,
        contention: float = 0.0,
        prefix_caching: bool = True,
        tiers: TierPages | None = None,
    ) -> None:
        self.runner = ClockRunner(spec, seconds, contention)
        self.core = EngineCore(
            self.runner,
            prefix_caching=prefix_caching,
            tiers=None if tiers is None else _tiers(self.runner, tiers),
            clock=lambda: self.runner.now,
        )
        self._inbox: deque[Request] = deque()
        self.is_stepping = False
        """Whether an event for its next step is planned."""
        self.most_pages = 0
        """Most pages in use at a time."""
        self.work_seconds = 0.0
        """Time during which the engine had work."""
        self.page_seconds = 0.0
        """Pages in use, integrated over that time."""

    def submit(self, request: Request, answer: tuple[int, ...] = ()) -> None:
        """`answer` holds the tokens to generate, as far as they matter."""
        self._inbox.append(request)
        if answer:
            self.runner.answers[request.id] = answer

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or self.core.has_work

    def step(self, now: float) -> tuple[list[Progress], dict[int, str]]:
        """Takes what has arrived and steps the engine, as an engine process does. Returns the step's progress, known at
        `runner.now`, and the refusals, known at `now`.
        """
        self.runner.now = now
        refused: dict[int, str] = {}
        while self._inbox:
            request = self._inbox.popleft()
            try:
                self.core.add(request)
            except BadRequest as error:
                refused[request.id] = error.message
                self.runner.answers.pop(request.id, None)
        in_use = 0

        def look() -> None:
            # Called once the step is scheduled: its pages are allocated, and none is released yet.
            nonlocal in_use
            kv = self.core.scheduler.kv
            in_use = kv.num_pages - kv.available

        progress = self.core.step(look)
        for gain in progress:
            if gain.finish_reason is not None:
                self.runner.answers.pop(gain.request_id, None)
        self.most_pages = max(self.most_pages, in_use)
        self.work_seconds += self.runner.now - now
        self.page_seconds += in_use * (self.runner.now - now)
        return progress, refused


def _tiers(runner: ClockRunner, pages: TierPages) -> Tiers:
    store = ClockStore(runner, pages.copies, num_slots=pages.host, disk_pages=pages.disk)
    return Tiers(store, root=lambda salt: _ROOT if pages.disk else None)


REFUSED = "HTTP 400"


class SimulatedRequest:
    """A request in progress, as its client sees it."""

    __slots__ = ("arrivals", "cached", "index", "input_tokens", "max_tokens", "replica", "sent", "whole")

    def __init__(
        self,
        index: int,
        sent: float,
        replica: int,
        input_tokens: int,
        max_tokens: int,
        whole: Callable[[Outcome], None],
    ) -> None:
        self.index = index
        self.sent = sent
        self.replica = replica
        self.input_tokens = input_tokens
        self.max_tokens = max_tokens
        self.cached = 0
        self.arrivals: list[float] = []
        self.whole = whole


class Fleet:
    def __init__(
        self,
        table: CostTable,
        costs: EndpointCosts,
        *,
        replicas: int,
        routing: Routing = "prefix",
        prefix_caching: bool = True,
        tiers: TierPages | None = None,
    ) -> None:
        self.now = 0.0
        self._costs = costs
        self._router = chooser(routing, replicas, lambda: self.now)
        self._spec = table.engine.spec()
        self._seconds, self._contention = step_seconds(table), table.contention
        self._prefix_caching, self._tiers = prefix_caching, tiers
        # Made when their first request arrives: of 10,000 replicas, most may never get one.
        self._replicas: list[Replica | None] = [None] * replicas
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ids = count(1)
        self._calls: dict[int, SimulatedRequest] = {}

    @property
    def num_pages(self) -> int:
        """Pages in each replica's KV cache."""
        return self._spec.num_pages

    @property
    def replicas(self) -> Iterator[Replica]:
        """The replicas that have had a request."""
        return (each for each in self._replicas if each is not None)

    @property
    def counters(self) -> Counters:
        return sum((each.core.scheduler.counters for each in self.replicas), Counters())

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Plans an event; one in the past happens next."""
        heappush(self._events, (max(time, self.now), next(self._order), event))

    def run(self) -> None:
        """Runs events until none is planned."""
        while self._events:
            self.now, _, event = heappop(self._events)
            event()

    def send(self, index: int, prompt: Prompt, max_tokens: int, whole: Callable[[Outcome], None]) -> None:
        """Sends a client's request now. `whole` is called with its outcome when its answer has ended; the outcome's
        `start` is on the fleet's clock.
        """
        number = self._router.choose(prompt)
        request_id = next(self._ids)
        self._calls[request_id] = SimulatedRequest(index, self.now, number, len(prompt.token_ids), max_tokens, whole)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(id=request_id, prompt_ids=prompt.token_ids, params=params, seed=request_id)
        replica = self._replicas[number]
        if replica is None:
            replica = Replica(
                self._spec,
                self._seconds,
                contention=self._contention,
                prefix_caching=self._prefix_caching,
                tiers=self._tiers,
            )
            self._replicas[number] = replica
        # The API process takes one request after the other: the engine begins with the first of a burst.
        overhead = self._costs.request + self._costs.prompt_token * len(prompt.token_ids)
        runner = replica.runner
        runner.api_free_at = max(self.now, runner.api_free_at) + overhead
        self.at(runner.api_free_at, lambda: self._arrive(replica, request, prompt.answer))

    def _arrive(self, replica: Replica, request: Request, answer: tuple[int, ...]) -> None:
        replica.submit(request, answer)
        if not replica.is_stepping:
            replica.is_stepping = True
            self.at(self.now, lambda: self._step(replica))

    def _step(self, replica: Replica) -> None:
        replica.is_stepping = replica.has_work
        if not replica.is_stepping:
            return
        progress, refused = replica.step(self.now)
        ends = replica.runner.now
        for gain in progress:
            self._take(gain, ends)
        for request_id, reason in refused.items():
            self._end(request_id, self.now, REFUSED, reason)
        # Planned even if nothing is left to do: the replica is not idle before the step has ended on the clock.
        self.at(ends, lambda: self._step(replica))

    def _take(self, gain: Progress, when: float) -> None:
        call = self._calls[gain.request_id]
        call.arrivals += [when] * len(gain.token_ids)
        call.cached = gain.num_cached
        if gain.finish_reason is not None:
            self._end(gain.request_id, when)

    def _end(self, request_id: int, when: float, error: str | None = None, detail: str = "") -> None:
        call = self._calls.pop(request_id)

        def tell() -> None:
            self._router.ended(call.replica)
            call.whole(_outcome(call, when, error, detail))

        # Not earlier on the clock: a client that waits for the answer sends its next request then.
        self.at(when, tell)


def _outcome(call: SimulatedRequest, ended: float, error: str | None, detail: str) -> Outcome:
    return Outcome(
        index=call.index,
        start=call.sent,
        e2e=ended - call.sent,
        arrivals=[each - call.sent for each in call.arrivals],
        input_tokens=call.input_tokens,
        cached_tokens=call.cached,
        output_tokens=len(call.arrivals),
        max_tokens=call.max_tokens,
        finish_reason=None if error else "length",
        error=error,
        detail=detail,
    )
