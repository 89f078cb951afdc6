"""The memory that models use, and their common limits. Knows numbers only."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one model's engine takes."""

    bytes: int = 0
    """Of host memory."""
    device_bytes: int = 0
    """Of GPU memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    memory: int | None = None
    """Bytes of host memory that all engines together may take; None is no limit, here and below."""
    device_memory: int | None = None
    """Bytes of GPU memory that all engines together may take."""
    models: int | None = None
    """How many may be loaded at a time."""
    wait_seconds: float = 60.0
    """How long a request waits for its model."""
    idle_seconds: float | None = None
    """What was not used for so long is unloaded, unless it is pinned."""
    fetches: int = 4
    """How many models' files may be on their way here at a time. They take no room."""
    retry_seconds: float = 30.0
    """A model that could not be loaded is not tried again sooner. Doubles with each failure, up to ten minutes."""

    @property
    def by_memory(self) -> bool:
        return self.memory is not None or self.device_memory is not None


@dataclass(frozen=True, slots=True)
class Room:
    """What some models take together."""

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
        """The first limit that it breaks, in words: `20.00 GiB of host memory, where 16.00 GiB are allowed`."""
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
