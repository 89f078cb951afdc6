"""Compiled programs: all are compiled before the first step, and none later. Knows no models.

`jax.jit` would compile silently, for seconds, whenever a step has a new shape. A program that is compiled ahead of time
refuses any other shape, and one that is not in the table is an error.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
from jax import monitoring
from jax.sharding import Mesh, NamedSharding

from ostro.backends.jax.kept_programs import KeptPrograms
from ostro.errors import ModelError
from ostro.system.machine import num_cpus

_log = logging.getLogger(__name__)

Key = tuple[Hashable, ...]

_STACK_BYTES = 64 << 20
_MOST_THREADS = 8


def on_mesh(
    mesh: Mesh, function: Callable[..., Any], specs: Sequence[Any], results: Any, *, donated: tuple[int, ...] = ()
) -> Any:
    """A program of all ranks, not compiled yet, from a function that computes one rank's part."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=results, check_vma=False)
    shardings = jax.tree.map(partial(NamedSharding, mesh), results)
    return jax.jit(mapped, donate_argnums=donated, out_shardings=shardings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A program to compile: a function that computes one rank's part, for arguments of certain shapes."""

    key: Key
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    specs: tuple[Any, ...]
    """How arguments and results are divided over the mesh."""
    results: Any
    donated: tuple[int, ...] = ()
    """Arguments that are overwritten."""

    @property
    def name(self) -> str:
        return _name(self.key)


@contextmanager
def _compilers() -> Iterator[ThreadPoolExecutor]:
    """Threads with room for XLA's recursion, which overflows the usual stack of a thread."""
    usual = threading.stack_size(_STACK_BYTES)
    try:
        threads = ThreadPoolExecutor(min(_MOST_THREADS, num_cpus()))
        try:
            yield threads
        finally:
            # Once one has failed, the others are not needed.
            threads.shutdown(cancel_futures=True)
    finally:
        threading.stack_size(usual)


@dataclass(slots=True)
class Programs:
    """Programs of one mesh. `kept` are those of earlier starts."""

    mesh: Mesh
    kept: KeptPrograms | None = None
    seconds: float = 0.0
    """Time spent compiling, or loading what was compiled before."""
    num_compiled: int = 0
    _compiled: dict[Key, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._compiled)

    def __iter__(self) -> Iterator[Key]:
        """The keys."""
        return iter(self._compiled)

    def step_bytes(self) -> int:
        """The most memory that a step takes on a device besides its arguments: that of its largest program, and the
        results of two steps.
        """
        found = [compiled.memory_analysis() for compiled in self._compiled.values()]
        results = max(each.output_size_in_bytes - each.alias_size_in_bytes for each in found)
        return max(each.temp_size_in_bytes for each in found) + 2 * results

    def add(self, *recipes: Recipe) -> None:
        """Compiles or loads programs, several at a time, and logs a line for each."""
        began = time.monotonic()
        with _compilers() as threads:
            made = [threads.submit(self._made, recipe) for recipe in recipes]
            for number, (recipe, future) in enumerate(zip(recipes, made, strict=True), 1):
                self._compiled[recipe.key], verb = future.result()
                self.num_compiled += verb == "compiled"
                so_far = time.monotonic() - began
                _log.info("program %d of %d %s after %.1f s: %s", number, len(recipes), verb, so_far, recipe.name)
        self.seconds += time.monotonic() - began
        if self.kept is not None and self.num_compiled:
            self.kept.drop_oldest()

    def _made(self, recipe: Recipe) -> tuple[Any, str]:
        """A program, and how it was made."""
        if self.kept is not None and (found := self.kept.load(recipe.name, recipe.arguments, recipe.results)):
            return found, "loaded"
        jitted = on_mesh(self.mesh, recipe.function, recipe.specs, recipe.results, donated=recipe.donated)
        compiled = jitted.lower(*recipe.arguments).compile()
        if self.kept is not None:
            self.kept.save(recipe.name, compiled)
        return compiled, "compiled"

    def __getitem__(self, key: Key) -> Callable[..., Any]:
        try:
            found: Callable[..., Any] = self._compiled[key]
        except KeyError:
            raise ModelError(
                f"No program was compiled for {_name(key)}. This is a bug in Ostro: please report it."
            ) from None
        return found


def _name(key: Key) -> str:
    what, *details = map(str, key)
    return f"{what} {', '.join(details)}" if details else what


class Compilations:
    """Counts the programs that JAX compiles in this process."""

    def __init__(self) -> None:
        self.number = 0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **context: object) -> None:
        self.number += event.endswith("backend_compile_duration")


@cache
def compilations() -> Compilations:
    """The process's only counter: listeners cannot be removed."""
    return Compilations()
