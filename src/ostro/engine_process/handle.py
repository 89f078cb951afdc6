"""The API process's side of an engine: starts its process, submits requests, hands out their progress, and restarts
the process after a crash or a hang. Knows token ids and states; knows no text, no HTTP, no tensors.

    loading ──────> ready ──────> stopped
     │    ▲           │
     │    └───────────┴── died or stuck: every stream ends with Unavailable; a new process after a pause
     └──> failed          the model cannot be loaded: a restart would not help

An engine that follows another host's stays "loading": it takes no requests. It ends and restarts whenever that one
does.
"""

import asyncio
import logging
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from enum import StrEnum
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

from ostro.config import EngineConfig
from ostro.engine.counters import EngineCounters
from ostro.engine.request import Request
from ostro.engine.scheduler import Progress
from ostro.engine_process.messages import (
    LENGTH,
    Abort,
    AllOffered,
    Boot,
    EndProfile,
    FindPrefix,
    Following,
    FromEngine,
    Heartbeat,
    LoadFailed,
    Loading,
    Located,
    ModelInfo,
    OfferAll,
    Offered,
    PrefixFound,
    Profiled,
    Ready,
    Refused,
    StartProfile,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    body_length,
    decode_from_engine,
    frame,
)
from ostro.engine_process.suspects import Suspects
from ostro.errors import BadRequest, ModelError, OstroError, ProfileFailed, TryLater, Unavailable, from_process
from ostro.processes.environment import download_environment, engine_environment
from ostro.processes.log_relay import Logged
from ostro.processes.spawn import kill_group, spawn

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_MOST_DEATHS_LOADING = 3
_WATCH_SECONDS = 0.5
_EXIT_SECONDS = 1.0
# A process that hangs in the kernel, such as on a dead file system, survives SIGKILL.
_UNKILLABLE_SECONDS = 10.0
# Less CPU time than this since the last count does not count as progress.
_LEAST_WORK_SECONDS = 0.01

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

Sleep = Callable[[float], Coroutine[Any, Any, None]]
"""Waits for a number of seconds: `asyncio.sleep`, or a test's own clock."""


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


_ENDED = (State.FAILED, State.STOPPED)


