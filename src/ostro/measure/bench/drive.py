"""One process's share of a level: sends requests when they are due and records their outcomes.

While it runs, garbage collection is off, and a response's JSON is parsed only after the next request has been sent.
"""

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial

from ostro.measure.bench.jobs import Burden, Finished, Job, Progress
from ostro.measure.bench.outcomes import Outcome, read
from ostro.measure.bench.wire import CONNECTION, Pool, Recording, Target
from ostro.measure.bench.workload import PATHS
from ostro.measure.report.numbers import percentile

_AHEAD = 2000
"""Requests prepared before the clock starts."""
_TICK = 0.01
_PAUSE = 0.1
_TELL_EVERY = 0.25


class Drive:
    def __init__(self, job: Job, tell: Callable[[Progress], None]) -> None:
        self._job = job
        self._tell = tell
        self._target = Target.of(job.url, job.headers)
        self._pool = Pool(self._target, job.timeout)
        self._prepared: dict[int, tuple[bytes, int]] = {}
        self._outcomes: list[Outcome] = []
        self._told = 0
        self._running = 0
        self._unfinished = 0
        self._began = 0.0
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    async def prepare(self) -> None:
        """Does everything possible before the clock starts: connections, the first requests, the warm-up."""
        await self._until_stopped(self._prepare())

    async def _prepare(self) -> None:
        job, level = self._job, self._job.level
        for index in itertools.islice(self._indices(), _AHEAD):
            self._prepared[index] = job.workload.request(index, level.number)
        # Last, because servers soon close idle connections.
        await self._pool.open(job.num_clients if level.kind == "concurrency" else 0)
        # Negative numbers, so that the run's random prompts are not in the server's cache yet.
        numbers = iter([~number for number in range(level.warmup) if job.has(number)])

        async def warm() -> None:
            for index in numbers:
                await self._pool.ask(self._request(index)[0])

        await asyncio.gather(*(warm() for _ in range(job.num_clients)))

    async def run(self, at: float) -> Finished:
        gc.collect()
        gc.freeze()
        gc.disable()
        watchers = [asyncio.create_task(each()) for each in (self._watch_lag, self._keep_telling)]
        try:
            await asyncio.sleep(at - time.perf_counter())
            self._began, cpu = at, time.process_time()
            await self._until_stopped(self._closed() if self._job.level.kind == "concurrency" else self._open())
            seconds, cpu = time.perf_counter() - at, time.process_time() - cpu
            await asyncio.sleep(0)  # let the last responses be parsed
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._pool.close()
            gc.enable()
            gc.unfreeze()
        self._tell_news()
        lags = sorted(self._lags) or [0.0]
        burden = Burden(
            cpu_share=cpu / seconds if seconds > 0 else 0.0,
            lag_mean=sum(lags) / len(lags),
            lag_p99=percentile(lags, 0.99),
            lag_max=lags[-1],
        )
        return Finished(outcomes=self._outcomes, unfinished=self._unfinished, burden=burden)

    def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        await self._pool.close()

    async def _until_stopped(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.ensure_future(work)
        if self._stopped:
            self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    # --- the two loops ----------------------------------------------------------------------------------------------

    async def _closed(self) -> None:
        """A fixed number of clients, each of which sends its next request once the last is answered."""
        indices, level = self._indices(), self._job.level

        async def client() -> None:
            while level.duration is None or time.perf_counter() - self._began < level.duration:
                index = next(indices, None)
                if index is None:
                    return
                recording = await self._ask(index)
                if recording.failure == CONNECTION and level.requests is None:
                    # A server that is gone refuses at once: without a pause, the loop would spin.
                    await asyncio.sleep(_PAUSE)

        async with asyncio.TaskGroup() as clients:
            for _ in range(self._job.num_clients):
                clients.create_task(client())

    async def _open(self) -> None:
        """Requests sent on schedule, whether or not earlier ones have been answered."""
        job, level = self._job, self._job.level
        times = (
            job.workload.replayed()
            if level.kind == "trace"
            else job.workload.due(level.value, level.burstiness, level.number)
        )
        async with asyncio.TaskGroup() as requests:
            for index, due in enumerate(itertools.islice(times, level.requests)):
                if level.duration is not None and due >= level.duration:
                    return
                if not job.has(index):
                    continue
                while (wait := self._began + due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                requests.create_task(self._ask(index, due))

    async def _ask(self, index: int, due: float | None = None) -> Recording:
        request, max_tokens = self._request(index)
        self._running += 1
        try:
            recording = await self._pool.ask(request)
        except asyncio.CancelledError:
            self._unfinished += 1
            raise
        finally:
            self._running -= 1
        # Later: the next request goes out first.
        later = partial(self._read, recording, index, max_tokens, due)
        asyncio.get_running_loop().call_soon(later)
        return recording

    def _read(self, recording: Recording, index: int, max_tokens: int, due: float | None) -> None:
        self._outcomes.append(read(recording, index=index, began=self._began, max_tokens=max_tokens, due=due))

    def _request(self, index: int) -> tuple[bytes, int]:
        workload = self._job.workload
        if index not in self._prepared:
            self._prepared[index] = workload.request(index, self._job.level.number)
        body, max_tokens = self._prepared.pop(index)
        return self._target.request(PATHS[workload.endpoint], body), max_tokens

    def _indices(self) -> Iterator[int]:
        most = self._job.level.requests
        return filter(self._job.has, itertools.count() if most is None else range(most))

    # --- watchers ---------------------------------------------------------------------------------------------------

    async def _watch_lag(self) -> None:
        while True:
            due = time.perf_counter() + _TICK
            await asyncio.sleep(_TICK)
            self._lags.append(max(time.perf_counter() - due, 0.0))

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(_TELL_EVERY)
            self._tell_news()

    def _tell_news(self) -> None:
        news, self._told = self._outcomes[self._told :], len(self._outcomes)
        self._tell(
            Progress(
                finished=len(news),
                failed=sum(each.error is not None for each in news),
                running=self._running,
                tokens=sum(each.output_tokens for each in news),
                ttfts=[each.ttft for each in news if each.error is None and each.ttft is not None],
            )
        )
