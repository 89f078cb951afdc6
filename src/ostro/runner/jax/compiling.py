"""Which programs a model needs, each for its shapes. Compiles none; knows no batch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ostro.models.cut import Cut
from ostro.runner.jax.attention import Attention, LoopAttention
from ostro.runner.jax.kept_programs import KeptPrograms
from ostro.runner.jax.layout import fits_tpu_kernel
from ostro.runner.jax.mesh import AXIS, is_over_processes
from ostro.runner.jax.pages import Pages
from ostro.runner.jax.placed import PlacedModel
from ostro.runner.jax.program import StepProgram, StepResult
from ostro.runner.jax.programs import Recipe
from ostro.runner.jax.sampling import Drawn, draw
from ostro.runner.jax.shapes import Sizes, StepShape
from ostro.runner.jax.weights import BY_COLUMNS, BY_ROWS, COPIED, weight_specs

COPIES = 8
"""Pages that one program copies at a time."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """Which programs a model needs on its mesh for a runner's sizes."""

    placed: PlacedModel
    sizes: Sizes

    @property
    def shapes(self) -> list[StepShape]:
        return self.sizes.shapes(self.placed.described.shape.max_seq_len, tile=self._attention.tile)

    def kept(self) -> KeptPrograms:
        """The programs of earlier starts."""
        placed, attention = self.placed, type(self._attention).__name__
        facts = [placed.described, placed.cut, np.dtype(placed.dtype).name, self.sizes, attention]
        return KeptPrograms(placed.mesh, facts)

    def recipes(self) -> list[Recipe]:
        """Keys: ("step", shape), ("copy",), ("draw", rows, truncates), ("logits", last shape).

        ("gather", rows) too if the mesh is over several processes.
        """
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
            specs=(weight_specs(placed.described), self._layout.specs(), COPIED, COPIED),
            results=StepResult(self._layout.specs(), COPIED, None if placed.described.head is None else BY_COLUMNS),
            donated=(1,),
        )

    def _copy(self) -> Recipe:
        return Recipe(
            key=("copy",),
            function=self._layout.copied,
            arguments=(self._pages, self._argument((2, COPIES), np.int32, COPIED)),
            specs=(self._layout.specs(), COPIED),
            results=self._layout.specs(),
            donated=(0,),
        )

    def _draws(self, rows: int) -> Iterator[Recipe]:
        vocab = self.placed.cut.vocab * self.placed.cut.ranks
        arguments = (
            self._argument((rows, vocab), np.float32, BY_COLUMNS),
            self._argument((self.shapes[-1].rows,), np.int32, COPIED),
            self._argument((4, rows), np.int32, COPIED),
            self._argument((3, rows), np.float32, COPIED),
        )
        for truncates in (False, True):
            yield Recipe(
                key=("draw", rows, truncates),
                function=partial(draw, truncates=truncates),
                arguments=arguments,
                specs=(BY_COLUMNS, COPIED, COPIED, COPIED),
                results=Drawn(COPIED, COPIED, COPIED),
                donated=(1,),
            )
        if is_over_processes(self.placed.mesh):
            yield Recipe(
                key=("gather", rows),
                function=_gathered,
                arguments=arguments[:1],
                specs=(BY_COLUMNS,),
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
        return StepProgram(self.placed.described, self.placed.cut, self._attention)

    @property
    def _attention(self) -> Attention:
        return attention_for(self.placed.platform, self.placed.cut, self.placed.dtype)

    @property
    def _layout(self) -> type[Pages]:
        return self._attention.layout

    def pages(self) -> Any:
        """Empty pages on the mesh."""
        shardings = jax.tree.map(partial(NamedSharding, self.placed.mesh), self._layout.specs())
        return jax.jit(self._empty, out_shardings=shardings)()

    @property
    def page_bytes(self) -> int:
        """The size of all ranks' pages."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self._pages)

    @property
    def head_dim(self) -> int:
        """Of heads as pages hold them."""
        return int(self._pages[0].shape[-1])

    @property
    def _pages(self) -> Any:
        arrays, specs = jax.eval_shape(self._empty), self._layout.specs()
        return jax.tree.map(lambda array, spec: self._argument(array.shape, array.dtype, spec), arrays, specs)

    def _empty(self) -> Any:
        return self._layout.empty(self.placed.pages_shape(self.sizes), self.placed.dtype)

    def _argument(self, shape: tuple[int, ...], dtype: npt.DTypeLike, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.placed.mesh, spec))


def _gathered(logits: jax.Array) -> jax.Array:
    return lax.all_gather(logits, AXIS, axis=1, tiled=True)


def attention_for(platform: str, cut: Cut, dtype: npt.DTypeLike) -> Attention:
    """The fastest that there is for the platform."""
    if platform == "cuda" and find_spec("jax_triton") is not None:
        from ostro.runner.jax.triton_attention import TritonAttention

        return TritonAttention(cut.heads // cut.kv_heads, exact=np.dtype(dtype) == np.float32)
    if platform == "tpu" and fits_tpu_kernel(cut.kv_heads, np.dtype(dtype).itemsize):
        from ostro.runner.jax.tpu_attention import TpuAttention

        return TpuAttention()
    return LoopAttention()
