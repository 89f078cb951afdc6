"""The step: embedding, layers, final norm and the logits that are asked for, as one rank computes them.

Reads an `Architecture` as the torch modules do. All shapes are a rank's own; `psum` adds up what row-parallel matmuls
leave on each rank. Knows no batch and no schedule: its inputs are `StepInputs`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ostro.backends.jax.adapters import AdapterTables, ByProjection, Term
from ostro.backends.jax.attention import Attention as Attend
from ostro.backends.jax.attention import Tiles
from ostro.backends.jax.inputs import StepInputs
from ostro.backends.jax.layout import VectorLayout, bias_name
from ostro.backends.jax.mesh import AXIS
from ostro.backends.jax.recurrent import LayerStates, Spans, mixed
from ostro.backends.jax.sampling import NUM_SETTINGS, DrawKind, Drawn, draw
from ostro.backends.jax.shapes import StepShape
from ostro.backends.jax.states import Cache
from ostro.backends.jax.weights import LayerWeights, Weights
from ostro.models.architecture import (
    MLP,
    Activation,
    Architecture,
    Attention,
    GatedDelta,
    Head,
    Layer,
    Norm,
    Projection,
    QKNorm,
)
from ostro.models.cut import Cut
from ostro.models.rope_frequencies import rope_frequencies
from ostro.models.rope_settings import RopeSettings


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


class StepResult(NamedTuple):
    cache: Any
    hidden: Any
    """[tokens, hidden]"""
    logits: Any
    """[rows, vocabulary of the rank]; None if the model has no head."""


class Generated(NamedTuple):
    cache: Any
    drawn: Drawn


@dataclass(frozen=True, slots=True)
class StepProgram:
    """One rank's part of a model's step."""

    described: Architecture
    cut: Cut
    attend: Attend

    def step(
        self,
        weights: Weights,
        cache: Cache,
        previous: jax.Array,
        integers: jax.Array,
        adapters: AdapterTables | None = None,
        *,
        shape: StepShape,
    ) -> StepResult:
        """`adapters` are passed only for an adapted shape."""
        inputs = StepInputs.cut(integers, shape)
        vectors = _Vectors(weights.vectors[0], VectorLayout.of(self.described, self.cut))
        start = inputs.positions.at[inputs.tile_first].get(mode="fill", fill_value=0)
        tiles = Tiles(inputs.tile_first, start, inputs.tile_length, inputs.tile_row, inputs.table)
        tokens = jnp.where(inputs.tokens < 0, previous[jnp.maximum(-1 - inputs.tokens, 0)], inputs.tokens)
        x = self._embed(weights, tokens, inputs.positions)
        rotations = [_rotation(rope, self.described, inputs.positions) for rope in self.described.ropes]
        terms = _added_terms(adapters, inputs.adapters, len(weights.layers))
        step = _Step(inputs.slots, tiles, shape.width, Spans.of(inputs, shape.width) if shape.spans else None)
        numbers = _numbered(self.described.layers)
        for layer, own, added, number in zip(self.described.layers, weights.layers, terms, numbers, strict=True):
            rope = None if layer.attends is None else layer.attends.rope
            body = _LayerStep(self, layer, own, added, vectors, None if rope is None else rotations[rope])
            x, cache = body(x, cache, number, step)
        hidden = _norm(x, self.described.norm, vectors)
        return StepResult(cache, hidden, self._asked_logits(weights, hidden, inputs.asked))

    def generate(
        self,
        weights: Weights,
        cache: Cache,
        last: jax.Array,
        integers: jax.Array,
        adapters: AdapterTables | None = None,
        *,
        shape: StepShape,
        kind: DrawKind,
    ) -> Generated:
        """A step and the draws from its logits as one program. `integers` are the step's, then those of the draws."""
        own, packed = jnp.split(integers, (shape.num_integers,))
        result = self.step(weights, cache, last, own, adapters, shape=shape)
        assert result.logits is not None
        drawn = draw(result.logits, last, packed.reshape(NUM_SETTINGS, shape.rows), kind=kind)
        return Generated(result.cache, drawn)

    def logits(self, matrix: jax.Array, hidden: jax.Array, asked: jax.Array) -> jax.Array:
        """The rank's logits of some tokens, in float32; minus infinity beyond the vocabulary."""
        head = self.described.head
        assert head is not None
        scores = _capped(_product(hidden[asked], matrix), head)
        ids = lax.axis_index(AXIS) * self.cut.vocab + jnp.arange(self.cut.vocab)
        return jnp.where(ids < self.described.shape.vocab_size, scores, -jnp.inf)

    def _asked_logits(self, weights: Weights, hidden: jax.Array, asked: jax.Array) -> jax.Array | None:
        if self.described.head is None:
            return None
        return self.logits(weights.head_matrix, hidden, asked)

    def _embed(self, weights: Weights, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        local = tokens - lax.axis_index(AXIS) * self.cut.vocab
        is_own = (local >= 0) & (local < self.cut.vocab)
        rows = weights.embedding[jnp.clip(local, 0, self.cut.vocab - 1)]
        x = lax.psum(jnp.where(is_own[:, None], rows, 0), AXIS)
        # Rounded to the weights' dtype, as in training.
        x = x * jnp.asarray(self.described.embedding.scale, x.dtype)
        return x if weights.positions is None else x + weights.positions[positions]


@dataclass(frozen=True, slots=True)
class _Vectors:
    """A rank's norms and biases, by name."""

    values: jax.Array
    layout: VectorLayout

    def __call__(self, name: str) -> jax.Array:
        start, size = self.layout.places[name]
        return self.values[start : start + size]


class _Rotation(NamedTuple):
    """Cosines and sines of a step's positions, [tokens, 1, rotary_dim]."""

    cos: jax.Array
    signed_sin: jax.Array
    """Negative in the first half."""

    def __call__(self, heads: jax.Array) -> jax.Array:
        """Rotates the leading rotary_dim of [tokens, heads, head_dim]; the rest of a head passes through."""
        width = self.cos.shape[-1]
        turned = heads[..., :width]
        cos, sin = self.cos.astype(heads.dtype), self.signed_sin.astype(heads.dtype)
        turned = turned * cos + jnp.roll(turned, width // 2, -1) * sin
        return turned if width == heads.shape[-1] else jnp.concatenate((turned, heads[..., width:]), -1)


def _rotation(rope: RopeSettings, described: Architecture, positions: jax.Array) -> _Rotation:
    shape = described.shape
    found = rope_frequencies(rope, head_dim=shape.head_dim, max_seq_len=shape.max_seq_len)
    frequencies = np.concatenate((-found.frequencies, found.frequencies))
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    factor = np.float32(found.attention_factor)
    return _Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def _numbered(layers: Sequence[Layer]) -> list[int]:
    """Each layer's number among those with pages, or among those with states."""
    counts: Counter[bool] = Counter()
    numbers = []
    for layer in layers:
        is_recurrent = layer.recurrent is not None
        numbers.append(counts[is_recurrent])
        counts[is_recurrent] += 1
    return numbers


class _Step(NamedTuple):
    """What layers read of a step."""

    slots: jax.Array
    tiles: Tiles
    width: int
    spans: Spans | None


@dataclass(frozen=True, slots=True)
class _LayerStep:
    """One layer of a step."""

    program: StepProgram
    layer: Layer
    weights: LayerWeights
    terms: ByProjection
    vectors: _Vectors
    rotation: _Rotation | None

    def __call__(self, x: jax.Array, cache: Cache, number: int, step: _Step) -> tuple[jax.Array, Cache]:
        """`number` counts the layers that keep the same in the cache."""
        layer = self.layer
        before, mixes = x, self._attended if layer.recurrent is None else self._recurred
        added, cache = mixes(self._normed(x, layer.attention_norm), cache, number, step)
        x = x + layer.residual_scale * self._normed(added, layer.attention_post_norm)
        added = self._mlp(layer.dense, self._normed(before if layer.parallel else x, layer.mlp_norm))
        return x + layer.residual_scale * self._normed(added, layer.mlp_post_norm), cache

    def _attended(self, x: jax.Array, cache: Cache, number: int, step: _Step) -> tuple[jax.Array, Cache]:
        attention = self.layer.attention
        queries, keys, values, gates = self._heads(attention, x)
        pages = cache.pages.stored(number, step.slots, keys, values)
        attended = self.program.attend(queries, pages, number, step.tiles, attention.spec, width=step.width)
        if gates is not None:
            attended = attended * jax.nn.sigmoid(gates.astype(jnp.float32)).astype(attended.dtype)
        flat = attended.reshape(len(x), -1)
        added = self._summed(attention.output, self.weights.output, self.terms.output, flat)
        return added, cache._replace(pages=pages)

    def _recurred(self, x: jax.Array, cache: Cache, number: int, step: _Step) -> tuple[jax.Array, Cache]:
        mixer = self.layer.recurrent
        assert mixer is not None
        assert step.spans is not None
        assert cache.states is not None
        gates = None
        if isinstance(mixer, GatedDelta):
            gates = self._biased(mixer.gates, _product(x, self.weights.gates))
        read = self._biased(mixer.inputs, _product(x, self.weights.inputs)).astype(x.dtype)
        kept = LayerStates(cache.states, number, step.spans)
        found = mixed(mixer, self.program.cut.mixer(mixer), read, gates, kept, self.vectors)
        added = self._summed(mixer.output, self.weights.output, None, found.output)
        return added, cache._replace(states=found.states)

    def _normed(self, x: jax.Array, norm: Norm | None) -> jax.Array:
        return x if norm is None else _norm(x, norm, self.vectors)

    def _heads(self, attention: Attention, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Queries, keys and values, [tokens, heads, head_dim], normed and rotated; gates, if it has any."""
        cut, head_dim = self.program.cut, self.program.described.shape.head_dim
        heads = self._biased(attention.qkv, _adapted_product(x, self.weights.inputs, self.terms.qkv)).astype(x.dtype)
        heads = heads.reshape(len(x), -1, head_dim)
        gates = None
        if attention.gated:
            gates, heads = jnp.split(heads, (cut.heads,), 1)
        queries, keys, values = jnp.split(heads, (cut.heads, cut.heads + cut.kv_heads), 1)
        if (qk_norm := attention.qk_norm) is not None:
            queries, keys = self._qk_norm(qk_norm, queries, keys)
        if self.rotation is not None:
            queries, keys = self.rotation(queries), self.rotation(keys)
        return queries, keys, values, gates

    def _qk_norm(self, qk_norm: QKNorm, queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        if qk_norm.over == "head":
            return _norm(queries, qk_norm.query, self.vectors), _norm(keys, qk_norm.key, self.vectors)
        # Each KV head is counted once, however many ranks hold a copy of it.
        copies = self.program.cut.kv_copies
        return self._width_norm(queries, qk_norm.query, 1), self._width_norm(keys, qk_norm.key, copies)

    def _width_norm(self, heads: jax.Array, norm: Norm, copies: int) -> jax.Array:
        """RMS norm over the heads of all ranks as one row."""
        exact = heads.astype(jnp.float32).reshape(len(heads), -1)
        squares = lax.psum((exact * exact).sum(-1, keepdims=True), AXIS) / (copies * norm.size)
        scaled = exact * lax.rsqrt(squares + norm.eps) * self.vectors(f"{norm.name}.weight")
        return scaled.astype(heads.dtype).reshape(heads.shape)

    def _mlp(self, mlp: MLP, x: jax.Array) -> jax.Array:
        act = ACTIVATIONS[mlp.activation]
        inner = self._biased(mlp.up, _adapted_product(x, self.weights.up, self.terms.up)).astype(x.dtype)
        if mlp.gated:
            gate, up = jnp.split(inner, 2, -1)
            inner = act(gate) * up
        else:
            inner = act(inner)
        return self._summed(mlp.down, self.weights.down, self.terms.down, inner)

    def _summed(self, projection: Projection, matrix: jax.Array, term: "_AddedTerm | None", x: jax.Array) -> jax.Array:
        """A row-parallel matmul: ranks add up their parts in float32; the bias is added once, afterwards."""
        return self._biased(projection, lax.psum(_adapted_product(x, matrix, term), AXIS)).astype(x.dtype)

    def _biased(self, projection: Projection, y: jax.Array) -> jax.Array:
        return y + self.vectors(bias_name(projection)) if projection.bias else y


class _AddedTerm(NamedTuple):
    """What adapters add to one matmul of a step."""

    term: Term
    is_own: jax.Array
    """[tokens, width]: which entries belong to each token's adapter."""

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = jnp.where(self.is_own, _product(x, self.term.a), 0)
        return _product(inner.astype(x.dtype), self.term.b)


def _added_terms(adapters: AdapterTables | None, numbers: jax.Array, layers: int) -> list[ByProjection]:
    """For each layer, `_AddedTerm` or None by projection. `numbers` are the tokens' adapters."""
    if adapters is None:
        return [ByProjection()] * layers
    is_own = [None if owners is None else owners[None] == numbers[:, None] for owners in adapters.owners]
    return [
        ByProjection(*(None if own is None else _AddedTerm(term, own) for term, own in zip(layer, is_own, strict=True)))
        for layer in adapters.layers
    ]


def _adapted_product(x: jax.Array, matrix: jax.Array, term: _AddedTerm | None) -> jax.Array:
    product = _product(x, matrix)
    return product if term is None else product + term(x)


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """x Wᵀ in float32. Without HIGHEST, GPUs and TPUs would round float32 weights."""
    return lax.dot_general(
        x,
        matrix,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _norm(x: jax.Array, norm: Norm, vectors: _Vectors) -> jax.Array:
    """Over the last dimension, in float32."""
    exact = x.astype(jnp.float32)
    if norm.kind == "layer":
        exact = exact - exact.mean(-1, keepdims=True)
    squares = (exact * exact).mean(-1, keepdims=True)
    scaled = exact * lax.rsqrt(squares + norm.eps) * vectors(f"{norm.name}.weight")
    if norm.kind == "layer" and norm.biased:
        scaled = scaled + vectors(f"{norm.name}.bias")
    return scaled.astype(x.dtype)


def _capped(logits: jax.Array, head: Head) -> jax.Array:
    scaled = logits if head.scale == 1.0 else logits * head.scale
    return scaled if head.softcap is None else jnp.tanh(scaled / head.softcap) * head.softcap
