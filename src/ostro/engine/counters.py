"""An engine's counters: one struct, from the scheduler to the metrics, and totals over engine processes."""

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(slots=True)
class Counters:
    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    """Tokens generated, sampled or forced."""
    forced_tokens: int = 0
    """Tokens appended without sampling, because a structure allowed no others."""
    drafted_tokens: int = 0
    """Guesses verified by speculation, and how many of them were right."""
    accepted_tokens: int = 0
    preemptions: int = 0
    resumed: int = 0
    """Sequences that were preempted, and resumed at the same token with the state that they had there."""
    cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache, and how many of them were found."""
    cache_hits: int = 0
    stateless_tokens: int = 0
    """Prompt tokens whose pages were found there, but which were computed again for lack of a recurrent state."""
    stored_pages: int = 0
    """Pages copied to host memory when they were evicted, and pages handed on to be written to disk."""
    spilled_pages: int = 0
    fetched_pages: int = 0
    """Pages fetched from host memory, and from disk; and those that were lost or damaged there."""
    fetched_disk_pages: int = 0
    lost_pages: int = 0
    stored_states: int = 0
    """The same for recurrent states: copied to host memory, handed on to be written to disk, fetched from either."""
    spilled_states: int = 0
    fetched_states: int = 0
    offered_pages: int = 0
    """Pages shared with other engines."""
    fetch_seconds: float = 0.0
    """Time that these copies took, beside the steps."""
    outer_steps: int = 0
    """For models that refine their states in outer steps: how many were taken, and how many early halting saved."""
    saved_steps: int = 0
    compile_seconds: float = 0.0
    """Time spent compiling programs, and how many were compiled after the engine was ready."""
    recompiles: int = 0
    remote_prefills: int = 0
    """Prompts that another server was asked to compute, and how often it did not; counted by the API process."""
    failed_prefills: int = 0
    restarts: int = 0
    """How often the engine process was restarted; counted by the API process."""

    @property
    def sampled_tokens(self) -> int:
        return self.generated_tokens - self.forced_tokens

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class EngineCounters:
    """One engine's totals. Each of its processes counts from zero; the totals do not, and outlive the engine."""

    def __init__(self) -> None:
        self.restarts = self.remote_prefills = self.failed_prefills = 0
        self._before = Counters()
        self._last = Counters()

    @property
    def totals(self) -> Counters:
        return replace(
            self._before + self._last,
            restarts=self.restarts,
            remote_prefills=self.remote_prefills,
            failed_prefills=self.failed_prefills,
        )

    def take(self, counters: Counters) -> None:
        """Takes the latest counters of the current process."""
        self._last = counters

    def end_process(self) -> None:
        self._before, self._last = self._before + self._last, Counters()


class ModelCounters:
    """Totals per model since the server started. A model has one engine at a time, and a new one after each load."""

    def __init__(self) -> None:
        self._before: dict[str, Counters] = {}
        self._current: dict[str, EngineCounters] = {}

    def note(self, model: str, engine: EngineCounters) -> None:
        """Registers the counters of the model's current engine. Call it whenever that may be a new one."""
        if self._current.get(model) is not engine:
            self._before[model] = self.totals(model)
            self._current[model] = engine

    def totals(self, model: str) -> Counters:
        """Zero for a model that had no engine."""
        before, current = self._before.get(model, Counters()), self._current.get(model)
        return before if current is None else before + current.totals
