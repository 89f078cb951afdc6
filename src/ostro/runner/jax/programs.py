"""Compiled programs by name: all are compiled before the first step, and none later. Knows no models.

`jax.jit` would compile silently, for seconds, whenever a step has a new shape. A program that is compiled ahead of time
refuses any other shape, and one that is not in the table is an error.
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jax.sharding import Mesh, NamedSharding

import jax
from ostro.errors import ModelError

_log = logging.getLogger(__name__)

Key = tuple[Hashable, ...]


@dataclass(slots=True)
class Programs:
    """Programs of one mesh."""

    mesh: Mesh
    seconds: float = 0.0
    """Time spent compiling."""
    _compiled: dict[Key, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._compiled)

    def add(
        self,
        key: Key,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        specs: Sequence[Any],
        results: Any,
        *,
        donated: tuple[int, ...] = (),
    ) -> None:
        """Compiles `function`, which computes one rank's part, for arguments of these shapes.

        `specs` and `results` say how arguments and results are divided over the mesh.
        """
        began = time.monotonic()
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=tuple(specs), out_specs=results, check_vma=False)
        shardings = jax.tree.map(partial(NamedSharding, self.mesh), results)
        jitted = jax.jit(mapped, donate_argnums=donated, out_shardings=shardings)
        self._compiled[key] = jitted.lower(*arguments).compile()
        took = time.monotonic() - began
        self.seconds += took
        _log.info("compiled %s in %.1f s", " ".join(str(part) for part in key), took)

    def __getitem__(self, key: Key) -> Callable[..., Any]:
        try:
            found: Callable[..., Any] = self._compiled[key]
        except KeyError:
            wanted = " ".join(str(part) for part in key)
            raise ModelError(
                f"No program was compiled for {wanted}. This is a bug in Ostro: please report it."
            ) from None
        return found
