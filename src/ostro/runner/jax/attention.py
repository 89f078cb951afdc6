"""Attention of a step's tokens to the keys and values in pages, on one rank. Knows no weights and no mesh.

A step's tokens are cut into tiles: up to `width` consecutive tokens of one sequence. All tiles walk through their
sequences' pages together, a block of pages per turn, with an online softmax. The number of turns is decided when the
step runs, by its longest context, so one program serves all lengths.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ostro.models.architecture import AttentionSpec
from ostro.runner.jax.shapes import PAGES_PER_TURN

_MASKED = -1e30
"""Finite, because a row of which everything is masked so far must not become NaN."""


class Tiles(NamedTuple):
    """How a step's tokens are cut into tiles."""

    index: jax.Array
    """[tiles, width]: the token at each place; out of range where a tile has none."""
    positions: jax.Array
    """[tiles, width]: its position; 0 where there is none."""
    ends: jax.Array
    """[tiles]: the number of tokens up to a tile's last one; 0 for an empty tile."""
    starts: jax.Array
    """[tiles]: the position of a tile's first token."""
    table: jax.Array
    """[tiles, pages]: the pages of its sequence."""


def make_tiles(
    positions: jax.Array, first: jax.Array, length: jax.Array, table: jax.Array, row: jax.Array, width: int
) -> Tiles:
    """`first` and `length` give each tile's tokens, `row` its sequence's row of the page table."""
    offsets = jnp.arange(width)
    inside = offsets < length[:, None]
    index = jnp.where(inside, first[:, None] + offsets, positions.shape[0])
    starts = positions.at[first].get(mode="fill", fill_value=0)
    own = jnp.where(inside, starts[:, None] + offsets, 0)
    ends = jnp.where(length > 0, starts + length, 0)
    return Tiles(index=index, positions=own, ends=ends, starts=starts, table=table[row])


def attend(
    queries: jax.Array, pages: jax.Array, layer: int, tiles: Tiles, spec: AttentionSpec, page_size: int
) -> jax.Array:
    """[tokens, heads, head_dim]. Pages are [layers, 2, kv heads, slots, head_dim], and hold this step's tokens too."""
    tokens, heads, head_dim = queries.shape
    kv_heads = pages.shape[2]
    groups = (len(tiles.index), tiles.index.shape[1], kv_heads, heads // kv_heads)
    tiled = queries.at[tiles.index].get(mode="fill", fill_value=0).reshape(*groups, head_dim)
    scaled = tiled.astype(jnp.float32) * spec.scale
    span = PAGES_PER_TURN * page_size
    positions = tiles.positions[:, :, None]

    def turn(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, total, output = state
        turned = lax.dynamic_slice_in_dim(tiles.table, number * PAGES_PER_TURN, PAGES_PER_TURN, 1)
        slots = (turned[:, :, None] * page_size + jnp.arange(page_size)).reshape(len(turned), -1)
        at = number * span + jnp.arange(span)
        # One gather from all layers' pages: a layer's own, cut out first, would be a copy of them.
        keys = pages[layer, 0, :, slots].astype(jnp.float32)
        scores = jnp.einsum("nqkgd,nckd->nqkgc", scaled, keys, precision=lax.Precision.HIGHEST)
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        seen = at <= positions
        if spec.window is not None:
            seen &= at > positions - spec.window
        scores = jnp.where(seen[:, :, None, None], scores, _MASKED)
        # Slots beyond a sequence's end may hold another's leftovers, even NaN, which a weight of zero does not silence.
        owned = (at < tiles.ends[:, None])[:, :, None, None]
        values = jnp.where(owned, pages[layer, 1, :, slots], 0).astype(jnp.float32)
        higher = jnp.maximum(best, scores.max(-1))
        kept, weights = jnp.exp(best - higher), jnp.exp(scores - higher[..., None])
        added = jnp.einsum("nqkgc,nckd->nqkgd", weights, values, precision=lax.Precision.HIGHEST)
        return higher, total * kept + weights.sum(-1), output * kept[..., None] + added

    first = _first_turn(tiles, spec.window, span)
    last = (tiles.ends.max() + span - 1) // span
    empty = (jnp.full(groups, _MASKED), jnp.zeros(groups), jnp.zeros((*groups, head_dim)))
    _, total, output = lax.fori_loop(first, last, turn, empty)
    attended = (output / jnp.maximum(total, 1e-30)[..., None]).astype(queries.dtype)
    flat = attended.reshape(-1, heads, head_dim)
    return jnp.zeros((tokens, heads, head_dim), queries.dtype).at[tiles.index.reshape(-1)].set(flat, mode="drop")


def _first_turn(tiles: Tiles, window: int | None, span: int) -> jax.Array | int:
    """The first turn in which any tile sees anything: with a window, most of a long context is skipped."""
    if window is None:
        return 0
    oldest = jnp.where(tiles.ends > 0, tiles.starts - window + 1, jnp.iinfo(jnp.int32).max).min()
    return jnp.maximum(oldest, 0) // span
