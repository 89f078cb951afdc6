"""Which shapes steps come in, and the compiled programs: all are compiled before the first step, and none later. Knows
no models.

`jax.jit` would compile silently, for seconds, whenever a step has a new shape. A program that is compiled ahead of time
refuses any other shape, and one that is not in the table is an error.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ostro.errors import ModelError
from ostro.runner.jax.attention import PAGES_PER_TURN
from ostro.runner.jax.program import StepShape

_log = logging.getLogger(__name__)

Key = tuple[Hashable, ...]

_FEWEST_ROWS = 8
"""Fewer rows take as long as this many."""
_FEWEST_TOKENS = 64
_GROWTH = 4
"""Each shape is this many times as large as the one before it."""
_TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A runner's capacities. They decide which programs are compiled."""

    page_size: int
    num_pages: int
    max_batch_tokens: int = 512
    max_batch_seqs: int = 64

    def shapes(self, max_seq_len: int) -> list[StepShape]:
        """Shapes for steps of one token per sequence, then shapes for all others; each kind from small to large.

        Any batch within the capacities fits into the last one.
        """
        pages = -(-max_seq_len // (self.page_size * PAGES_PER_TURN)) * PAGES_PER_TURN
        rows = list(_growing(_FEWEST_ROWS, self.max_batch_seqs))
        decoding = [StepShape(tokens=n, tiles=n, width=1, rows=n, pages=pages) for n in rows]
        return decoding + [
            # Each sequence may leave its last tile unfilled.
            StepShape(tokens=n, tiles=min(n, -(-n // _TILE) + rows[-1]), width=_TILE, rows=rows[-1], pages=pages)
            for n in _growing(_FEWEST_TOKENS, self.max_batch_tokens)
        ]


def smallest_shape(shapes: Sequence[StepShape], *, tokens: int, sequences: int, longest: int) -> StepShape:
    """The first shape that holds a step of this many tokens, `longest` of them of one sequence."""
    for shape in shapes:
        if shape.holds(tokens, sequences, longest):
            return shape
    raise ModelError(
        f"No program was compiled for a step of {tokens} tokens in {sequences} sequences: the limits of the engine and "
        "of its runner differ. This is a bug: please report it."
    )


def _growing(least: int, most: int) -> Iterator[int]:
    """Sizes from `least` on, the last of which is at least `most`."""
    size = least
    while size < most:
        yield size
        size *= _GROWTH
    yield max(least, most)


def on_mesh(
    mesh: Mesh, function: Callable[..., Any], specs: Sequence[Any], results: Any, *, donated: tuple[int, ...] = ()
) -> Any:
    """A program of all ranks, not compiled yet, from a function that computes one rank's part."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=results, check_vma=False)
    shardings = jax.tree.map(partial(NamedSharding, mesh), results)
    return jax.jit(mapped, donate_argnums=donated, out_shardings=shardings)


@dataclass(slots=True)
class Programs:
    """Programs of one mesh."""

    mesh: Mesh
    seconds: float = 0.0
    """Time spent compiling."""
    _compiled: dict[Key, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._compiled)

    def temporary_bytes(self) -> int:
        """The most memory that a program takes on a device besides its arguments and results."""
        return max(compiled.memory_analysis().temp_size_in_bytes for compiled in self._compiled.values())

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

        `specs` and `results` say how arguments and results are divided over the mesh. Arguments that are `donated` are
        overwritten.
        """
        began = time.monotonic()
        jitted = on_mesh(self.mesh, function, specs, results, donated=donated)
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
