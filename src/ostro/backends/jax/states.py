"""The recurrent states of all layers, in slots, divided over a mesh by heads and channels. Knows no sequences and no
formulas.
"""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy.typing as npt
from jax import lax
from jax.sharding import PartitionSpec

from ostro.backends.jax.mesh import AXIS
from ostro.backends.jax.pages import Pages
from ostro.models.architecture import State


class StatesShape(NamedTuple):
    """The shape of the states; on a rank, with its own heads and channels only."""

    layers: int
    slots: int
    state: State
    """A layer's."""


class States(NamedTuple):
    """Slots beyond the last are no one's: what is written there is dropped."""

    inputs: Any
    """The latest inputs of convolutions, [layers, slots, inputs, channels]."""
    matrices: Any
    """[layers, slots, heads, rows, columns], in float32; None for mixers without them."""

    @property
    def num_slots(self) -> int:
        return int(self.inputs.shape[1])

    @classmethod
    def empty(cls, shape: StatesShape, dtype: npt.DTypeLike) -> Self:
        inputs, matrices = shape.state
        slots = shape.layers, shape.slots
        return cls(
            jnp.zeros((*slots, *inputs), dtype),
            None if matrices is None else jnp.zeros((*slots, *matrices), jnp.float32),
        )

    @classmethod
    def specs(cls, state: State) -> Self:
        by_channels, by_heads = (PartitionSpec(None, None, *axes) for axes in ((None, AXIS), (AXIS, None, None)))
        return cls(by_channels, None if state.matrices is None else by_heads)

    def copied(self, pairs: jax.Array) -> Self:
        """The states with slots pairs[0] copied to pairs[1] in all layers, in order. Pairs to beyond the last slot come
        last, and are skipped.
        """

        def copy(number: jax.Array, states: Self) -> Self:
            source, target = pairs[0, number], pairs[1, number]
            return jax.tree.map(lambda own: own.at[:, target].set(own[:, source]), states)

        return lax.fori_loop(0, (pairs[1] < self.num_slots).sum(), copy, self)


class Cache(NamedTuple):
    """All that a model keeps of sequences; also the specs."""

    pages: Pages
    states: States | None
    """None for a model without recurrent layers."""
