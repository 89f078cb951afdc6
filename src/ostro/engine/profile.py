"""Profiles an engine's steps into a file of Chrome trace JSON, which Perfetto opens.

    step │ schedule │ launch: sequences, tokens, sampled │ collect: waits for results │ sample: if it was deferred │

A runner may have a profiler of its own, which also sees what it does inside these spans. Knows the sizes of batches;
knows no token ids, so a trace holds nothing that a user sent.
"""

import gzip
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from ostro.engine.batch import Batch
from ostro.engine.runner import ModelRunner, RunnerSpec, Step
from ostro.errors import ProfileFailed

MOST_STEPS = 1000
"""Steps after which a profile ends unless told otherwise: with a profiler of kernels, a step may be thousands of
events."""
LAUNCH = "launch"
"""The span in which the runner works. There is one per step."""

_T = TypeVar("_T")


class Profiler(ABC):
    """Records spans from its creation until it is written. Any thread may call it, but one at a time."""

    @abstractmethod
    def span(self, name: str, **counts: int) -> AbstractContextManager[object]:
        """Records the block as a span; `counts` are shown with it."""

    @abstractmethod
    def write(self, path: Path) -> None:
        """Ends the recording and writes it, gzipped."""


@runtime_checkable
class HasProfiler(Protocol):
    """A runner with a profiler of its own. Other runners get a SpanProfiler."""

    def profiler(self) -> Profiler: ...


class SpanProfiler(Profiler):
    """Records spans only, by the host's clock."""

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []

    @contextmanager
    def span(self, name: str, **counts: int) -> Iterator[None]:
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, began, time.perf_counter_ns() - began, **counts)

    def add(self, name: str, began: int, duration: int, **counts: int) -> None:
        """Adds a span of the current thread, in nanoseconds of `time.perf_counter_ns`."""
        place = {"pid": os.getpid(), "tid": threading.get_native_id()}
        self._events.append(
            {"ph": "X", "name": name, "ts": began / 1000, "dur": duration / 1000, **place, "args": counts}
        )

    def write(self, path: Path) -> None:
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": self._events}, file)


class Recorded(NamedTuple):
    """A profile that has ended."""

    steps: int
    error: str | None = None
    """Why there is no file."""


class Profile:
    """A profile being recorded: `step` runs the engine's steps within spans until `max_steps` or `end`."""

    def __init__(
        self,
        runner: ModelRunner,
        path: Path,
        max_steps: int,
        ended: Callable[[Recorded], None],
        writing: Callable[[], None],
    ) -> None:
        """`writing` is called before the file is written, and `ended` once it is complete, or cannot be written. Raises
        ProfileFailed if the profiler does not start.
        """
        try:
            self._profiler = runner.profiler() if isinstance(runner, HasProfiler) else SpanProfiler()
        except Exception as error:
            raise ProfileFailed(f"The profiler did not start ({error}). See the engine's log.") from error
        self._runner = _ProfiledRunner(runner, self._profiler)
        self._path = path
        self._max_steps = max_steps
        self._ended = ended
        self._writing = writing
        # `end` may be called while another thread steps.
        self._lock = threading.Lock()
        self.over = False

    def step(
        self, run: Callable[[ModelRunner, Callable[[], None]], _T], runner: ModelRunner, scheduled: Callable[[], None]
    ) -> _T:
        """Runs one step of the engine, given as a function of the runner and of what to call once it is scheduled."""
        with self._lock:
            if self.over:
                return run(runner, scheduled)
            gained = self._spanned(run, scheduled)
            if self._runner.steps >= self._max_steps:
                self._finish()
        return gained

    def end(self) -> None:
        """Writes what was recorded; does nothing if the profile is over."""
        with self._lock:
            if not self.over:
                self._finish()

    def _spanned(self, run: Callable[[ModelRunner, Callable[[], None]], _T], scheduled: Callable[[], None]) -> _T:
        with self._profiler.span("step"), ExitStack() as scheduling:
            scheduling.enter_context(self._profiler.span("schedule"))

            def on_scheduled() -> None:
                scheduling.close()
                scheduled()

            return run(self._runner, on_scheduled)

    def _finish(self) -> None:
        self.over = True
        self._writing()
        # Readers of the directory never see half a file.
        part = self._path.with_name(f".{self._path.name}")
        error = None
        try:
            self._profiler.write(part)
            part.replace(self._path)
        except (OSError, RuntimeError, TypeError, ValueError) as failure:
            # Whatever goes wrong with a profile, the engine goes on.
            error = f"The profile cannot be written to {self._path.parent} ({failure}). Check the directory and disk."
            with suppress(OSError):
                part.unlink()
        self._ended(Recorded(self._runner.steps, error))


class _ProfiledRunner:
    """Passes batches on to a runner, within spans."""

    def __init__(self, runner: ModelRunner, profiler: Profiler) -> None:
        self._runner = runner
        self._profiler = profiler
        self.steps = 0

    @property
    def strides(self) -> int:
        return self._runner.strides

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    @property
    def failure(self) -> str | None:
        return self._runner.failure

    def launch(self, batch: Batch) -> Step:
        self.steps += 1
        counts = {"sequences": len(batch.chunks), "tokens": batch.num_tokens, "sampled": len(batch.sampled)}
        with self._profiler.span(LAUNCH, **counts):
            step = self._runner.launch(batch)
        sample = None if step.sample is None else self._within("sample", step.sample)
        return Step(self._within("collect", step.results), sample)

    def _within(self, name: str, work: Callable[[], _T]) -> Callable[[], _T]:
        def spanned() -> _T:
            with self._profiler.span(name):
                return work()

        return spanned


def new_trace(directory: Path, model: str) -> Path:
    """A new file's path in the directory, which is created if necessary. Raises ProfileFailed if it cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileFailed(f"{directory} cannot be created ({error.strerror}). Choose another directory.") from error
    name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in model).strip(".")
    return directory.resolve() / f"{name or 'model'}-{datetime.now():%Y%m%d-%H%M%S-%f}.json.gz"
