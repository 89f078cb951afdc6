"""`attention` on TPUs: JAX's own kernel for ragged batches. It lowers for a TPU, but has never run on one."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from ostro.backends.jax.attention import Tiles
from ostro.backends.jax.pages import InterleavedPages
from ostro.models.architecture import AttentionSpec

# The kernel looks up better sizes for the TPU that it is traced on, but only for models that its authors measured.
_KEYS_PER_BLOCK = 1024
_QUERIES_PER_BLOCK = 32


class TpuAttention:
    """Needs no tiles: it gets whole sequences."""

    layout = InterleavedPages
    tile = 128

    def __call__(
        self, queries: jax.Array, pages: InterleavedPages, layer: int, tiles: Tiles, spec: AttentionSpec, *, width: int
    ) -> jax.Array:
        tokens, _, head_dim = queries.shape
        rows, table_width = tiles.table.shape
        lengths = jnp.zeros(rows, jnp.int32).at[tiles.row].add(tiles.length)
        contexts = jnp.zeros(rows, jnp.int32).at[tiles.row].max(tiles.ends)
        starts = jnp.concatenate((jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)))
        # The kernel gets all layers' pages as one list: slicing out the layer's own would copy them.
        flat = pages.both.reshape(-1, *pages.both.shape[2:])
        attended = ragged_paged_attention(
            pages.padded(queries),
            flat,
            contexts,
            tiles.table + layer * pages.num_pages,
            starts,
            (lengths > 0).sum(dtype=jnp.int32)[None],
            sm_scale=spec.scale,
            sliding_window=spec.window,
            soft_cap=spec.softcap,
            num_kv_pages_per_block=min(table_width, max(1, _KEYS_PER_BLOCK // pages.page_size)),
            num_queries_per_block=min(tokens, _QUERIES_PER_BLOCK),
        )
        # The kernel leaves out what follows the last token.
        is_token = jnp.arange(tokens) < starts[-1]
        return jnp.where(is_token[:, None, None], attended[..., :head_dim], 0)
