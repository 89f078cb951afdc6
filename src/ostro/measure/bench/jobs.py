"""Messages between `ostro bench` and its load processes: JSON lines, both ways."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.workload import Workload


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One run: the intensity of the load, and for how long."""

    kind: Literal["concurrency", "rate", "trace"]
    value: float
    """Concurrent requests, requests per second, or the speed-up factor of a trace."""
    number: int
    """The run's number in the benchmark."""
    requests: int | None
    duration: float | None = None
    """No request starts later than this; requests in flight are waited for."""
    burstiness: float = 1.0
    warmup: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.value:g}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One process's share of a level.

    Requests are distributed to clients round-robin, and this process has `num_clients` of `stride`, from `first` on. An
    open loop has one client per process.
    """

    url: str
    headers: Mapping[str, str]
    timeout: float
    workload: Workload
    level: Level
    first: int = 0
    num_clients: int = 1
    stride: int = 1

    def has(self, index: int) -> bool:
        """Whether request `index` belongs to this share."""
        return self.first <= index % self.stride < self.first + self.num_clients


class Go(msgspec.Struct, frozen=True, tag=True):
    """All processes start at this time.perf_counter() value, a clock shared by all processes of a machine."""

    at: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Send no more requests, and abort those in flight."""


class RunJob(msgspec.Struct, frozen=True, tag=True):
    job: Job


class Ready(msgspec.Struct, frozen=True, tag=True):
    pass


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Changes since the last report."""

    finished: int
    failed: int
    running: int
    tokens: int
    ttfts: list[float]


class Burden(msgspec.Struct, frozen=True, kw_only=True):
    """What generating the load cost one process."""

    cpu_share: float
    """CPU use while running, as a share of one core."""
    lag_mean: float
    """How late timers fired: delays caused by the process's own work or by others'."""
    lag_p99: float
    lag_max: float


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    outcomes: list[Outcome]
    unfinished: int
    """Aborted because the run was stopped."""
    burden: Burden


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The process failed; carries its traceback."""

    words: str


ToWorker = RunJob | Go | Stop
FromWorker = Ready | Progress | Finished | Broken
