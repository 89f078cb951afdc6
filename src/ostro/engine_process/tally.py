"""What an engine has counted in all its processes. Knows pulses; knows no processes."""

from dataclasses import dataclass, fields
from typing import Self

from ostro.engine_process.messages import Pulse


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters as in `Pulse`, and how often a process had to be followed by another."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    outer_steps: int = 0
    saved_steps: int = 0
    restarts: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class Tally:
    """A process counts from zero; this does not. It stays when its engine is gone, and holds numbers alone."""

    def __init__(self) -> None:
        self.restarts = 0
        self._before = Totals()
        self._last = Pulse()

    @property
    def totals(self) -> Totals:
        """They never fall."""
        return self._before + _counted(self._last, self.restarts)

    def take(self, pulse: Pulse) -> None:
        self._last = pulse

    def end_process(self) -> None:
        self._before, self._last = self._before + _counted(self._last), Pulse()


def _counted(pulse: Pulse, restarts: int = 0) -> Totals:
    return Totals(
        steps=pulse.steps,
        computed_tokens=pulse.computed_tokens,
        generated_tokens=pulse.generated_tokens,
        preemptions=pulse.preemptions,
        cache_queries=pulse.cache_queries,
        cache_hits=pulse.cache_hits,
        outer_steps=pulse.outer_steps,
        saved_steps=pulse.saved_steps,
        restarts=restarts,
    )
