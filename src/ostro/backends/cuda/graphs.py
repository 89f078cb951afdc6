"""Whole steps as CUDA graphs, for a ladder of batch sizes; each is captured on first use. Knows no model."""

import gc
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch


def ladder(most: int, captured: int = 0) -> list[int]:
    """Batch sizes with their own graph: close together where padding would cost most.

    Includes `captured`, the largest captured size, so that no smaller batch is padded beyond it.
    """
    sizes = {1, 2, 4, 8, 16, 24, 32, *range(48, 256, 16), *range(256, 513, 32), *range(576, 4097, 64), captured, most}
    return sorted(size for size in sizes if 0 < size <= most)


_Kind = TypeVar("_Kind", bound=Hashable)


class StepGraphs(Generic[_Kind]):
    """Makes `step(size, kind)` callable: as a graph replay for batches up to `captured` rows, directly beyond that."""

    def __init__(
        self,
        step: Callable[[int, _Kind], None],
        *,
        idle: Callable[[], None],
        most: int,
        captured: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`idle` sets the step's inputs so that running it has no effect. `sizes` are those of a ladder by default."""
        self.sizes = ladder(most, captured) if sizes is None else sizes
        self._step = step
        self._idle = idle
        self._captured = captured
        self._graphs: dict[tuple[int, _Kind], Callable[[], None]] = {}
        self._pool: Any = None

    @property
    def made(self) -> list[tuple[int, _Kind]]:
        """The steps used so far."""
        return list(self._graphs)

    def size_for(self, rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, rows)]

    def get(self, size: int, kind: _Kind) -> Callable[[], None]:
        """The step for this size. May overwrite the step's inputs: call it before setting them."""
        run = self._graphs.get((size, kind))
        if run is None:
            run = self._capture(size, kind) if size <= self._captured else partial(self._step, size, kind)
            self._graphs[size, kind] = run
        return run

    def forget(self) -> None:
        """Drops all graphs; steps are captured again when next used."""
        self._graphs.clear()
        # The memory of graphs that are gone is given back.
        self._pool = None

    def _capture(self, size: int, kind: _Kind) -> Callable[[], None]:
        self._idle()
        # Run once outside: kernel compilation and library setup must not happen during a capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(size, kind)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Graphs run one at a time, so they can share memory. Other threads may use the device meanwhile: NCCL's
        # watchdog asks about earlier operations, and in a program that uses `LLM` anybody may.
        with _garbage_left_alone(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(size, kind)
        self._pool = graph.pool()
        return graph.replay


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Disables garbage collection: freeing device memory during a capture invalidates it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
