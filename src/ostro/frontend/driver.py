"""Runs requests on an engine in this process, for callers that iterate and for callers that await.

    generate, stream    ──> drive   ──> the caller's own thread steps the engine
    agenerate, astream  ──> adrive  ──> a worker thread steps it, for as long as anybody awaits

One thread steps at a time, and its step serves all callers; each has an inbox. Requests that arrive or leave during a
step are processed at its end, so submitting or aborting never waits for a step. Knows requests and deltas; knows no
prompts.
"""

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ostro.engine.constraint import Grammars, Prototype
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.scheduler import Progress
from ostro.errors import OstroError, SequenceFailed
from ostro.frontend.outputs import Delta
from ostro.frontend.requests import Collector


class Piece(NamedTuple):
    """One delta of one request."""

    collector: Collector
    delta: Delta
    is_last: bool
    """Whether it finishes the request's completion."""


class _Inbox:
    """Results for one caller's requests. Filled by the stepping thread, emptied by the caller."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is the event loop of a caller that awaits."""
        self.loop = loop
        self.unfinished: set[int] = set()
        """Requests whose last piece the caller has not taken. Used by the caller only."""
        self.failure: BaseException | None = None
        self._pieces: deque[Piece] = deque()
        self._woken = asyncio.Event()

    @property
    def has_news(self) -> bool:
        return bool(self._pieces) or self.failure is not None

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def take(self) -> Piece:
        """The next piece; if there is none, raises what ended the requests. Call only if there is news."""
        if not self._pieces and self.failure is not None:
            raise self.failure
        piece = self._pieces.popleft()
        if piece.is_last:
            self.unfinished.discard(piece.collector.request.id)
        return piece

    async def news(self) -> None:
        """Returns once there is news. Anything that arrives after the check sets the event after it was cleared."""
        while not self.has_news:
            self._woken.clear()
            await self._woken.wait()

    def wake(self) -> None:
        """Call within the event loop."""
        self._woken.set()


