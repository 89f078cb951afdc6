"""Mixers with a recurrent state, as one rank computes them between its projections: the formulas of
`models.architecture`, and how a step's sequences advance their states. Knows no weights' places and no batch.

The recurrence is taken token by token, in prompts too, so that it does not matter where a prompt is cut, and a state
can be captured after any token. A step of one token per sequence advances all sequences at once. In any other step one
span follows the other: tokens of one sequence, up to where its chunk ends or its state is captured. Sums over a state's
rows are no matmuls, which an accelerator would round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ostro.backends.jax.inputs import StepInputs
from ostro.backends.jax.mesh import AXIS
from ostro.backends.jax.states import States
from ostro.models.architecture import Convolution, GatedDelta, Mamba2, Recurrent, ShortConvolution

Vectors = Callable[[str], jax.Array]
Advance = Callable[..., tuple[jax.Array, jax.Array]]
"""Advances matrices by a token: takes them, [sequences, heads, …], and what is read of each sequence's token. Returns
the new ones, and what is computed for each token.
"""


class Spans(NamedTuple):
    """A step's sequences, and the spans that their tokens are cut into. Slots beyond the last one mean none."""

    owner: jax.Array
    """The number of each token's sequence."""
    first: jax.Array
    """The number of each sequence's first token."""
    slot: jax.Array
    """The slot of each sequence's state; none for padding."""
    fresh: jax.Array
    """Whether each sequence's state has seen no token yet."""
    start: jax.Array
    """The number of each span's first token. Spans are in order; where each is one token, those that are captured come
    first.
    """
    length: jax.Array
    """0 for padding, which comes last."""
    ended: jax.Array
    """The slot of the span's sequence if it is the sequence's last one."""
    captured: jax.Array
    """The slot that the state after the span is copied to."""
    single: bool
    """Whether each sequence has one token, whose number is its own."""

    @classmethod
    def of(cls, inputs: StepInputs, width: int) -> "Spans":
        return cls(
            inputs.owners,
            inputs.first,
            inputs.state_slots,
            inputs.positions[inputs.first] == 0,
            inputs.span_start,
            inputs.span_length,
            inputs.span_ended,
            inputs.span_captured,
            width == 1,
        )


class Mixed(NamedTuple):
    output: jax.Array
    """What the output projection reads."""
    states: States


