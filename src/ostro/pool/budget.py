"""The memory that models use, and their common limits. Knows numbers only."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One model's memory use, by its engine."""

    bytes: int = 0
    """Host memory."""
    device_bytes: int = 0
    """GPU memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    memory: int | None = None
    """Bytes of host memory for all engines together; None means no limit, here and below."""
    device_memory: int | None = None
    """Bytes of GPU memory for all engines together."""
    models: int | None = None
    """How many models may be loaded at a time."""
    wait_seconds: float = 60.0
    """How long a request waits for its model."""
    idle_seconds: float | None = None
    """Models unused for this long are unloaded, unless they are pinned."""
    unloads: bool = True
    """Whether models may be unloaded on request. Models that several hosts run together may not: the other hosts would
    not be told."""
    fetches: int = 4
    """How many models may be downloading at a time. Downloads take no memory budget."""
    retry_seconds: float = 30.0
    """Minimum time before a failed load is retried. Doubles with each failure, up to ten minutes."""

    @property
    def by_memory(self) -> bool:
        return self.memory is not None or self.device_memory is not None


@dataclass(frozen=True, slots=True)
class Room:
    """The total memory use of some models."""

    models: int = 0
    bytes: int = 0
    device_bytes: int = 0

    def __add__(self, other: "Room") -> "Room":
        return Room(self.models + other.models, self.bytes + other.bytes, self.device_bytes + other.device_bytes)

    def __sub__(self, other: "Room") -> "Room":
        return Room(self.models - other.models, self.bytes - other.bytes, self.device_bytes - other.device_bytes)

    def within(self, limits: PoolLimits) -> bool:
        return self.beyond(limits) is None

    def beyond(self, limits: PoolLimits) -> str | None:
        """The first limit that it exceeds, in words: `20.00 GiB of host memory, where 16.00 GiB are allowed`."""
        if limits.memory is not None and self.bytes > limits.memory:
            return _excess(_size(self.bytes), "host memory", _size(limits.memory))
        if limits.device_memory is not None and self.device_bytes > limits.device_memory:
            return _excess(_size(self.device_bytes), "GPU memory", _size(limits.device_memory))
        if limits.models is not None and self.models > limits.models:
            return f"room for {self.models} models, where {limits.models} may be loaded at a time"
        return None


def together(rooms: Iterable[Room]) -> Room:
    return sum(rooms, Room())


def _excess(asked: str, kind: str, allowed: str) -> str:
    return f"{asked} of {kind}, where {allowed} are allowed"


def _size(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.2f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"