class Driver:
    """Any number of threads may `drive` and any number of tasks may `adrive` at a time."""

    def __init__(self, core: EngineCore, collect: Callable[[Request], Collector], grammars: Grammars) -> None:
        self._core = core
        self._collect = collect
        self._grammars = grammars
        self._turn = threading.Condition()
        # The condition guards everything below. While a thread steps, `_under_way` and the engine belong to it.
        self._is_stepping = False
        self._arrivals: deque[tuple[Request, Prototype | None, _Inbox]] = deque()
        self._departures: deque[int] = deque()
        self._under_way: dict[int, tuple[Collector, _Inbox]] = {}
        self._worker: threading.Thread | None = None

    def drive(self, requests: Iterable[Request]) -> Generator[Piece, None, None]:
        """Steps the engine until the requests are done. If the caller leaves early, unfinished requests are aborted."""
        inbox = _Inbox()
        try:
            for request in requests:
                self._submit([(request, self._compiled(request))], inbox)
            while inbox.unfinished:
                if not inbox.has_news:
                    self._advance(inbox)
                if inbox.has_news:
                    yield inbox.take()
        finally:
            self._leave(inbox)

    async def adrive(self, requests: Sequence[Request]) -> AsyncGenerator[Piece, None]:
        """The same for a caller that awaits; the event loop keeps running while the worker thread steps."""
        inbox = _Inbox(asyncio.get_running_loop())
        try:
            if all(request.constraint is None for request in requests):
                prototypes: list[Prototype | None] = [None] * len(requests)
            else:
                prototypes = await asyncio.to_thread(lambda: [self._compiled(request) for request in requests])
            self._submit(list(zip(requests, prototypes, strict=True)), inbox)
            while inbox.unfinished:
                await inbox.news()
                yield inbox.take()
        finally:
            self._leave(inbox)

    # --- callers ----------------------------------------------------------------------------------------------------

    def _compiled(self, request: Request) -> Prototype | None:
        """The request's constraint, compiled in the caller's thread: nobody else's steps wait for it."""
        return None if request.constraint is None else self._grammars.prepare(request.constraint)

    def _submit(self, requests: Sequence[tuple[Request, Prototype | None]], inbox: _Inbox) -> None:
        with self._turn:
            for request, prototype in requests:
                inbox.unfinished.add(request.id)
                self._arrivals.append((request, prototype, inbox))
            if not self._is_stepping:
                self._take_mail()
            if inbox.loop is not None and self._worker is None:
                # Not a daemon: a program must not exit in the middle of a step.
                self._worker = threading.Thread(target=self._work, name="ostro-engine")
                self._worker.start()

    def _leave(self, inbox: _Inbox) -> None:
        """Aborts the caller's unfinished requests; their pages are freed by the end of the current step."""
        with self._turn:
            self._departures.extend(inbox.unfinished)
            if not self._is_stepping:
                self._take_mail()

    def _advance(self, inbox: _Inbox) -> None:
        """Steps once; if another thread is stepping, waits until there is news for this caller or it stops stepping."""
        with self._turn:
            while self._is_stepping:
                self._turn.wait()
                if inbox.has_news:
                    return
            self._is_stepping = True
        self._step()

    # --- the stepping thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """The worker thread: steps while callers that await have requests."""
        while True:
            with self._turn:
                while self._is_stepping:
                    self._turn.wait()
                if not any(inbox.loop is not None for _, inbox in self._under_way.values()):
                    self._worker = None
                    return
                self._is_stepping = True
            # Every caller finds the failure in its inbox.
            with suppress(Exception):
                self._step()

    def _step(self) -> None:
        """Called by the thread whose turn it is; ends the turn."""
        try:
            self._deliver(self._core.step())
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            with self._turn:
                self._take_mail()
                self._is_stepping = False
                self._turn.notify_all()

    def _deliver(self, steps: Iterable[Progress]) -> None:
        served = set[_Inbox]()
        for step in steps:
            collector, inbox = self._under_way[step.request_id]
            delta = collector.take(step)
            if delta.finish_reason and step.finish_reason is None:
                self._core.abort(step.request_id, step.choice)
            is_last = collector.completion.finished
            if is_last:
                del self._under_way[step.request_id]
            inbox.put(Piece(collector, delta, is_last))
            served.add(inbox)
        self._wake(served)

    def _take_mail(self) -> None:
        """Arrivals before departures: a request may have done both."""
        refused = set[_Inbox]()
        while self._arrivals:
            request, prototype, inbox = self._arrivals.popleft()
            try:
                self._core.add(request, prototype)
            except OstroError as error:
                inbox.failure = error
                refused.add(inbox)
            else:
                self._under_way[request.id] = self._collect(request), inbox
        while self._departures:
            id = self._departures.popleft()
            self._core.abort(id)
            self._under_way.pop(id, None)
        self._wake(refused)

    def _fail_all(self, error: BaseException) -> None:
        """A failed step loses the state of all requests."""
        if not isinstance(error, Exception):
            # Another caller's Ctrl-C.
            error = SequenceFailed("Another caller was interrupted during a step they shared. Send the request again.")
        failed = set[_Inbox]()
        for id, (_, inbox) in self._under_way.items():
            self._core.abort(id)
            inbox.failure = error
            failed.add(inbox)
        self._under_way.clear()
        self._wake(failed)

    def _wake(self, inboxes: Collection[_Inbox]) -> None:
        """Notifies callers that await. Once per event loop, because each notification is a system call."""
        by_loop = defaultdict[asyncio.AbstractEventLoop, list[_Inbox]](list)
        for inbox in inboxes:
            if inbox.loop is not None:
                by_loop[inbox.loop].append(inbox)
        for loop, woken in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, woken)
            except RuntimeError:
                # The loop was closed with its callers in it, so nobody will ever read their results.
                self._departures.extend(id for id, (_, inbox) in self._under_way.items() if inbox.loop is loop)


def _wake_all(inboxes: Iterable[_Inbox]) -> None:
    for inbox in inboxes:
        inbox.wake()
