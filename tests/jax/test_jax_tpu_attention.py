"""Attention on TPUs, without a TPU: in place of the kernel runs the reference that its authors wrote for it."""

from typing import Any

import jax
import jax.numpy as jnp
import jax_models
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from ostro.backends.jax import tpu_attention
from ostro.backends.jax.attention import LoopAttention, Tiles
from ostro.backends.jax.layout import fits_tpu_kernel
from ostro.backends.jax.pages import InterleavedPages, PagesShape, SplitPages
from ostro.backends.jax.tpu_attention import TpuAttention
from ostro.models.architecture import AttentionSpec

assert jax_models.ROWS
SHAPE = PagesShape(layers=2, pages=24, kv_heads=2, page_size=4, head_dim=8)
HEADS, TOKENS, WIDTH = 6, 32, 16


def reference(queries: jax.Array, *arguments: Any, **settings: Any) -> jax.Array:
    del settings["num_kv_pages_per_block"], settings["num_queries_per_block"]
    found = ref_ragged_paged_attention(queries, *arguments, **settings)
    # What the kernel does not write may be anything.
    return jnp.full(queries.shape, jnp.nan).at[: len(found)].set(found)


def step() -> tuple[Tiles, np.ndarray[Any, np.dtype[np.int32]]]:
    """Three sequences: the middle of a prompt, one token, and the start of a prompt; and their tokens' slots."""
    starts, lengths = (7, 21, 0), (17, 1, 9)
    table = np.zeros((4, 8), np.int32)
    table[:3] = np.random.default_rng(0).permutation(24).reshape(3, 8)
    tiles = [(0, 0, 7, 16), (0, 16, 23, 1), (1, 17, 21, 1), (2, 18, 0, 9)]
    columns = np.array([*tiles, (0, TOKENS, 0, 0)], np.int32).T
    positions = [(row, start + at) for row, start in enumerate(starts) for at in range(lengths[row])]
    slots = np.full(TOKENS, 24 * 4, np.int32)
    slots[: len(positions)] = [table[row, position // 4] * 4 + position % 4 for row, position in positions]
    row, first, start, length = map(jnp.asarray, columns)
    return Tiles(first, start, length, row, jnp.asarray(table)), slots


# Each of JAX's operations is compiled. In `make test`, `test_jax_lowering` has steps with this kernel.
@pytest.mark.full
@pytest.mark.parametrize(
    "spec", [AttentionSpec(scale=0.3), AttentionSpec(scale=0.3, window=6), AttentionSpec(scale=0.5, softcap=2.0)]
)
def test_the_kernel_is_given_what_the_loop_attends_to(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_attention, "ragged_paged_attention", reference)
    random = np.random.default_rng(1)
    tiles, slots = step()
    split, both = SplitPages.empty(SHAPE, np.float32), InterleavedPages.empty(SHAPE, np.float32)
    every = np.arange(24 * 4)
    for layer in range(2):
        keys, values = random.normal(size=(2, len(every), 2, 8)).astype(np.float32)
        split = split.stored(layer, jnp.asarray(every), keys, values)
        both = both.stored(layer, jnp.asarray(every), keys, values)
    keys, values = random.normal(size=(2, TOKENS, 2, 8)).astype(np.float32)
    # Page 3 is copied to page 4; page 99 does not exist.
    pairs = jnp.array([[3, 5], [4, 99]])
    split = split.stored(1, jnp.asarray(slots), keys, values).copied(pairs)
    both = both.stored(1, jnp.asarray(slots), keys, values).copied(pairs)
    queries = jnp.asarray(random.normal(size=(TOKENS, HEADS, 8)).astype(np.float32))
    expected = LoopAttention()(queries, split, 1, tiles, spec, width=WIDTH)
    found = TpuAttention()(queries, both, 1, tiles, spec, width=WIDTH)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_heads_that_do_not_fill_registers_are_left_to_the_loop() -> None:
    assert all(fits_tpu_kernel(heads, 2) for heads in (1, 2, 4, 8, 16))
    assert not any(fits_tpu_kernel(heads, 2) for heads in (3, 5, 6, 12))
    assert fits_tpu_kernel(4, 4)
