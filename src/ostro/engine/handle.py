"""The API process's side of an engine: starts its process, submits requests, hands out their progress, and starts it
again after a crash or a hang. Knows token ids and states; knows no text, no HTTP, no tensors.

    starting ──> loading ──> ready ──> stopped
                    │  ▲       │
                    ▼  └───────┴── died: every stream ends with Unavailable, a new process after a pause
                  failed            the model cannot be loaded: asking again will not help
"""

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from enum import StrEnum

from ostro import errors
from ostro.config import EngineConfig
from ostro.engine.messages import (
    LENGTH,
    Abort,
    Boot,
    FromEngine,
    LoadFailed,
    ModelInfo,
    Pulse,
    Ready,
    Refused,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    body_length,
    decode_from_engine,
    frame,
)
from ostro.engine.request import Request
from ostro.engine.scheduler import Progress
from ostro.errors import BadRequest, ModelError, OstroError, Unavailable

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_WATCH_SECONDS = 0.5


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class Stream:
    """One request's progress. What its reader has not taken yet is merged, so a slow reader costs bounded memory."""

    def __init__(self, handle: "EngineHandle", request: Request) -> None:
        self._handle = handle
        self._pending: dict[int, Progress] = {}
        self._arrived = asyncio.Event()
        self._unfinished = set(range(request.params.n))
        self._error: OstroError | None = None
        self.request = request

    async def __aiter__(self) -> AsyncIterator[list[Progress]]:
        """All that has arrived since the last look, at most one entry a choice, until every choice has finished."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            pending, self._pending = self._pending, {}
            if pending:
                yield list(pending.values())
            if self._error is not None:
                raise self._error
            if not self._unfinished and not self._pending:
                return

    def finish_choice(self, choice: int) -> None:
        """Ends one choice early, as a stop string does: the engine stops generating it."""
        if choice in self._unfinished:
            self._unfinished.discard(choice)
            self._handle.abort(self.request.id, choice)
            self._arrived.set()

    def close(self) -> None:
        """Ends the request, wherever it is. Harmless when it has finished."""
        if self._unfinished:
            self._unfinished.clear()
            self._handle.abort(self.request.id)
        self._handle.forget(self)

    def put(self, progress: Progress) -> None:
        if progress.choice not in self._unfinished:
            return
        if progress.finish_reason is not None:
            self._unfinished.discard(progress.choice)
        earlier = self._pending.setdefault(progress.choice, progress)
        if earlier is not progress:
            earlier.merge(progress)
        self._arrived.set()

    def fail(self, error: OstroError) -> None:
        self._error = error
        self._unfinished.clear()
        self._arrived.set()


class EngineHandle:
    """One engine process and its successors. Use within one event loop."""

    def __init__(self, config: EngineConfig, *, stall_seconds: float = 60.0, stop_seconds: float = 5.0) -> None:
        self.config = config
        self.stall_seconds = stall_seconds
        self.stop_seconds = stop_seconds
        self.state = State.LOADING
        self.info: ModelInfo | None = None
        self.failure: OstroError | None = None
        self.pulse = Pulse()
        self.restarts = 0
        self._streams: dict[int, Stream] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._last_progress = time.monotonic()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def start(self) -> None:
        """Begins to load; returns at once. `settled` waits for the outcome."""
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def settled(self) -> None:
        """Waits until the engine is ready; raises what kept it from getting there."""
        await self._settled.wait()
        if self.state is not State.READY:
            raise self.failure or Unavailable("The engine was stopped.")

    def submit(self, request: Request) -> Stream:
        """Raises Unavailable unless the engine is ready. The stream must be closed, finished or not."""
        if self.state is not State.READY:
            raise self.failure or Unavailable("The model is loading. Try again in a moment.", retry_after=2)
        if not self._streams:
            self._last_progress = time.monotonic()
        stream = self._streams[request.id] = Stream(self, request)
        self._send(Submit(request))
        return stream

    def abort(self, request_id: int, choice: int | None = None) -> None:
        if self.state is State.READY:
            self._send(Abort(request_id, choice))

    def forget(self, stream: Stream) -> None:
        if self._streams.get(stream.request.id) is stream:
            del self._streams[stream.request.id]

    async def stop(self) -> None:
        """Ends the process, in order if it answers in time. Streams still open end with Unavailable."""
        was_ready = self.state is State.READY
        self.state = State.STOPPED
        if was_ready:
            self._send(Stop())
        if self._process is not None and self._process.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self.stop_seconds if was_ready else 0.1)
            self._kill()
        if self._supervisor is not None:
            await self._supervisor
        self._settled.set()

    async def _supervise(self) -> None:
        """Runs one process after another until one must not be followed by another."""
        pause = _FIRST_PAUSE
        while not self._ended():
            started = time.monotonic()
            await self._run_process()
            self._fail_streams(Unavailable("The engine stopped while it was at work. It starts anew: try again."))
            if self._ended():
                break
            self.state = State.LOADING
            self.restarts += 1
            # One that ran for long before it died is started again without delay.
            pause = _FIRST_PAUSE if time.monotonic() - started > _LONGEST_PAUSE else min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    def _ended(self) -> bool:
        return self.state in (State.FAILED, State.STOPPED)

    async def _run_process(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "ostro.engine.process", str(theirs.fileno()), pass_fds=[theirs.fileno()]
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        watch = asyncio.create_task(self._watch(), name="engine watch")
        try:
            self._send(Boot(self.config))
            while (message := await _read(reader)) is not None:
                self._take(message)
        finally:
            watch.cancel()
            self._writer.close()
            self._kill()
            await self._process.wait()

    def _take(self, message: FromEngine) -> None:
        match message:
            case Stepped(progress=progress):
                self._last_progress = time.monotonic()
                for each in progress:
                    if (stream := self._streams.get(each.request_id)) is not None:
                        stream.put(each)
            case Pulse():
                if message.steps != self.pulse.steps:
                    self._last_progress = time.monotonic()
                self.pulse = message
            case Refused(request_id=request_id, message=text, param=param):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.fail(BadRequest(text, param=param))
            case Ready(info=info):
                self.info = info
                self.state = State.READY
                self._settled.set()
            case LoadFailed(error=name, message=text):
                kind = getattr(errors, name, ModelError)
                self.failure = kind(text)
                self.state = State.FAILED
                self._settled.set()

    async def _watch(self) -> None:
        """Kills a process that has work and gets nothing done. A long load or an idle engine is not stalled."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            busy = self.state is State.READY and self._streams
            if busy and time.monotonic() - self._last_progress > self.stall_seconds:
                self._kill()

    def _fail_streams(self, error: OstroError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


async def _read(reader: asyncio.StreamReader) -> FromEngine | None:
    """The next message; None once the engine is gone."""
    try:
        header = await reader.readexactly(LENGTH.size)
        return decode_from_engine(await reader.readexactly(body_length(header)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
