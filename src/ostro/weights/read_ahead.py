"""Runs jobs in threads, a few ahead of the consumer of their results."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ostro.system.machine import num_cpus

_MOST_THREADS = 4
T = TypeVar("T")


def run_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The results in order. Worthwhile for jobs that release the GIL, as numpy does."""
    number = min(_MOST_THREADS, num_cpus())
    with ThreadPoolExecutor(number, thread_name_prefix="unpack") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > number:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
