"""The keys and values of all layers, in pages. Knows no sequences and no attention."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ostro.runner.jax.mesh import AXIS


class Pages(NamedTuple):
    """Arrays of [layers, pages, kv heads, page_size, head_dim]; on a rank, its own heads. Also their specs."""

    keys: Any
    values: Any

    @property
    def page_size(self) -> int:
        return int(self.keys.shape[3])

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self)

    @property
    def num_pages(self) -> int:
        return int(self.keys.shape[1])

    def stored(self, layer: int, slots: jax.Array, keys: jax.Array, values: jax.Array) -> "Pages":
        """With the keys and values of some tokens, [tokens, heads, head_dim], in their slots. Slots beyond the last
        page are written nowhere.
        """
        at = slots // self.page_size, slots % self.page_size
        return Pages(
            *(
                own.at[layer, at[0], :, at[1]].set(new.astype(own.dtype), mode="drop")
                for own, new in zip(self, (keys, values), strict=True)
            )
        )

    def copied(self, pairs: jax.Array) -> "Pages":
        """With pages pairs[0] copied to pairs[1] in all layers; a target beyond the last page is dropped."""
        sources, targets = pairs
        return Pages(*(own.at[:, targets].set(own[:, sources], mode="drop") for own in self))

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> "Pages":
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


_BY_HEADS = PartitionSpec(None, None, AXIS, None, None)
PAGES = Pages(_BY_HEADS, _BY_HEADS)
"""How pages are divided: by KV heads."""
