"""Applies changes to scores that are divided over ranks; the twin of `backends.sampling.arrays`, but for
top-n-sigma.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ostro.backends.jax.edit_inputs import WORD_BITS, CellKind, EditInputs
from ostro.backends.jax.mesh import AXIS


def edited(scores: jax.Array, last: jax.Array, masks: jax.Array, integers: jax.Array, floats: jax.Array) -> jax.Array:
    """A rank's scores, [draws, vocabulary of the rank], after the changes in `EditInputs` and `masks`. `last` holds the
    tokens that the step before this one drew.
    """
    rows, width = scores.shape
    inputs = EditInputs.cut(integers, floats, rows)
    pending = jnp.where(inputs.pending < 0, last[jnp.maximum(-1 - inputs.pending, 0)], inputs.pending)
    recurs = (inputs.kind == CellKind.OCCURRENCE) & (inputs.token == pending[inputs.row])
    amount = jnp.where(recurs, inputs.amount_if_pending, inputs.amount)
    has_occurred = jnp.zeros(rows, bool).at[inputs.row].max(recurs)
    # Cells, then one per row for its pending token.
    row = jnp.concatenate((inputs.row, jnp.arange(rows)))
    own, pending_own = _columns(inputs.token, width), _columns(pending, width)

    def columns(is_meant: jax.Array, is_pending_meant: jax.Array | bool) -> jax.Array:
        """The columns to change; out of range for changes that do not apply."""
        return jnp.concatenate((jnp.where(is_meant, own, width), jnp.where(is_pending_meant, pending_own, width)))

    at = row, columns(inputs.kind == CellKind.ADD, False)
    scores = scores.at[at].add(jnp.concatenate((amount, jnp.zeros(rows))), mode="drop")
    at = row, columns(inputs.kind == CellKind.DISCOURAGE, True)
    # A token that occurs twice gets the same score twice: both are computed from the original.
    penalty, before = jnp.concatenate((amount, inputs.repetition)), scores.at[at].get(mode="fill", fill_value=0)
    scores = scores.at[at].set(jnp.where(before > 0, before / penalty, before * penalty), mode="drop")
    at = row, columns(inputs.kind >= CellKind.OCCURRENCE, ~has_occurred)
    scores = scores.at[at].add(-jnp.concatenate((amount, inputs.occurrence)), mode="drop")
    # Subtracted rather than assigned: scores that are not finite stay visible.
    return jnp.where(_bits(masks), scores, scores - jnp.inf)


def _columns(tokens: jax.Array, width: int) -> jax.Array:
    """The tokens' columns on this rank; out of range for other ranks' tokens."""
    columns = tokens - lax.axis_index(AXIS) * width
    return jnp.where((columns >= 0) & (columns < width), columns, width)


def _bits(words: jax.Array) -> jax.Array:
    """[rows, words] -> [rows, bits], the lowest bit of a word first."""
    bits = (words[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)) & 1
    return bits.reshape(len(words), -1) != 0