class Stream:
    """One request's progress. Unread progress is merged, so a slow reader costs bounded memory."""

    def __init__(self, handle: "EngineHandle", request: Request) -> None:
        self._handle = handle
        self._pending: dict[int, Progress] = {}
        # Created when the reader starts to wait: cheaper per token than an asyncio.Event.
        self._waiter: asyncio.Future[None] | None = None
        self._unfinished = set(range(request.params.n))
        self._error: OstroError | None = None
        self.request = request
        self.offered: asyncio.Future[int] | None = None
        """For a request that `shares_prompt`: how many tokens of it other engines find, known after it has ended."""
        if request.shares_prompt:
            self.offered = asyncio.get_running_loop().create_future()
        self.began: float | None = None
        """When the request's first step began, by `time.monotonic`."""
        self.preemptions = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Progress]:
        """All that has arrived since the last call, at most one entry per choice, until every choice has finished."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pending, self._pending = self._pending, {}
        return list(pending.values())

    def finish_choice(self, choice: int) -> None:
        """Ends one choice early, for instance at a stop string: the engine stops generating it."""
        if choice in self._unfinished:
            self._pending.pop(choice, None)
            self._handle.abort(self.request.id, choice)
            self._end_choice(choice)

    def close(self) -> None:
        """Ends the request, waiting or running. Does nothing if it has finished."""
        if self._unfinished:
            self._handle.abort(self.request.id)
            self._unfinished.clear()
            self._handle.forget(self)
        self._wake()

    def put(self, progress: Progress) -> None:
        if progress.choice not in self._unfinished:
            return
        earlier = self._pending.setdefault(progress.choice, progress)
        if earlier is not progress:
            earlier.merge(progress)
        if progress.finish_reason is not None:
            self._end_choice(progress.choice)
        self._wake()

    def fail(self, error: OstroError) -> None:
        """The reader gets what has arrived, then the error."""
        self._error = error
        self._unfinished.clear()
        self._handle.forget(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end_choice(self, choice: int) -> None:
        self._unfinished.discard(choice)
        if not self._unfinished:
            # The reader may take a while to read the rest, but the engine is done with the request.
            self._handle.forget(self)
            self._handle.suspects.clear(self.request)
            self._wake()


class EngineHandle:
    """One engine process and its successors. Use within one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        path: str | None = None,
        name: str | None = None,
        stall_seconds: float = 60.0,
        load_stall_seconds: float = 600.0,
        stop_seconds: float = 5.0,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`path` is where the model's files are, if known, and `name` is the model's name at their source.
        `stall_seconds` and `load_stall_seconds` limit the time without progress while serving and while loading.
        `sleep` paces the watch for progress and the restarts.
        """
        self.config = config
        self._boot = Boot(config, path, name)
        self.stall_seconds = stall_seconds
        self.load_stall_seconds = load_stall_seconds
        self.suspects = Suspects()
        self.stop_seconds = stop_seconds
        self._sleep = sleep
        self.state = State.LOADING
        self.info: ModelInfo | None = None
        self.failure: OstroError | None = None
        self.heartbeat = Heartbeat()
        self.counters = EngineCounters()
        # Requests that the engine is working on, and suspects that are held back.
        self._streams: dict[int, Stream] = {}
        # The one suspect that the engine may run, and the messages of those that wait for it to finish.
        self._suspect: int | None = None
        self._held_back: dict[int, bytes] = {}
        # Questions about prefixes that the engine has not answered, by their number.
        self._asked: dict[int, asyncio.Future[int]] = {}
        self._num_asked = 0
        # The outcomes of sharing prompts when their requests end, kept as long as anybody has their streams; and the
        # callers that wait until everything is shared.
        self._offers: WeakValueDictionary[int, asyncio.Future[int]] = WeakValueDictionary()
        self._all_offered: asyncio.Future[None] | None = None
        # The profile under way, by its path.
        self._profiles: dict[str, asyncio.Future[Profiled]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._location: Located | None = None
        self._located = asyncio.Event()
        self._ending = asyncio.Event()
        self._idle_seconds = 0.0
        self._loading_work = 0.0
        self._stuck = False
        # Whether the process follows another host's engine, and whether the model was ever loaded.
        self._follows = self._has_loaded = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def restarts(self) -> int:
        return self.counters.restarts

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def start(self) -> None:
        """Starts loading; returns at once. `settled` waits for the outcome."""
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def located(self) -> Located:
        """Waits until the model's files are on this machine; raises the error if they cannot be had."""
        await self._located.wait()
        if self._location is None:
            raise self.unavailable()
        return self._location

    async def settled(self) -> None:
        """Waits until the engine is ready; raises the error if it failed or was stopped."""
        while self.state is not State.READY:
            await self._settled.wait()
            if self.state in _ENDED:
                raise self.unavailable()

    def unavailable(self) -> OstroError:
        """Why an engine that is not ready takes no requests now."""
        if self.failure is not None:
            # The same error is raised many times: it must not accumulate tracebacks.
            return self.failure.with_traceback(None)
        if self.state is State.STOPPED:
            return Unavailable("The engine was stopped.")
        if self.info is not None:
            return Unavailable("The engine is restarting after a failure. Try again in a moment.", retry_after=2)
        return Unavailable("The model is loading. Try again in a moment.", retry_after=2)

    @property
    def refusal(self) -> Unavailable | None:
        """Why there is no point in waiting for the engine to be ready; None if there is."""
        if self._follows and self.state is State.LOADING:
            return Unavailable("This host only helps another one, which takes the requests. Send them to that host.")
        return None

    def submit(self, request: Request) -> Stream:
        """Raises Unavailable unless the engine is ready. The caller must close the stream, finished or not."""
        if self.state is not State.READY:
            raise self.unavailable()
        is_suspect = self.suspects.check(request)
        message = _submission(request)
        assert request.id not in self._streams, f"request {request.id} was submitted twice"
        if not self._streams:
            self._idle_seconds = 0.0
        stream = self._streams[request.id] = Stream(self, request)
        if stream.offered is not None:
            self._offers[request.id] = stream.offered
        if is_suspect:
            self._held_back[request.id] = message
            self._send_suspect()
        else:
            self._write(message)
        return stream

    def abort(self, request_id: int, choice: int | None = None) -> None:
        if self.state is State.READY:
            self._send(Abort(request_id, choice))

    async def find_prefix(self, prompt_ids: tuple[int, ...], adapter: str | None = None, *, look: bool = False) -> int:
        """How many tokens of a prompt without a cache salt need not be computed; `look` first finds out what other
        engines have shared. Raises Unavailable unless the engine is ready and stays so.
        """
        if self.state is not State.READY:
            raise self.unavailable()
        self._num_asked += 1
        question = FindPrefix(self._num_asked, prompt_ids, adapter, look)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked[question.id] = answer
        self._send(question)
        try:
            return await answer
        finally:
            del self._asked[question.id]

    async def offer_all(self) -> None:
        """Shares all prefixes with other engines while the engine goes on serving. Returns when there is no more to
        share, or no engine.
        """
        if self.state is State.READY and self.config.kv_shared is not None:
            if self._all_offered is None:
                self._all_offered = asyncio.get_running_loop().create_future()
                self._send(OfferAll())
            await asyncio.wait([self._all_offered])

    async def profile(self, path: str, *, seconds: float, max_steps: int) -> Profiled:
        """Profiles the engine into a new file, for `seconds` or `max_steps`, whichever ends first.

        Raises Unavailable unless the engine is ready and stays so, TryLater during another profile, and ProfileFailed
        if the file cannot be written.
        """
        if self.state is not State.READY:
            raise self.unavailable()
        if self._profiles:
            raise TryLater("The model is already being profiled. Try again once that profile has ended.", retry_after=5)
        ended: asyncio.Future[Profiled] = asyncio.get_running_loop().create_future()
        self._profiles[path] = ended
        self._send(StartProfile(path, max_steps))
        try:
            await asyncio.wait([ended], timeout=seconds)
        finally:
            # Also if the caller leaves early.
            if not ended.done():
                self._send(EndProfile())
        await asyncio.wait([ended])
        if (error := ended.result().error) is not None:
            raise ProfileFailed(error)
        return ended.result()

    def forget(self, stream: Stream) -> None:
        if self._streams.get(stream.request.id) is stream:
            del self._streams[stream.request.id]
            self._held_back.pop(stream.request.id, None)
            if self._suspect == stream.request.id:
                self._suspect = None
                self._send_suspect()

    def _send_suspect(self) -> None:
        """Submits the next request that may have crashed an engine, unless another such request is running."""
        if self._suspect is None and self._held_back:
            self._suspect = next(iter(self._held_back))
            self._write(self._held_back.pop(self._suspect))

    async def stop(self) -> None:
        """Shuts the process down, gracefully if it answers in time. Streams still open end with Unavailable."""
        await self._end(State.STOPPED)

    async def fail(self, error: OstroError) -> None:
        """Ends the process for good, because the API process cannot serve this model."""
        if self.state not in _ENDED:
            self.failure = _load_error(type(error).__name__, error.message)
            await self._end(State.FAILED)

    async def _end(self, state: State) -> None:
        in_order = self.state is State.READY
        self._enter(state)
        self._fail_streams("The engine was stopped.")
        if self._supervisor is None:
            return
        self._ending.set()
        try:
            if in_order:
                self._send(Stop())
                await asyncio.wait([self._supervisor], timeout=self.stop_seconds)
        finally:
            self._kill()
        await asyncio.wait([self._supervisor])

    def _enter(self, state: State) -> None:
        self.state = state
        if state is State.LOADING:
            self._settled.clear()
        else:
            self._settled.set()
            self._located.set()

    async def _supervise(self) -> None:
        try:
            await self._keep_running()
        finally:
            if self.state not in _ENDED:
                # A bug of ours; the task holds its traceback. But nobody may wait for an engine that never comes.
                self.failure = ModelError("The engine can no longer be started. Restart the server.")
                self._enter(State.FAILED)

    async def _keep_running(self) -> None:
        """Runs one process after another until the engine is stopped or has failed for good."""
        pause, deaths_loading = _FIRST_PAUSE, 0
        while self.state not in _ENDED:
            began = time.monotonic()
            loaded = await self._run_process()
            if self.state in _ENDED:
                return
            deaths_loading = 0 if loaded else deaths_loading + 1
            # A model that has loaded before can load again: whatever prevents it now may pass.
            if not self._has_loaded and deaths_loading == _MOST_DEATHS_LOADING:
                self.failure = ModelError(
                    f"The engine died {deaths_loading} times while it loaded the model (exit status "
                    f"{self._status()}). See its messages; -9 often means that memory ran out."
                )
                self._enter(State.FAILED)
                return
            if loaded and (self._follows or time.monotonic() - began > _LONGEST_PAUSE):
                # An engine that followed another has to meet it again when that one restarts.
                pause = _FIRST_PAUSE
            _log.warning("The engine ended with status %s; a new one starts in %.1f s.", self._status(), pause)
            await self._pause(pause)
            if self._ending.is_set():
                return
            pause = min(2 * pause, _LONGEST_PAUSE)
            self.counters.restarts += 1

    async def _pause(self, seconds: float) -> None:
        """Waits until the next process may start, or the engine is stopped."""
        waits = [asyncio.ensure_future(self._sleep(seconds)), asyncio.ensure_future(self._ending.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _status(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def _run_process(self) -> bool:
        """Runs one process from start to end. Returns whether it loaded the model."""
        try:
            # Without a known path, the process may have to download the model's files.
            environment = engine_environment() if self._boot.path is not None else download_environment()
            process, sock = spawn("ostro.engine_process.process", environment=environment)
        except OSError as error:
            _log.warning("The engine's process could not be started (%s).", error)
            return False
        self._process, self._stuck, self._follows = process, False, False
        self._idle_seconds = self._loading_work = 0.0
        try:
            reader, self._writer = await asyncio.open_connection(sock=sock)
            self._send(self._boot)
            await self._converse(reader)
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            loaded = self.state is State.READY or self._follows
            self._hang_up(sock)
            self._lose_process()
            await self._reap(process)
        return loaded

    async def _converse(self, reader: asyncio.StreamReader) -> None:
        """Handles the engine's messages until it is gone."""
        watch = asyncio.create_task(self._watch(), name="engine watch")
        try:
            while (message := await _read(reader)) is not None:
                self._take(message)
        finally:
            watch.cancel()

    def _hang_up(self, sock: socket.socket) -> None:
        if self._writer is None:
            sock.close()
        else:
            self._writer.close()
            self._writer = None

    def _lose_process(self) -> None:
        """Fails all streams and resets the state: no more messages will come from this process."""
        if self.state not in _ENDED:
            self._enter(State.LOADING)
            self._blame_streams()
        how = f"made no progress for {self._stall_limit:g} s" if self._stuck else "stopped while it was at work"
        self.heartbeat = Heartbeat()
        self.counters.end_process()
        self._fail_streams(f"The engine {how}. A new one starts: try again.")

    def _blame_streams(self) -> None:
        """Makes suspects of the requests that the dead process was running; if none had started, of all sent to it."""
        sent = [stream for id, stream in self._streams.items() if id not in self._held_back]
        begun = [stream for stream in sent if stream.began is not None]
        self.suspects.blame(stream.request for stream in begun or sent)

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for a process whose socket is closed to exit; kills it if it does not."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while process.poll() is None:
            if time.monotonic() > deadline:
                self._kill()
            if time.monotonic() > deadline + _UNKILLABLE_SECONDS:
                _log.error(
                    "Process %d cannot be ended: it hangs in the kernel. Check disks and file systems.", process.pid
                )
                return
            await asyncio.sleep(0.01)
        # Kill the children that the engine has left behind.
        kill_group(process)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Stepped(progress=progress):
                self._idle_seconds = 0.0
                self._note_course(message)
                for each in progress:
                    if (stream := self._streams.get(each.request_id)) is not None:
                        stream.put(each)
            case Heartbeat():
                if (message.counters.steps, message.strides) != (self.heartbeat.counters.steps, self.heartbeat.strides):
                    self._idle_seconds = 0.0
                self.heartbeat = message
                self.counters.take(message.counters)
            case Refused(request_id=request_id, message=text, param=param):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.fail(BadRequest(text, param=param))
            case PrefixFound(id=id, num_tokens=num_tokens):
                _settle(self._asked.get(id), num_tokens)
            case Offered(request_id=request_id, num_tokens=num_tokens):
                self._idle_seconds = 0.0
                _settle(self._offers.get(request_id), num_tokens)
            case AllOffered():
                _settle(self._all_offered, None)
                self._all_offered = None
            case Profiled(path=path):
                # Writing it may have taken longer than any step.
                self._idle_seconds = 0.0
                if (profile := self._profiles.pop(path, None)) is not None:
                    profile.set_result(message)
            case Logged():
                message.write()
            case Loading(work_seconds=work):
                if work - self._loading_work >= _LEAST_WORK_SECONDS:
                    self._loading_work, self._idle_seconds = work, 0.0
            case Located():
                self._location = message
                self._located.set()
            case Ready(info=info):
                self.info, self._has_loaded = info, True
                if self.state not in _ENDED:
                    self._enter(State.READY)
            case Following():
                self._follows = self._has_loaded = True
            case LoadFailed(error=name, message=text):
                if self.state not in _ENDED:
                    self.failure = _load_error(name, text)
                    self._enter(State.FAILED)

    def _note_course(self, step: Stepped) -> None:
        for request_id in step.begun:
            if (stream := self._streams.get(request_id)) is not None and stream.began is None:
                stream.began = step.begun_at
        for request_id in step.preempted:
            if (stream := self._streams.get(request_id)) is not None:
                stream.preemptions += 1

    async def _watch(self) -> None:
        """Kills a process that has work but makes no progress. An idle engine is not stuck.

        Counts ticks of this loop instead of clock time: while this process was held up, it read no messages either.
        """
        while True:
            await self._sleep(_WATCH_SECONDS)
            if self._follows:
                # It waits for the other host's engine, which is watched by its own server.
                continue
            if self.state is State.LOADING:
                if self._boot.path is None and self._location is None:
                    # It may be downloading the files, in processes of its own: that may take any time.
                    continue
                self._idle_seconds += _WATCH_SECONDS
                if self._idle_seconds > self.load_stall_seconds:
                    self._give_up_loading()
                continue
            if not self._streams and not self._asked:
                continue
            self._idle_seconds += _WATCH_SECONDS
            if self._idle_seconds > self._stall_limit:
                self._stuck = True
                self._kill()

    @property
    def _stall_limit(self) -> float:
        """Seconds without progress after which an engine at work is stuck."""
        # Writing a profile waits for disks, as loading does.
        return self.load_stall_seconds if self.heartbeat.writing else self.stall_seconds

    def _give_up_loading(self) -> None:
        """Fails at once, without waiting for the process to exit: it may never do so."""
        self.failure = ModelError(
            f"The engine made no progress for {self.load_stall_seconds:g} s while it loaded the model. Check the disk "
            "or file system that it is on, then load it again; --load-stall-timeout sets how long that may take."
        )
        self._enter(State.FAILED)
        self._kill()
        if self._writer is not None:
            # Ends the reader's loop.
            self._writer.transport.abort()

    def _fail_streams(self, message: str) -> None:
        self._held_back.clear()
        for stream in list(self._streams.values()):
            stream.fail(Unavailable(message))
        for answer in (*self._asked.values(), *self._offers.values()):
            if not answer.done():
                answer.set_exception(Unavailable(message))
                # Nobody may be waiting for it.
                answer.exception()
        _settle(self._all_offered, None)
        self._all_offered = None
        while self._profiles:
            self._profiles.popitem()[1].set_exception(Unavailable(message))

    def _send(self, message: ToEngine) -> None:
        self._write(frame(message))

    def _write(self, data: bytes) -> None:
        # If the process has just died, its streams fail when the end of its socket is read.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process)


def _settle(answer: "asyncio.Future[_T] | None", result: _T) -> None:
    if answer is not None and not answer.done():
        answer.set_result(result)


def _submission(request: Request) -> bytes:
    """The request's frame for the socket, without its texts: the engine gets their token ids."""
    params = request.params
    if params.stop or params.bad_words or params.structured is not None:
        request = replace(request, params=params.without_texts())
    try:
        return frame(Submit(request))
    except (OverflowError, UnicodeEncodeError) as error:
        raise BadRequest(f"The request holds a value that cannot be passed on ({error}).") from error


def _load_error(name: str, message: str) -> OstroError:
    error = from_process(name, message)
    # A BadRequest here is about the server's settings: the client cannot fix it.
    return ModelError(message) if isinstance(error, BadRequest) else error


async def _read(reader: asyncio.StreamReader) -> FromEngine | None:
    """The next message; None once the engine is gone."""
    try:
        header = await reader.readexactly(LENGTH.size)
        return decode_from_engine(await reader.readexactly(body_length(header)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
