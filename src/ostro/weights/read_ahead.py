"""Runs jobs in threads, a few ahead of the consumer of their results."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_THREADS = min(4, os.cpu_count() or 1)
T = TypeVar("T")


def run_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The results in order. Worthwhile for jobs that release the GIL, as numpy does."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="unpack") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > _THREADS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
