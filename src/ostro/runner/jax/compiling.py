"""Which programs a model needs, each for its shapes. Compiles none; knows no batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from ostro.runner.jax.kept_programs import KeptPrograms
from ostro.runner.jax.mesh import AXIS
from ostro.runner.jax.placed import PlacedModel
from ostro.runner.jax.program import StepProgram, StepResult
from ostro.runner.jax.programs import Recipe
from ostro.runner.jax.sampling import Drawn, draw
from ostro.runner.jax.shapes import Sizes, StepShape
from ostro.runner.jax.weights import BY_COLUMNS, BY_ROWS, COPIED, weight_specs

PAGES = PartitionSpec(None, None, AXIS, None, None)
"""How pages are divided: by KV heads."""
COPIES = 8
"""Pages that one program copies at a time."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """Which programs a model needs on its mesh for a runner's sizes."""

    placed: PlacedModel
    sizes: Sizes

    @property
    def shapes(self) -> list[StepShape]:
        return self.sizes.shapes(self.placed.described.shape.max_seq_len)

    def kept(self) -> KeptPrograms:
        """The programs of earlier starts."""
        placed = self.placed
        return KeptPrograms(placed.mesh, [placed.described, placed.cut, np.dtype(placed.dtype).name, self.sizes])

    def recipes(self) -> list[Recipe]:
        """Keys: ("step", shape), ("copy",), ("draw", rows, truncates), ("pad", rows), ("logits", last shape)."""
        recipes = [*map(self.step, self.shapes), self._copy()]
        if self.placed.described.head is not None:
            for rows in sorted({shape.rows for shape in self.shapes}):
                recipes += self._draws(rows)
            recipes.append(self._logits(self.shapes[-1]))
        return recipes

    def step(self, shape: StepShape) -> Recipe:
        placed = self.placed
        previous = self._argument((self.shapes[-1].rows,), np.int32, COPIED)
        integers = self._argument((shape.num_integers,), np.int32, COPIED)
        return Recipe(
            key=("step", shape),
            function=partial(self._model.step, shape=shape),
            arguments=(placed.weights, self._pages, previous, integers),
            specs=(weight_specs(placed.described), PAGES, COPIED, COPIED),
            results=StepResult(PAGES, COPIED, None if placed.described.head is None else BY_COLUMNS),
            donated=(1,),
        )

    def _copy(self) -> Recipe:
        return Recipe(
            key=("copy",),
            function=partial(_copied, page_size=self.sizes.page_size),
            arguments=(self._pages, self._argument((2, COPIES), np.int32, COPIED)),
            specs=(PAGES, COPIED),
            results=PAGES,
            donated=(0,),
        )

    def _draws(self, rows: int) -> Iterator[Recipe]:
        vocab = self.placed.cut.vocab * self.placed.cut.ranks
        arguments = (
            self._argument((rows, vocab), np.float32, BY_COLUMNS),
            self._argument((4, rows), np.int32, COPIED),
            self._argument((3, rows), np.float32, COPIED),
        )
        for truncates in (False, True):
            yield Recipe(
                key=("draw", rows, truncates),
                function=partial(draw, truncates=truncates),
                arguments=arguments,
                specs=(BY_COLUMNS, COPIED, COPIED),
                results=Drawn(COPIED, COPIED),
            )
        if rows < (most := self.shapes[-1].rows):
            yield Recipe(
                key=("pad", rows),
                function=partial(_padded, most=most),
                arguments=(self._argument((rows,), np.int32, COPIED),),
                specs=(COPIED,),
                results=COPIED,
            )

    def _logits(self, shape: StepShape) -> Recipe:
        hidden_size = self.placed.described.shape.hidden_size
        return Recipe(
            key=("logits", shape),
            function=self._model.logits,
            arguments=(
                self.placed.weights.head_matrix,
                self._argument((shape.tokens, hidden_size), self.placed.dtype, COPIED),
                self._argument((shape.rows,), np.int32, COPIED),
            ),
            specs=(BY_ROWS, COPIED, COPIED),
            results=BY_COLUMNS,
        )

    @property
    def _model(self) -> StepProgram:
        return StepProgram(self.placed.described, self.placed.cut, self.sizes.page_size)

    @property
    def _pages(self) -> Any:
        return self._argument(self.placed.pages_shape(self.sizes), self.placed.dtype, PAGES)

    def _argument(self, shape: tuple[int, ...], dtype: npt.DTypeLike, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.placed.mesh, spec))


def _copied(pages: jax.Array, pairs: jax.Array, *, page_size: int) -> jax.Array:
    """Copies whole pages; a target beyond the last page is dropped."""
    sources, targets = (pairs[:, :, None] * page_size + jnp.arange(page_size)).reshape(2, -1)
    return pages.at[:, :, :, targets].set(pages[:, :, :, sources], mode="drop")


def _padded(tokens: jax.Array, *, most: int) -> jax.Array:
    return jnp.pad(tokens, (0, most - len(tokens)))
