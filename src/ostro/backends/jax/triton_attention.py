"""`attention` on NVIDIA GPUs: Ostro's own Triton kernel for tiles, which jax_triton calls from JAX's programs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax_triton

from ostro.backends.jax.attention import Tiles
from ostro.backends.jax.pages import SplitPages
from ostro.kernels.gpu.tile_attention import attend_packed_tile
from ostro.models.architecture import AttentionSpec


class _Tuning(NamedTuple):
    rows: int
    """Queries per tile, counting each head."""
    block: int
    """Keys multiplied at once."""
    warps: int
    stages: int = 3

    def fitted(self, head_dim: int) -> "_Tuning":
        """Fewer keys at once for wide heads, whose blocks would not fit into shared memory."""
        if head_dim <= _USUAL_DIM:
            return self
        return self._replace(block=max(_LEAST_DIM, self.block * _USUAL_DIM // head_dim), stages=2)


# The head width up to which these sizes fit: the widest in most models.
_USUAL_DIM = 128
# The narrowest matrices that tensor cores multiply.
_LEAST_DIM = 16
_SINGLE = _Tuning(rows=16, block=128, warps=4)
_LONGER = _Tuning(rows=128, block=64, warps=8)
# Exact float32 products do not run on tensor cores, and a tile must fit in registers.
_EXACT = _Tuning(rows=32, block=32, warps=4)


class TritonAttention:
    layout = SplitPages

    def __init__(self, group: int, *, exact: bool) -> None:
        """`exact` is for float32."""
        self._group = group
        self._single, self._longer = (_EXACT, _EXACT) if exact else (_SINGLE, _LONGER)
        self.tile = max(1, self._longer.rows // _power_of_2(group))

    def __call__(
        self, queries: jax.Array, pages: SplitPages, layer: int, tiles: Tiles, spec: AttentionSpec, *, width: int
    ) -> jax.Array:
        kv_heads, head_dim = pages.keys.shape[2], pages.keys.shape[4]
        padded_dim = max(_LEAST_DIM, _power_of_2(head_dim))
        tuning = (self._single if width == 1 else self._longer).fitted(padded_dim)
        return jax_triton.triton_call(
            queries,
            # All layers' pages as if they were one layer's: slicing out the layer's own would copy them.
            *(own.reshape(-1, *own.shape[2:]) for own in pages),
            tiles.table + layer * pages.num_pages,
            jnp.stack((tiles.row, tiles.first, tiles.start, tiles.length), 1),
            kernel=attend_packed_tile,
            out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            grid=(kv_heads, len(tiles.row)),
            num_warps=tuning.warps,
            num_stages=tuning.stages,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            window=spec.window or 0,
            group=self._group,
            kv_heads=kv_heads,
            head_dim=head_dim,
            padded_dim=padded_dim,
            page_size=pages.page_size,
            table_width=tiles.table.shape[1],
            rows=max(tuning.rows, _power_of_2(self._group)),
            block=tuning.block,
            stages=tuning.stages,
        )


def _power_of_2(number: int) -> int:
    """The smallest power of two that is at least the number."""
    return 1 << (number - 1).bit_length()
