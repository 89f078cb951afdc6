"""What a backend is: it says which models it runs, plans the memory that they take, and loads them.

A backend is one folder with a `backend` module, which imports neither torch nor JAX until it loads a model.
`backends.choosing` lists the backends in order of preference, and is the only place that decides between them.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from ostro.backends.opened import OpenedModel
from ostro.backends.plan import Parts
from ostro.devices import Memory
from ostro.engine.runner import ModelRunner

Reasons = Mapping[str, str]
"""Why the backends before the chosen one do not run a model, by their names."""


class Unloadable(Exception):
    """The reason why a model that was not refused cannot be loaded after all: another backend may."""


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def library(self) -> str | None:
        """The extra that it needs: "torch" or "jax"."""

    def refuses(self, opened: OpenedModel) -> str | None:
        """The reason why another backend must run the model; None if this one can."""

    def check(self, opened: OpenedModel, reasons: Reasons) -> None:
        """Raises BadRequest or Unsupported for settings that it does not take with this model."""

    def plan(self, opened: OpenedModel, memory: Memory) -> Parts:
        """The memory that the model takes on a device with so much, from its config and its files' headers."""

    def load(self, opened: OpenedModel, following: Callable[[], None]) -> ModelRunner:
        """Raises Unloadable if only loading shows that it cannot run the model.

        If another host's process leads this one, calls `following` once it follows, and ends when the leader does.
        """