class LayerStates(NamedTuple):
    """One layer's part of a step's states."""

    states: States
    layer: int
    """Counts the layers that keep a state."""
    spans: Spans

    def convolved(self, conv: Convolution, x: jax.Array, vectors: Vectors) -> tuple[jax.Array, "LayerStates"]:
        """A causal convolution of each channel of the tokens, in float32."""
        weight, spans, kept = vectors(f"{conv.name}.weight").reshape(conv.taps, -1), self.spans, self.states.inputs
        before = conv.taps - 1
        old = kept.at[self.layer, spans.slot].get(mode="clip")
        old = jnp.where(spans.fresh[:, None, None], 0, old)
        known = jnp.concatenate((old.reshape(-1, x.shape[1]), x))

        def place(token: jax.Array, owner: jax.Array) -> jax.Array:
            """Where the input of a token is in `known`; the token may come before the sequence's first in this step."""
            position = token - spans.first[owner]
            return jnp.where(position < 0, (owner + 1) * before + position, len(spans.slot) * before + token)

        tokens = jnp.arange(len(x))
        # Tap by tap, so that a token's sum has the same order however the tokens are cut.
        total = weight[before] * x.astype(jnp.float32)
        for back in range(1, conv.taps):
            total += weight[before - back] * known[place(tokens - back, spans.owner)].astype(jnp.float32)
        latest = spans.start + spans.length - before
        last = place(latest[:, None] + jnp.arange(before), spans.owner[spans.start][:, None])
        for slots in (spans.ended, spans.captured):
            kept = kept.at[self.layer, slots].set(known[last], mode="drop")
        biased = total + vectors(f"{conv.name}.bias") if conv.bias else total
        return biased, self._replace(states=self.states._replace(inputs=kept))

    def recurred(self, advance: Advance, *read: jax.Array) -> tuple[jax.Array, "LayerStates"]:
        """Advances the layer's matrices. Arrays that are read have an entry for each token, and so has the result."""
        found, matrices = (self._at_once if self.spans.single else self._by_span)(advance, *read)
        return found, self._replace(states=self.states._replace(matrices=matrices))

    def _at_once(self, advance: Advance, *read: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept, spans, layer = self.states.matrices, self.spans, self.layer
        old = kept.at[layer, spans.slot].get(mode="clip")
        new, found = advance(jnp.where(spans.fresh[:, None, None, None], 0, old), *read)
        kept = kept.at[layer, spans.slot].set(new, mode="drop")

        def capture(number: jax.Array, kept: jax.Array) -> jax.Array:
            state = kept[layer, spans.slot[spans.start[number]]]
            return kept.at[layer, spans.captured[number]].set(state)

        return found, lax.fori_loop(0, (spans.captured < kept.shape[1]).sum(), capture, kept)

    def _by_span(self, advance: Advance, *read: jax.Array) -> tuple[jax.Array, jax.Array]:
        spans, layer = self.spans, self.layer
        of_token = jax.eval_shape(lambda: advance(self.states.matrices[layer, :1], *(own[:1] for own in read))[1])
        found = jnp.zeros((len(read[0]), *of_token.shape[1:]), of_token.dtype)

        def token(at: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            matrices, found = carried
            new, own = advance(matrices, *(lax.dynamic_slice_in_dim(each, at, 1) for each in read))
            return new, lax.dynamic_update_slice_in_dim(found, own, at, 0)

        def span(number: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kept, found = carried
            start = spans.start[number]
            owner = spans.owner[start]
            slot, is_fresh = spans.slot[owner], spans.fresh[owner] & (start == spans.first[owner])
            old = jnp.where(is_fresh, 0, kept[layer, slot])[None]
            matrices, found = lax.fori_loop(start, start + spans.length[number], token, (old, found))
            # Read again by the sequence's next span.
            for target in (slot, spans.captured[number]):
                kept = kept.at[layer, target].set(matrices[0], mode="drop")
            return kept, found

        kept, found = lax.fori_loop(0, (spans.length > 0).sum(), span, (self.states.matrices, found))
        return found, kept


def delta_step(
    s: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, kept: jax.Array, strength: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence: s [n, heads, key_dim, value_dim]; q, k [n, heads, key_dim]; v [n, heads, value_dim];
    the share of s that is kept, and the strength of what is written, [n, heads].
    """
    s = s * kept[..., None, None]
    written = (v - (k[..., None] * s).sum(-2)) * strength[..., None]
    s = s + k[..., None] * written[..., None, :]
    return s, (q[..., None] * s).sum(-2)


def ssm_step(s: jax.Array, u: jax.Array, b: jax.Array, c: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence: s [n, heads, head_dim, state_size]; u [n, heads, head_dim], scaled; b, c
    [n, heads, state_size]; the share of s that is kept, [n, heads].
    """
    s = s * kept[..., None, None] + u[..., None] * b[..., None, :]
    return s, (s * c[..., None, :]).sum(-1)


def mixed(
    mixer: Recurrent, own: Recurrent, x: jax.Array, gates: jax.Array | None, kept: LayerStates, vectors: Vectors
) -> Mixed:
    """Computes a mixer between its projections, `own` being the rank's part of it. `x` is what the first projection
    gives for each token, and `gates` what those of a delta net give.
    """
    match own:
        case GatedDelta():
            assert gates is not None
            return _delta(own, x, gates, kept, vectors)
        case Mamba2():
            return _mamba(mixer, own, x, kept, vectors)
        case ShortConvolution():
            b, c, u = jnp.split(x, 3, -1)
            y, kept = kept.convolved(own.conv, b * u, vectors)
            return Mixed(c * y.astype(c.dtype), kept.states)


def _delta(own: GatedDelta, x: jax.Array, gates: jax.Array, kept: LayerStates, vectors: Vectors) -> Mixed:
    tokens, keys = len(x), own.key_heads * own.key_dim
    convolved, z = jnp.split(x, (own.conv.channels,), -1)
    y, kept = kept.convolved(own.conv, convolved, vectors)
    q, k, v = jnp.split(jax.nn.silu(y), (keys, 2 * keys), -1)
    q, k = (_of_value_heads(own, _unit(each.reshape(tokens, -1, own.key_dim))) for each in (q, k))
    v, z = (each.reshape(tokens, -1, own.value_dim) for each in (v, z))
    b, a = jnp.split(gates.astype(jnp.float32), 2, -1)
    decayed = jnp.exp(-jnp.exp(vectors(own.decay)) * jax.nn.softplus(a + vectors(own.decay_bias)))
    seen, kept = kept.recurred(delta_step, q * own.key_dim**-0.5, k, v, decayed, jax.nn.sigmoid(b))
    normed = seen * lax.rsqrt((seen * seen).mean(-1, keepdims=True) + own.norm.eps) * vectors(f"{own.norm.name}.weight")
    gated = normed * jax.nn.silu(z.astype(jnp.float32))
    return Mixed(gated.reshape(tokens, -1).astype(x.dtype), kept.states)


def _unit(heads: jax.Array) -> jax.Array:
    return heads * lax.rsqrt((heads * heads).sum(-1, keepdims=True) + GatedDelta.QK_EPS)


def _of_value_heads(own: GatedDelta, heads: jax.Array) -> jax.Array:
    """[tokens, key heads, …] -> [tokens, value heads, …]"""
    times = own.value_heads // own.key_heads
    return jnp.tile(heads, (1, times, 1)) if own.head_map == "tiled" else jnp.repeat(heads, times, 1)


def _mamba(mixer: Recurrent, own: Mamba2, x: jax.Array, kept: LayerStates, vectors: Vectors) -> Mixed:
    tokens, groups = len(x), own.groups * own.state_size
    z, convolved, t = jnp.split(x, (own.width, own.width + own.conv.channels), -1)
    y, kept = kept.convolved(own.conv, convolved, vectors)
    u, b, c = jnp.split(jax.nn.silu(y), (own.width, own.width + groups), -1)
    u = u.reshape(tokens, own.heads, own.head_dim)
    b, c = (jnp.repeat(each.reshape(tokens, own.groups, -1), own.heads // own.groups, 1) for each in (b, c))
    t = jax.nn.softplus(t.astype(jnp.float32) + vectors(own.step_bias))
    decayed = jnp.exp(-jnp.exp(vectors(own.decay)) * t)
    seen, kept = kept.recurred(ssm_step, t[..., None] * u, b, c, decayed)
    seen = (seen + vectors(own.skip)[:, None] * u).reshape(tokens, -1)
    assert isinstance(mixer, Mamba2)
    gated = _gated(mixer, own, seen, jax.nn.silu(z.astype(jnp.float32)), vectors)
    return Mixed(gated.astype(x.dtype), kept.states)


def _gated(mixer: Mamba2, own: Mamba2, y: jax.Array, gate: jax.Array, vectors: Vectors) -> jax.Array:
    if mixer.norm is None:
        return y * gate
    weight = vectors(f"{mixer.norm.name}.weight")
    if mixer.gates_normed:
        return _normed(mixer, own, y) * weight * gate
    return _normed(mixer, own, y * gate) * weight


def _normed(mixer: Mamba2, own: Mamba2, y: jax.Array) -> jax.Array:
    """RMS norm of each group, which several ranks may share."""
    assert mixer.norm is not None
    groups = y.reshape(len(y), own.norm_groups, -1)
    squares: Any = (groups * groups).sum(-1, keepdims=True)
    if mixer.norm_groups == 1:
        squares = lax.psum(squares, AXIS)
    return (groups * lax.rsqrt(squares * mixer.norm_groups / mixer.width + mixer.norm.eps)).reshape(y.shape)
