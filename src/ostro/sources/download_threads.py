"""A thread pool that stops at the first failure."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, ParamSpec, TypeVar

_THREADS = 8

P = ParamSpec("P")
T = TypeVar("T")


class Stopped(Exception):
    """Another thread failed; this one should stop."""


class DownloadThreads:
    def __init__(self) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch")
        self._futures: list[Future[Any]] = []

    def send(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = self._pool.submit(work, *args, **kwargs)
        self._futures.append(future)
        return future

    def join(self) -> None:
        """Waits for all work; raises the first failure."""
        for future in as_completed(self._futures):
            future.result()

    def check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def wait(self, seconds: float) -> None:
        self._stop.wait(seconds)
        self.check()

    def __enter__(self) -> "DownloadThreads":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
