"""Draws tokens from logits whose vocabulary is divided over ranks. Draws what `backends.sampling.sampler` draws for a
seed.

`backends.sampling.distribution` defines the draw. Here it needs no 64-bit numbers, which TPUs lack: an unsigned 64-bit
integer is a pair of 32-bit ones. Ranks race their own blocks of tokens and exchange only their winners. Top-k and top-p
sort nothing: the bits of a gap sort like an integer, so 31 halvings find the last gap that is kept.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from ostro.backends.jax.mesh import AXIS
from ostro.backends.jax.score_edits import edited
from ostro.backends.sampling.random_key import FACTOR_1, FACTOR_2, GOLDEN, SHIFT_1, SHIFT_2, SHIFT_3
from ostro.models.cut import BLOCK

_GAP_BITS = 31
"""A gap is never negative: its sign bit is 0."""
_SUMMED = 32
"""Partial sums added one after another. Few at a time keep float32's rounding errors small."""


class DrawSettings(NamedTuple):
    """One entry per draw."""

    source: Any
    """The row of logits to draw from."""
    top_k: Any
    """0 keeps all."""
    key_high: Any
    key_low: Any
    """The halves of the random stream's key, as signed 32-bit integers."""
    temperature: Any
    """0 is greedy."""
    top_p: Any
    min_p: Any

    @classmethod
    def of(cls, packed: jax.Array) -> "DrawSettings":
        """From [fields, draws]: integers, then the bits of numbers in float32."""
        numbers = len(cls._fields) - NUM_FLOATS
        return cls(*packed[:numbers], *lax.bitcast_convert_type(packed[numbers:], jnp.float32))


NUM_SETTINGS = len(DrawSettings._fields)
NUM_FLOATS = 3


