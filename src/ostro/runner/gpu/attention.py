"""The keys and values of all layers on a GPU, and one step's attention to them.

A step's rows of a single token come first, then those of longer chunks, each cut into tiles of queries:

    tokens   [ a ][ b ][ c ][ d d d d d d d d | d d ][ e e e ]
               decode_attention            prefill_attention

Where results must not depend on the batch, all tokens are cut into tiles, single ones too, for `invariant_attention`.

One page more than the scheduler knows of takes the keys of rows that only fill a batch up.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ostro.kernels.gpu.decode_attention import DecodeScratch, decode_attention, plan_decode
from ostro.kernels.gpu.invariant_attention import invariant_attention
from ostro.kernels.gpu.prefill_attention import PrefillTuning, prefill_attention
from ostro.models.architecture import AttentionSpec, ModelShape


class KVPages:
    """[layers, key or value, pages, kv_heads, page_size, head_dim]. In fp8 (e4m3) numbers beyond 448 become 448."""

    def __init__(
        self, shape: ModelShape, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        sizes = (shape.num_layers, 2, num_pages + 1, shape.num_kv_heads, page_size, shape.head_dim)
        self.memory = torch.empty(sizes, dtype=dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self.memory]

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Keys and values of tokens, to their slots. Slot -1 is the last of the last page, which is nobody's."""
        page, offset = slots // self.page_size, slots % self.page_size
        for cache, new in zip(self.layers[layer], (k, v), strict=True):
            if cache.dtype == torch.float8_e4m3fn:
                largest = torch.finfo(cache.dtype).max
                small = new.clamp(-largest, largest).to(cache.dtype)
                # As bytes: torch has no indexed writes of 8-bit floats.
                cache.view(torch.uint8)[page, :, offset] = small.view(torch.uint8)
            else:
                cache[page, :, offset] = new

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """(from, to) pages, in all layers; no page is written that another copy reads."""
        if pages:
            sources, targets = (torch.tensor(each, device=self.memory.device) for each in zip(*pages, strict=True))
            # As bytes: torch has no indexed writes of 8-bit floats.
            memory = self.memory.view(torch.uint8)
            memory[:, :, targets] = memory[:, :, sources]


class StepAttention(ABC):
    """An attention context."""

    def __init__(self, pages: KVPages, tables: Tensor, slots: Tensor) -> None:
        self.pages = pages
        self.slots = slots
        self._tables = tables

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.pages.store(layer, self.slots, k, v)
        return self.attend_stored(layer, q, spec)

    @abstractmethod
    def attend_stored(self, layer: int, q: Tensor, spec: AttentionSpec, *, pdl: bool = False) -> Tensor:
        """For keys and values that are stored already: [tokens, heads, head_dim] -> [tokens, heads * head_dim].

        `pdl` lets the kernel be launched ahead, where it can be.
        """


class PlannedAttention(StepAttention):
    """Plans a step's work once, for all layers that have the same window."""

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
        super().__init__(pages, tables, slots)
        self._scratch = scratch
        self._tiles = tiles
        self._num_single = len(lens)
        if self._num_single:
            for window in scratch.items:
                plan_decode(lens, scratch, window)

    def attend_stored(self, layer: int, q: Tensor, spec: AttentionSpec, *, pdl: bool = False) -> Tensor:
        keys, values = self.pages.layers[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        single = self._num_single
        if single:
            tables, scratch = self._tables[:single], self._scratch
            decode_attention(q[:single], keys, values, tables, scratch, out[:single], spec, pdl=pdl)
        if self._tiles is not None:
            prefill_attention(q, keys, values, self._tables, self._tiles, out, spec)
        return out.flatten(1)


class InvariantAttention(StepAttention):
    """One kernel for all tokens, in tiles: a token's numbers do not depend on what it comes with."""

    def __init__(self, pages: KVPages, tuning: PrefillTuning, *, tables: Tensor, slots: Tensor, tiles: Tensor) -> None:
        super().__init__(pages, tables, slots)
        self._tuning = tuning
        self._tiles = tiles

    def attend_stored(self, layer: int, q: Tensor, spec: AttentionSpec, *, pdl: bool = False) -> Tensor:
        keys, values = self.pages.layers[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        invariant_attention(q, keys, values, self._tables, self._tiles, out, spec, self._tuning)
        return out.flatten(1)
