"""JAX as a backend: on TPUs, and on any device on request. Imports JAX only to load a model."""

from collections.abc import Callable

from ostro.backends.backend import OpenedModel, Reasons
from ostro.backends.jax.layout import check_adapters, jax_architecture
from ostro.backends.jax.planning import planned_parts
from ostro.backends.plan import Parts
from ostro.devices import Memory, runs_on_jax
from ostro.engine.runner import ModelRunner


class JaxBackend:
    name = "jax"
    library = "jax"

    def refuses(self, opened: OpenedModel) -> str | None:
        return None if runs_on_jax(opened.config) else "neither a TPU nor the jax backend was requested"

    def check(self, opened: OpenedModel, reasons: Reasons) -> None:
        check_adapters(jax_architecture(opened.description), opened.config.adapters)
        opened.config.check_causal()

    def plan(self, opened: OpenedModel, memory: Memory) -> Parts:
        return planned_parts(opened, memory)

    def load(self, opened: OpenedModel, following: Callable[[], None]) -> ModelRunner:
        from ostro.backends.jax.load import jax_runner

        return jax_runner(opened, following=following)
