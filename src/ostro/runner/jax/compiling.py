"""Which programs a model needs: each is compiled for its shapes, before the first step. Knows no batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostro.runner.jax.mesh import AXIS
from ostro.runner.jax.program import StepProgram, StepResult, StepShape
from ostro.runner.jax.programs import Programs
from ostro.runner.jax.sampling import Drawn, draw
from ostro.runner.jax.weights import BY_COLUMNS, BY_ROWS, COPIED, Weights, weight_specs

PAGES = PartitionSpec(None, None, AXIS, None, None)
"""How pages are divided: by KV heads."""
COPIES = 8
"""Pages that one program copies at a time."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compiles the programs of one model. `done` is called after each."""

    mesh: Mesh
    model: StepProgram
    weights: Weights
    pages: jax.Array
    shapes: Sequence[StepShape]
    done: Callable[[], None]

    def compile(self) -> Programs:
        """Keys: ("step", shape), ("copy",), ("draw", rows, truncates), ("pad", rows), ("logits", last shape)."""
        programs = Programs(self.mesh)
        for shape in self.shapes:
            self._add_step(programs, shape)
        self._add_copy(programs)
        if self.model.described.head is not None:
            for rows in sorted({shape.rows for shape in self.shapes}):
                self._add_draws(programs, rows)
            self._add_logits(programs, self.shapes[-1])
        return programs

    def _add_step(self, programs: Programs, shape: StepShape) -> None:
        previous = self._argument((self.shapes[-1].rows,), np.int32, COPIED)
        integers = self._argument((shape.num_integers,), np.int32, COPIED)
        specs = (weight_specs(self.model.described), PAGES, COPIED, COPIED)
        results = StepResult(PAGES, COPIED, None if self.model.described.head is None else BY_COLUMNS)
        step = partial(self.model.step, shape=shape)
        arguments = (self.weights, self.pages, previous, integers)
        programs.add(("step", shape), step, arguments, specs, results, donated=(1,))
        self.done()

    def _add_copy(self, programs: Programs) -> None:
        pairs = self._argument((2, COPIES), np.int32, COPIED)
        copying = partial(_copied, page_size=self.model.page_size)
        programs.add(("copy",), copying, (self.pages, pairs), (PAGES, COPIED), PAGES, donated=(0,))
        self.done()

    def _add_draws(self, programs: Programs, rows: int) -> None:
        vocab = self.model.cut.vocab * self.model.cut.ranks
        arguments = (
            self._argument((rows, vocab), np.float32, BY_COLUMNS),
            self._argument((4, rows), np.int32, COPIED),
            self._argument((3, rows), np.float32, COPIED),
        )
        for truncates in (False, True):
            drawing = partial(draw, truncates=truncates)
            specs = (BY_COLUMNS, COPIED, COPIED)
            programs.add(("draw", rows, truncates), drawing, arguments, specs, Drawn(COPIED, COPIED))
            self.done()
        if rows < (most := self.shapes[-1].rows):
            tokens = self._argument((rows,), np.int32, COPIED)
            programs.add(("pad", rows), partial(_padded, most=most), (tokens,), (COPIED,), COPIED)
            self.done()

    def _add_logits(self, programs: Programs, shape: StepShape) -> None:
        hidden = self._argument((shape.tokens, self.model.described.shape.hidden_size), self.pages.dtype, COPIED)
        arguments = (self.weights.head_matrix, hidden, self._argument((shape.rows,), np.int32, COPIED))
        programs.add(("logits", shape), self.model.logits, arguments, (BY_ROWS, COPIED, COPIED), BY_COLUMNS)
        self.done()

    def _argument(self, shape: tuple[int, ...], dtype: npt.DTypeLike, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))


def _copied(pages: jax.Array, pairs: jax.Array, *, page_size: int) -> jax.Array:
    """Copies whole pages; a target beyond the last page is dropped."""
    sources, targets = (pairs[:, :, None] * page_size + jnp.arange(page_size)).reshape(2, -1)
    return pages.at[:, :, :, targets].set(pages[:, :, :, sources], mode="drop")


def _padded(tokens: jax.Array, *, most: int) -> jax.Array:
    return jnp.pad(tokens, (0, most - len(tokens)))
