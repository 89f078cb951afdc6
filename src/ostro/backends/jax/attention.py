"""Attention of a step's tokens to the keys and values in pages, on one rank. Knows no weights and no mesh.

A step's tokens are cut into tiles: up to `width` consecutive tokens of one sequence. All tiles walk through their
sequences' pages together, a block of pages per turn, with an online softmax. The number of turns is decided when the
step runs, by its longest context, so one program serves all lengths.

This runs on any platform. Where there is a kernel (`triton_attention`, `tpu_attention`), the kernel replaces it.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ostro.backends.jax.pages import Pages, SplitPages
from ostro.backends.jax.shapes import PAGES_PER_TURN
from ostro.models.architecture import AttentionSpec

_MASKED = -1e30
"""Finite, because a row that is fully masked so far must not become NaN."""


class Tiles(NamedTuple):
    """How a step's tokens are cut into tiles. All fields but the table have an entry per tile."""

    first: jax.Array
    """The number of its first token; out of range for an empty tile."""
    start: jax.Array
    """The position of its first token."""
    length: jax.Array
    """Its number of tokens, `width` at most."""
    row: jax.Array
    """The row of its sequence in the table."""
    table: jax.Array
    """[rows, pages]"""

    @property
    def ends(self) -> jax.Array:
        """The number of tokens up to a tile's last one; 0 for an empty tile."""
        return jnp.where(self.length > 0, self.start + self.length, 0)


class Attention(Protocol):
    """A way to compute attention. `tile` is the width that it wants for tiles of more than one token."""

    tile: int

    @property
    def layout(self) -> type[Pages]:
        """The page layout that it reads."""

    def __call__(
        self, queries: jax.Array, pages: Any, layer: int, tiles: Tiles, spec: AttentionSpec, *, width: int
    ) -> jax.Array:
        """[tokens, heads, head_dim], as are the queries. Pages hold this step's tokens too."""


class LoopAttention:
    layout = SplitPages
    tile = 16

    def __call__(
        self, queries: jax.Array, pages: SplitPages, layer: int, tiles: Tiles, spec: AttentionSpec, *, width: int
    ) -> jax.Array:
        tokens, heads, head_dim = queries.shape
        kv_heads, offsets = pages.keys.shape[2], jnp.arange(width)
        held = offsets < tiles.length[:, None]
        index = jnp.where(held, tiles.first[:, None] + offsets, tokens)
        positions = jnp.where(held, tiles.start[:, None] + offsets, 0)[:, :, None]
        groups = (*index.shape, kv_heads, heads // kv_heads)
        tiled = queries.at[index].get(mode="fill", fill_value=0).reshape(*groups, head_dim)
        scaled = tiled.astype(jnp.float32) * spec.scale
        span, table, ends = PAGES_PER_TURN * pages.page_size, tiles.table[tiles.row], tiles.ends[:, None]

        def turn(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            best, total, output = state
            turned = lax.dynamic_slice_in_dim(table, number * PAGES_PER_TURN, PAGES_PER_TURN, 1)
            at = number * span + jnp.arange(span)
            # Gathers from all layers' pages: slicing out the layer's own first would copy them.
            keys = _in_order(pages.keys[layer, turned])
            scores = jnp.einsum("nqkgd,nkcd->nqkgc", scaled, keys, precision=lax.Precision.HIGHEST)
            if spec.softcap is not None:
                scores = spec.softcap * jnp.tanh(scores / spec.softcap)
            seen = at <= positions
            if spec.window is not None:
                seen &= at > positions - spec.window
            scores = jnp.where(seen[:, :, None, None], scores, _MASKED)
            # Slots beyond a sequence's end may hold another's leftovers, even NaN, which no weight of zero silences.
            values = jnp.where((at < ends)[:, None, :, None], _in_order(pages.values[layer, turned]), 0)
            higher = jnp.maximum(best, scores.max(-1))
            kept, weights = jnp.exp(best - higher), jnp.exp(scores - higher[..., None])
            added = jnp.einsum("nqkgc,nkcd->nqkgd", weights, values, precision=lax.Precision.HIGHEST)
            return higher, total * kept + weights.sum(-1), output * kept[..., None] + added

        first = _first_turn(tiles, spec.window, span)
        last = (ends.max() + span - 1) // span
        empty = (jnp.full(groups, _MASKED), jnp.zeros(groups), jnp.zeros((*groups, head_dim)))
        _, total, output = lax.fori_loop(first, last, turn, empty)
        attended = (output / jnp.maximum(total, 1e-30)[..., None]).astype(queries.dtype)
        flat = attended.reshape(-1, heads, head_dim)
        return jnp.zeros((tokens, heads, head_dim), queries.dtype).at[index.reshape(-1)].set(flat, mode="drop")


def _in_order(pages: jax.Array) -> jax.Array:
    """[tiles, pages, heads, page_size, head_dim] -> [tiles, heads, tokens, head_dim], in float32."""
    tiles, _, heads, _, head_dim = pages.shape
    return pages.swapaxes(1, 2).reshape(tiles, heads, -1, head_dim).astype(jnp.float32)


def _first_turn(tiles: Tiles, window: int | None, span: int) -> jax.Array | int:
    """The first turn in which any tile sees anything: with a window, most of a long context is skipped."""
    if window is None:
        return 0
    oldest = jnp.where(tiles.length > 0, tiles.start - window + 1, jnp.iinfo(jnp.int32).max).min()
    return jnp.maximum(oldest, 0) // span
