"""A profiler for the native core, which adds up the time of each kind of operation anyway. Knows no schedule."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ostro.engine.profile import LAUNCH, SpanProfiler
from ostro.kernels.cpu.program import Program


class NativeProfiler(SpanProfiler):
    """Each launch has a span per kind of operation: its total time in all layers, not that of one call."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program
        # Resets the counters.
        program.profile()

    @contextmanager
    def span(self, name: str, **counts: int) -> Iterator[None]:
        with super().span(name, **counts):
            began = time.perf_counter_ns()
            yield
        if name == LAUNCH:
            self._add_operations(began)

    def _add_operations(self, began: int) -> None:
        for operation, seconds in self._program.profile().items():
            if duration := int(seconds * 1e9):
                self.add(operation, began, duration)
                began += duration
