"""What crosses between `ostro bench` and the processes that make its load: JSON lines, both ways."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.workload import Workload


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One run: how hard the server is driven, and for how long."""

    kind: Literal["concurrency", "rate", "trace"]
    value: float
    """Requests at a time, requests a second, or how many times as fast as the trace."""
    number: int
    """Which run of the whole it is."""
    requests: int | None
    duration: float | None = None
    """No request begins later than this; those under way are waited for."""
    burstiness: float = 1.0
    warmup: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.value:g}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A level's share of one process.

    Requests go to clients in turn, and this process has `num_clients` of `stride`, from `first` on. An open loop has
    one client a process.
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
        """Whether request `index` is of its share."""
        return self.first <= index % self.stride < self.first + self.num_clients


class Go(msgspec.Struct, frozen=True, tag=True):
    """All processes start at this time of time.perf_counter, which all processes of a machine share."""

    at: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """No more requests, and those under way are given up."""


class Run(msgspec.Struct, frozen=True, tag=True):
    job: Job


class Ready(msgspec.Struct, frozen=True, tag=True):
    pass


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Since the last one."""

    finished: int
    failed: int
    running: int
    tokens: int
    ttfts: list[float]


class Burden(msgspec.Struct, frozen=True, kw_only=True):
    """What making the load cost one process."""

    cpu_share: float
    """Of one core, while it ran."""
    lag_mean: float
    """How late timers fired: what the process was held up by its own work or by others'."""
    lag_p99: float
    lag_max: float


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    outcomes: list[Outcome]
    unfinished: int
    """Given up because the run was stopped."""
    burden: Burden


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The process failed; what it says is for whoever mends it."""

    words: str


ToWorker = Run | Go | Stop
FromWorker = Ready | Progress | Finished | Broken
