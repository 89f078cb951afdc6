"""The programs that a model needs, with the shapes of each. Compiles none; knows no batch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ostro.backends.jax.attention import Attention, LoopAttention
from ostro.backends.jax.edit_inputs import WORD_BITS, EditInputs
from ostro.backends.jax.kept_programs import KeptPrograms
from ostro.backends.jax.layout import fits_tpu_kernel, rank_state
from ostro.backends.jax.logprobs import logprobs
from ostro.backends.jax.mesh import AXIS, is_over_processes
from ostro.backends.jax.pages import Pages
from ostro.backends.jax.placed import PlacedModel
from ostro.backends.jax.program import Generated, StepProgram, StepResult
from ostro.backends.jax.programs import Recipe
from ostro.backends.jax.sampling import NUM_SETTINGS, DrawKind, Drawn, draw
from ostro.backends.jax.shapes import Sizes, StepShape
from ostro.backends.jax.states import Cache, States
from ostro.backends.jax.weights import BY_COLUMNS, BY_ROWS, COPIED, weight_specs
from ostro.models.cut import Cut
from ostro.sampling_params import MAX_LOGPROBS

COPIES = 8
"""Pages or states that one program copies at a time."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """Lists the programs that a model needs on its mesh for a runner's sizes."""

    placed: PlacedModel
    sizes: Sizes

    @property
    def shapes(self) -> list[StepShape]:
        return self.sizes.shapes(self.placed.described.shape.max_seq_len, tile=self._attention.tile)

    @property
    def step_shapes(self) -> list[StepShape]:
        """The shapes of all steps: with adapters, each shape twice."""
        adapted = [] if self.placed.adapters is None else [shape._replace(adapted=True) for shape in self.shapes]
        return self.shapes + adapted

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask, including those for the vocabulary's padding."""
        return self.placed.cut.vocab * self.placed.cut.ranks // WORD_BITS

    def kept(self) -> KeptPrograms:
        """The programs of earlier starts."""
        placed, attention = self.placed, type(self._attention).__name__
        widths = None if placed.adapters is None else placed.adapters.layout.widths
        facts = [placed.described, placed.cut, np.dtype(placed.dtype).name, self.sizes, attention, widths]
        return KeptPrograms(placed.mesh, facts)

    def recipes(self) -> list[Recipe]:
        """Keys: ("step", shape), ("copy",), ("draw", rows, kind), ("logprobs", rows), ("logits", last shape).

        Also ("generate", shape, kind) for few rows, ("copy states",) for a model with states, and ("gather", rows) if
        the mesh spans several processes.
        """
        recipes = [*map(self.step, self.step_shapes), *self._copies()]
        if self.placed.described.head is not None:
            for rows in sorted({shape.rows for shape in self.shapes}):
                recipes += self._draws(rows)
            recipes.append(self._logits(self.shapes[-1]))
            recipes += [self._generate(shape, kind) for shape, kind in self._drawing_steps()]
        return recipes

    def largest(self) -> list[Recipe]:
        """The recipes that may take the most memory: the largest step, and the programs that read its logits."""
        last = self.step_shapes[-1]
        return [self.step(last), *(() if self.placed.described.head is None else self._draws(last.rows))]

    def _drawing_steps(self) -> Iterator[tuple[StepShape, DrawKind]]:
        """The shapes of steps that also draw, with the kinds of draws."""
        return product((shape for shape in self.step_shapes if shape.draws), (DrawKind.PLAIN, DrawKind.TRUNCATED))

    def step(self, shape: StepShape) -> Recipe:
        arguments, specs = self._step_arguments(shape, shape.num_integers)
        return Recipe(
            key=("step", shape),
            function=partial(self._model.step, shape=shape),
            arguments=arguments,
            specs=specs,
            results=StepResult(self._cache_specs, COPIED, None if self.placed.described.head is None else BY_COLUMNS),
            donated=(1,),
        )

    def _generate(self, shape: StepShape, kind: DrawKind) -> Recipe:
        arguments, specs = self._step_arguments(shape, shape.num_integers + NUM_SETTINGS * shape.rows)
        return Recipe(
            key=("generate", shape, kind),
            function=partial(self._model.generate, shape=shape, kind=kind),
            arguments=arguments,
            specs=specs,
            results=Generated(self._cache_specs, Drawn(COPIED, COPIED)),
            donated=(1, 2),
        )

    def _step_arguments(self, shape: StepShape, num_integers: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """A step's arguments, and how they are divided over the mesh."""
        placed = self.placed
        previous = self._argument((self.shapes[-1].rows,), np.int32, COPIED)
        integers = self._argument((num_integers,), np.int32, COPIED)
        adapters = placed.adapters if shape.adapted else None
        tables = () if adapters is None else (adapters.tables,)
        table_specs = () if adapters is None else (adapters.specs(),)
        return (
            (placed.weights, self._cache, previous, integers, *tables),
            (weight_specs(placed.described), self._cache_specs, COPIED, COPIED, *table_specs),
        )

    def _copies(self) -> Iterator[Recipe]:
        pairs = self._argument((2, COPIES), np.int32, COPIED)
        for key, copied, kept, specs in (
            ("copy", self._layout.copied, self._cache.pages, self._cache_specs.pages),
            ("copy states", States.copied, self._cache.states, self._cache_specs.states),
        ):
            if kept is not None:
                yield Recipe(
                    key=(key,),
                    function=copied,
                    arguments=(kept, pairs),
                    specs=(specs, COPIED),
                    results=specs,
                    donated=(0,),
                )

    def _draws(self, rows: int) -> Iterator[Recipe]:
        vocab = self.placed.cut.vocab * self.placed.cut.ranks
        arguments = (
            self._argument((rows, vocab), np.float32, BY_COLUMNS),
            self._argument((self.shapes[-1].rows,), np.int32, COPIED),
            self._argument((NUM_SETTINGS, rows), np.int32, COPIED),
        )
        integers, floats = EditInputs.sizes(rows)
        edits = (
            self._argument((rows, self.mask_words), np.uint32, BY_COLUMNS),
            self._argument((integers,), np.int32, COPIED),
            self._argument((floats,), np.float32, COPIED),
        )
        for kind in DrawKind:
            further, specs = (edits, (BY_COLUMNS, COPIED, COPIED)) if kind is DrawKind.EDITED else ((), ())
            yield Recipe(
                key=("draw", rows, kind),
                function=partial(draw, kind=kind),
                arguments=arguments + further,
                specs=(BY_COLUMNS, COPIED, COPIED, *specs),
                results=Drawn(COPIED, COPIED),
                donated=(1,),
            )
        yield Recipe(
            key=("logprobs", rows),
            function=partial(logprobs, top=min(MAX_LOGPROBS, self.placed.described.shape.vocab_size)),
            arguments=(
                arguments[0],
                self._argument((rows,), np.int32, COPIED),
                self._argument((2, rows), np.int32, COPIED),
            ),
            specs=(BY_COLUMNS, COPIED, COPIED),
            results=COPIED,
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

    def cache(self) -> Cache:
        """Empty pages and states on the mesh."""
        shardings = jax.tree.map(partial(NamedSharding, self.placed.mesh), self._cache_specs)
        made: Cache = jax.jit(self._empty, out_shardings=shardings)()
        return made

    @property
    def cache_bytes(self) -> int:
        """The size of all ranks' pages and states."""
        return _nbytes(self._cache)

    @property
    def state_bytes(self) -> int:
        """The size of a slot, on all ranks together."""
        return _nbytes(self._cache.states) // max(1, self.sizes.num_states)

    @property
    def head_dim(self) -> int:
        """The width of heads as pages hold them."""
        return int(jax.tree.leaves(self._cache.pages)[0].shape[-1])

    @property
    def _cache(self) -> Cache:
        arrays, specs = jax.eval_shape(self._empty), self._cache_specs
        made: Cache = jax.tree.map(lambda array, spec: self._argument(array.shape, array.dtype, spec), arrays, specs)
        return made

    @property
    def _cache_specs(self) -> Any:
        state = rank_state(self.placed.described, self.placed.cut)
        return Cache(self._layout.specs(), None if state is None else States.specs(state))

    def _empty(self) -> Cache:
        placed = self.placed
        states = placed.states_shape(self.sizes)
        return Cache(
            self._layout.empty(placed.pages_shape(self.sizes), placed.dtype),
            None if states is None else States.empty(states, placed.dtype),
        )

    def _argument(self, shape: tuple[int, ...], dtype: npt.DTypeLike, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.placed.mesh, spec))


def _nbytes(arrays: Any) -> int:
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in jax.tree.leaves(arrays))


def _gathered(logits: jax.Array) -> jax.Array:
    return lax.all_gather(logits, AXIS, axis=1, tiled=True)


def attention_for(platform: str, cut: Cut, dtype: npt.DTypeLike) -> Attention:
    """The fastest attention for the platform."""
    if platform == "cuda" and find_spec("jax_triton") is not None:
        from ostro.backends.jax.triton_attention import TritonAttention

        return TritonAttention(cut.heads // cut.kv_heads, exact=np.dtype(dtype) == np.float32)
    if platform == "tpu" and fits_tpu_kernel(cut.kv_heads, np.dtype(dtype).itemsize):
        from ostro.backends.jax.tpu_attention import TpuAttention

        return TpuAttention()
    return LoopAttention()