class Drawn(NamedTuple):
    last: Any
    """The memory that the next step reads tokens from, with these at its beginning."""
    results: Any
    """[2, draws]: tokens, and the bits of the best scores, which are not finite if nothing could be drawn. One array,
    because each copy to the host takes as long as a small kernel.
    """

    def on_host(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Tokens and best scores. Waits for the device."""
        tokens, bits = np.asarray(self.results)
        return tokens, bits.view(np.float32)


class DrawKind(StrEnum):
    """The kinds of programs that draw. Each can do what those before it can."""

    PLAIN = "plain"
    TRUNCATED = "truncated"
    """With top-k and top-p."""
    EDITED = "edited"
    """With changes of scores. The program itself checks whether any row has a top-k or top-p, because a second program
    would take time to compile.
    """


def draw(logits: jax.Array, last: jax.Array, packed: jax.Array, *edits: jax.Array, kind: DrawKind) -> Drawn:
    """One token per draw, the same on every rank. `logits` is [rows, vocabulary of the rank], `packed` is the
    array behind `DrawSettings`.

    `edits` are those of `PackedEdits`, if the kind is EDITED.
    """
    settings = DrawSettings.of(packed)
    scores = logits[settings.source]
    if kind is DrawKind.EDITED:
        scores = edited(scores, last, *edits)
    rank = lax.axis_index(AXIS)
    # A maximum of gathered values keeps NaN, which the host checks for.
    peaks = lax.all_gather(scores.max(-1), AXIS).max(0)
    # Adding 0 turns -0.0 into 0.0, whose bits sort first.
    gaps = (peaks + 0.0)[:, None] - scores
    weights = _weigh(gaps, settings.temperature)
    if kind is DrawKind.TRUNCATED:
        weights = _truncated(gaps, weights, settings)
    elif kind is DrawKind.EDITED:
        is_truncated = (settings.top_k > 0).any() | (settings.top_p < 1.0).any()
        weights = lax.cond(is_truncated, _truncated, lambda gaps, weights, settings: weights, gaps, weights, settings)
    weights = jnp.where(weights >= settings.min_p[:, None], weights, 0)
    best = _first_of_ranks(-scores.max(-1), rank * scores.shape[1] + jnp.argmax(scores, -1))
    raced = _race(weights, settings, rank)
    tokens = jnp.where(settings.temperature > 0, raced, best).astype(jnp.int32)
    results = jnp.stack((tokens, lax.bitcast_convert_type(peaks, jnp.int32)))
    return Drawn(last.at[: len(tokens)].set(tokens), results)


def _weigh(gaps: jax.Array, temperature: jax.Array) -> jax.Array:
    return jnp.exp(gaps / -jnp.maximum(temperature, np.finfo(np.float32).tiny)[:, None])


def _race(weights: jax.Array, settings: DrawSettings, rank: jax.Array) -> jax.Array:
    blocks = weights.reshape(len(weights), -1, BLOCK)
    count = blocks.shape[1]
    key = (settings.key_high.astype(jnp.uint32), settings.key_low.astype(jnp.uint32))
    slots = exponentials(key, jnp.arange(BLOCK, dtype=jnp.uint32))
    noise = exponentials(key, BLOCK + rank.astype(jnp.uint32) * count + jnp.arange(count, dtype=jnp.uint32))
    times = noise / blocks.sum(-1)
    block = jnp.argmin(times, -1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    token = (rank * count + block) * BLOCK + jnp.argmin(slots / inside, -1)
    return _first_of_ranks(times.min(-1), token)


def _first_of_ranks(times: jax.Array, tokens: jax.Array) -> jax.Array:
    """The token of the rank with the shortest time; among equals, that of the lowest rank, whose ids are lowest."""
    winner = jnp.argmin(lax.all_gather(times, AXIS), 0)
    return jnp.take_along_axis(lax.all_gather(tokens, AXIS), winner[None], 0)[0]


def _truncated(gaps: jax.Array, weights: jax.Array, settings: DrawSettings) -> jax.Array:
    """Weights, zero where top-k or top-p drops a token. Equals are kept by lower id."""
    bits = lax.bitcast_convert_type(gaps, jnp.int32)
    weights = jnp.where(_top_k(bits, settings.top_k), weights, 0)
    kept = _top_p(bits, weights, settings.top_p)
    return jnp.where(kept | (settings.top_p >= 1.0)[:, None], weights, 0)


def _top_k(bits: jax.Array, top_k: jax.Array) -> jax.Array:
    def count(is_counted: jax.Array) -> jax.Array:
        return lax.psum(is_counted.sum(-1, dtype=jnp.int32), AXIS)

    last = _smallest(lambda limit: count(bits <= limit[:, None]) >= top_k, top_k)
    closer, equal = bits < last[:, None], bits == last[:, None]
    left = top_k - count(closer)
    in_order = jnp.cumsum(equal, -1, dtype=jnp.int32) + _before(equal.sum(-1, dtype=jnp.int32))[:, None]
    return closer | (equal & (in_order <= left[:, None])) | (top_k <= 0)[:, None]


def _top_p(bits: jax.Array, weights: jax.Array, top_p: jax.Array) -> jax.Array:
    def total(is_counted: jax.Array) -> jax.Array:
        return lax.psum(block_sum(jnp.where(is_counted, weights, 0)), AXIS)

    share = top_p * total(jnp.ones_like(bits, bool))
    last = _smallest(lambda limit: total(bits <= limit[:, None]) >= share, bits[:, 0])
    closer = bits < last[:, None]
    equal = jnp.where((bits == last[:, None]) & (weights > 0), weights, 0)
    # Equal gaps have equal weights, so the sum before the n-th of them is n times that weight.
    number = jnp.cumsum(equal > 0, -1, dtype=jnp.int32) - 1 + _before((equal > 0).sum(-1, dtype=jnp.int32))[:, None]
    return closer | ((equal > 0) & (total(closer)[:, None] + number * equal < share[:, None]))


def _smallest(is_enough: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """The smallest 31-bit integer per row that is enough; a larger one always is."""

    def halve(turn: jax.Array, low: jax.Array) -> jax.Array:
        middle = low + (jnp.int32(1) << (_GAP_BITS - 1 - turn))
        return jnp.where(is_enough(middle - 1), low, middle)

    return lax.fori_loop(0, _GAP_BITS, halve, jnp.zeros(like.shape, jnp.int32))


def _before(counts: jax.Array) -> jax.Array:
    """The sum of the lower ranks' counts."""
    gathered = lax.all_gather(counts, AXIS)
    lower = jnp.arange(len(gathered)) < lax.axis_index(AXIS)
    return jnp.where(lower[:, None], gathered, 0).sum(0)


def block_sum(weights: jax.Array) -> jax.Array:
    """The sum of each row, whose length is a multiple of BLOCK."""
    sums = weights.reshape(len(weights), -1, BLOCK).sum(-1)
    padded = jnp.pad(sums, ((0, 0), (0, -sums.shape[1] % _SUMMED)))
    return padded.reshape(len(weights), -1, _SUMMED).sum(-1).sum(-1)


Word = tuple[jax.Array, jax.Array]
"""An unsigned 64-bit integer: its upper and lower 32 bits."""


def exponentials(key: Word, index: jax.Array) -> jax.Array:
    """[keys, index]: numbers of the streams that `backends.sampling.random_stream` defines, in float32. Never zero or
    infinite.
    """
    steps = _times((jnp.zeros_like(index), index + 1), GOLDEN)
    high, low = _mixed(_plus((key[0][:, None], key[1][:, None]), (steps[0][None], steps[1][None])))
    # Above a half, a float32 would round to 1: there the complement is computed from complemented bits.
    small, complement = _uniform(high, low), _uniform(~high, ~low)
    return jnp.where(small < 0.5, -jnp.log1p(-small), -jnp.log(complement))


def _uniform(high: jax.Array, low: jax.Array) -> jax.Array:
    """The upper 52 of 64 bits, plus a half, as a fraction."""
    top, rest = high >> 12, (high << 20) | (low >> 12)
    return top.astype(jnp.float32) * 2.0**-20 + (rest.astype(jnp.float32) + 0.5) * 2.0**-52


def _mixed(word: Word) -> Word:
    """SplitMix64's finaliser."""
    word = _times(_folded(word, SHIFT_1), FACTOR_1)
    return _folded(_times(_folded(word, SHIFT_2), FACTOR_2), SHIFT_3)


def _folded(word: Word, shift: int) -> Word:
    """word ^ (word >> shift), for a shift below 32."""
    high, low = word
    return high ^ (high >> shift), low ^ ((low >> shift) | (high << (32 - shift)))


def _plus(one: Word, other: Word) -> Word:
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]).astype(jnp.uint32), low


def _times(word: Word, factor: int) -> Word:
    """The lower 64 bits of the product."""
    high, low = np.uint32(factor >> 32), np.uint32(factor & 0xFFFFFFFF)
    carried, product = _wide_product(word[1], low)
    return carried + word[0] * low + word[1] * high, product


def _wide_product(a: jax.Array, b: np.uint32) -> Word:
    """All 64 bits of a product of 32-bit integers, from products of 16-bit halves."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = np.uint32(b & 0xFFFF), np.uint32(b >> 16)
    lowest, cross, other_cross = a_low * b_low, a_low * b_high, a_high * b_low
    middle = (lowest >> 16) + (cross & 0xFFFF) + (other_cross & 0xFFFF)
    high = a_high * b_high + (cross >> 16) + (other_cross >> 16) + (middle >> 16)
    return high, (lowest & 0xFFFF) | (middle << 16)
