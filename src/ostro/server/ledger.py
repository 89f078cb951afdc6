"""What each model's engines have counted since the server started. Knows tallies; knows no engine and no request."""

from ostro.engine_process.tally import Tally, Totals

__all__ = ["Ledger", "Totals"]


class Ledger:
    """A model has one engine at a time, and another after each load. What the earlier ones had counted is kept."""

    def __init__(self) -> None:
        self._before: dict[str, Totals] = {}
        self._current: dict[str, Tally] = {}

    def note(self, model: str, tally: Tally) -> None:
        """The tally of the model's engine, whenever that may be a new one."""
        if self._current.get(model) is not tally:
            self._before[model] = self.totals(model)
            self._current[model] = tally

    def totals(self, model: str) -> Totals:
        """They never fall, and are zero for a model that had no engine."""
        before, current = self._before.get(model, Totals()), self._current.get(model)
        return before if current is None else before + current.totals
