"""The keys and values of all layers on a GPU, and one step's attention to them.

A step's rows of a single token come first, then those of longer chunks, each cut into tiles of queries:

    tokens   [ a ][ b ][ c ][ d d d d d d d d | d d ][ e e e ]
               decode_attention            prefill_attention

One page more than the scheduler knows of takes the keys of rows that only fill a batch up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ostro.kernels.gpu.decode_attention import DecodeScratch, decode_attention, plan_decode
from ostro.kernels.gpu.prefill_attention import prefill_attention
from ostro.models.base import AttentionSpec, ModelShape


class KVPages:
    """[layers, key or value, pages, kv_heads, page_size, head_dim]."""

    def __init__(
        self, shape: ModelShape, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        sizes = (shape.num_layers, 2, num_pages + 1, shape.num_kv_heads, page_size, shape.head_dim)
        self.memory = torch.empty(sizes, dtype=dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self.memory]

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """(from, to) pages, in all layers; no page is written that another copy reads."""
        if pages:
            sources, targets = (torch.tensor(each, device=self.memory.device) for each in zip(*pages, strict=True))
            self.memory[:, :, targets] = self.memory[:, :, sources]


class StepAttention:
    """An attention context. Plans a step's work once, for all layers that have the same window."""

    def __init__(
        self,
        pages: KVPages,
        scratch: DecodeScratch,
        *,
        tables: Tensor,
        slots: Tensor,
        lens: Tensor,
        tiles: Tensor | None = None,
    ) -> None:
        """`lens` are the lengths of the rows of a single token; `tiles` are for the tokens after them."""
        self.pages = pages
        self.slots = slots
        self._scratch = scratch
        self._tables = tables
        self._tiles = tiles
        self._num_single = len(lens)
        if self._num_single:
            for window in scratch.items:
                plan_decode(lens, scratch, window)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.pages.layers[layer]
        # Slot -1 is the last of the last page, which is nobody's.
        page, offset = self.slots // self.pages.page_size, self.slots % self.pages.page_size
        keys[page, :, offset] = k.to(keys.dtype)
        values[page, :, offset] = v.to(values.dtype)
        return self.attend_stored(layer, q, spec)

    def attend_stored(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        """For keys and values that are stored already: [tokens, heads, head_dim] -> [tokens, heads * head_dim]."""
        keys, values = self.pages.layers[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        single = self._num_single
        if single:
            decode_attention(q[:single], keys, values, self._tables[:single], self._scratch, out[:single], spec)
        if self._tiles is not None:
            prefill_attention(q, keys, values, self._tables, self._tiles, out, spec)
        return out.flatten(1)
