"""Totals of engines' counters over all their processes. They never decrease. Knows numbers; knows no processes."""

from dataclasses import replace

from ostro.engine.counters import Counters


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
