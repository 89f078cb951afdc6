"""The keys and values of all layers, in pages, laid out as a platform's attention wants them. Knows no sequences and no
attention.
"""

from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy.typing as npt
from jax.sharding import PartitionSpec

from ostro.backends.jax.layout import in_whole_rows
from ostro.backends.jax.mesh import AXIS


class PagesShape(NamedTuple):
    """The shape of the pages; on a rank, with its own heads only."""

    layers: int
    pages: int
    kv_heads: int
    page_size: int
    head_dim: int


class Pages(Protocol):
    """A tuple of arrays."""

    @property
    def num_pages(self) -> int: ...

    @classmethod
    def empty(cls, shape: PagesShape, dtype: npt.DTypeLike) -> Self: ...

    @classmethod
    def specs(cls) -> Self:
        """How the arrays are divided over a mesh: by KV heads."""

    def stored(self, layer: int, slots: jax.Array, keys: jax.Array, values: jax.Array) -> Self:
        """The pages with the keys and values of some tokens, [tokens, heads, head_dim], in their slots. Writes beyond
        the last page are dropped.
        """

    def copied(self, pairs: jax.Array) -> Self:
        """The pages with pairs[0] copied to pairs[1] in all layers; a target beyond the last page is dropped."""


class SplitPages(NamedTuple):
    """Keys and values apart: [layers, pages, kv heads, page_size, head_dim]."""

    keys: Any
    values: Any

    @property
    def page_size(self) -> int:
        return int(self.keys.shape[3])

    @property
    def num_pages(self) -> int:
        return int(self.keys.shape[1])

    @classmethod
    def empty(cls, shape: PagesShape, dtype: npt.DTypeLike) -> Self:
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @classmethod
    def specs(cls) -> Self:
        by_heads = PartitionSpec(None, None, AXIS, None, None)
        return cls(by_heads, by_heads)

    def stored(self, layer: int, slots: jax.Array, keys: jax.Array, values: jax.Array) -> Self:
        at = slots // self.page_size, slots % self.page_size
        return type(self)(
            *(
                own.at[layer, at[0], :, at[1]].set(new.astype(own.dtype), mode="drop")
                for own, new in zip(self, (keys, values), strict=True)
            )
        )

    def copied(self, pairs: jax.Array) -> Self:
        return type(self)(*(_copied(own, pairs) for own in self))


class InterleavedPages(NamedTuple):
    """Each head's key, then its value: [layers, pages, page_size, 2 kv heads, head_dim]. Zeros pad the heads to whole
    rows of registers.
    """

    both: Any

    @property
    def page_size(self) -> int:
        return int(self.both.shape[2])

    @property
    def num_pages(self) -> int:
        return int(self.both.shape[1])

    @classmethod
    def empty(cls, shape: PagesShape, dtype: npt.DTypeLike) -> Self:
        heads = 2 * shape.kv_heads, in_whole_rows(shape.head_dim)
        return cls(jnp.zeros((shape.layers, shape.pages, shape.page_size, *heads), dtype))

    @classmethod
    def specs(cls) -> Self:
        return cls(PartitionSpec(None, None, None, AXIS, None))

    def stored(self, layer: int, slots: jax.Array, keys: jax.Array, values: jax.Array) -> Self:
        heads = jnp.stack((keys, values), 2).reshape(len(keys), -1, keys.shape[-1])
        at = slots // self.page_size, slots % self.page_size
        stored = self.padded(heads).astype(self.both.dtype)
        return type(self)(self.both.at[layer, at[0], at[1]].set(stored, mode="drop"))

    def copied(self, pairs: jax.Array) -> Self:
        return type(self)(_copied(self.both, pairs))

    def padded(self, heads: jax.Array) -> jax.Array:
        """The heads, padded to the width of those in the pages."""
        return jnp.pad(heads, ((0, 0), (0, 0), (0, self.both.shape[-1] - heads.shape[-1])))


def _copied(pages: jax.Array, pairs: jax.Array) -> jax.Array:
    sources, targets = pairs
    return pages.at[:, targets].set(pages[:, sources], mode="drop")
