"""Log-probabilities of logits that are divided over ranks; the twin of `backends.sampling.arrays`. Ranks
exchange their best tokens, never their logits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from ostro.backends.jax.mesh import AXIS
from ostro.backends.jax.sampling import block_sum
from ostro.engine.runner import TokenLogprob
from ostro.models.cut import BLOCK

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Logprobs(NamedTuple):
    """One entry per position; arrays of the host."""

    token: Ints
    rank: Ints
    """The token's rank, from 1."""
    own: Floats
    """The token's log-probability."""
    top_tokens: Ints
    """[positions, top]: the most likely tokens, and their log-probabilities."""
    top: Floats

    @classmethod
    def of(cls, packed: Any) -> "Logprobs":
        """From the result of `logprobs`. Waits for the device."""
        whole = np.asarray(packed)
        tokens, numbers = np.split(whole[:, 3:], 2, axis=1)
        token, rank, own = whole[:, :3].T
        return cls(token, rank, own.copy().view(np.float32), tokens, numbers.copy().view(np.float32))

    def entry(self, number: int, top: int) -> TokenLogprob:
        """One position's log-probability, with its `top` most likely tokens."""
        listed = zip(self.top_tokens[number, :top].tolist(), self.top[number, :top].tolist(), strict=True)
        return TokenLogprob(int(self.token[number]), float(self.own[number]), int(self.rank[number]), tuple(listed))


def logprobs(logits: jax.Array, rows: jax.Array, chosen: jax.Array, *, top: int) -> jax.Array:
    """Log-probabilities of tokens chosen[0, i] in rows rows[i], and of the `top` most likely ones.

    `logits` is [rows, vocabulary of the rank]; `chosen` may be the results of a draw. The result, the same on every
    rank, is one array, because each copy to the host takes time: a row per position, with the bits of float32 numbers.
    """
    logits, tokens = logits[rows], chosen[0]
    # Never above zero. Ranks and probabilities both derive from these, so they agree.
    below = logits - lax.all_gather(logits.max(-1), AXIS).max(0)[:, None]
    log_total = jnp.log(lax.psum(block_sum(jnp.exp(below)), AXIS))[:, None]
    width = below.shape[1]
    column = tokens - lax.axis_index(AXIS) * width
    is_here = (column >= 0) & (column < width)
    here = jnp.take_along_axis(below, jnp.clip(column, 0, width - 1)[:, None], 1)[:, 0]
    own = lax.psum(jnp.where(is_here, here, 0), AXIS)[:, None]
    rank = lax.psum((below > own).sum(-1, dtype=jnp.int32), AXIS) + 1
    best, ids = _largest_of_ranks(below, top)
    numbers = [lax.bitcast_convert_type(each - log_total, jnp.int32) for each in (own, best)]
    return jnp.concatenate((tokens[:, None], rank[:, None], numbers[0], ids, numbers[1]), 1)


def _largest_of_ranks(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest values and their ids, largest first; equals by lower id, which lower ranks have."""
    best, columns = _largest(values, count)
    gathered = lax.all_gather(best, AXIS, axis=1, tiled=True)
    ids = lax.all_gather(columns + lax.axis_index(AXIS) * values.shape[1], AXIS, axis=1, tiled=True)
    best, at = lax.top_k(gathered, count)
    return best, jnp.take_along_axis(ids, at, 1)


def _largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Sorts no whole row: the largest values are in the blocks with the largest maxima, in the lower of equal ones."""
    blocks = values.reshape(len(values), -1, BLOCK)
    _, chosen = lax.top_k(blocks.max(-1), min(count, blocks.shape[1]))
    # In order, so that ties stay sorted by id.
    chosen = jnp.sort(chosen, -1)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(len(values), -1)
    best, at = lax.top_k(candidates, count)
    return best, jnp.take_along_axis(chosen, at // BLOCK, 1) * BLOCK + at % BLOCK
