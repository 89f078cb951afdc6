"""The KV cache of all layers on a GPU, and one step's attention to it.

Single-token rows of a step come first, followed by longer chunks, which are split into tiles of queries:

    tokens   [ a ][ b ][ c ][ d d d d d d d d | d d ][ e e e ]
               decode_attention            prefill_attention

A step of single-token rows alone can take their queries, keys and values as the projection leaves them.

Single-token rows that begin with the same pages may read those together (`prefix_attention`), in layers without a
window.

If results must not depend on the batch, all tokens, single ones included, are split into tiles for
`invariant_attention`.

One page beyond those the scheduler knows takes the keys of padding rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostro.backends.cuda.choices import Gpu
from ostro.backends.cuda.states import StepStates
from ostro.backends.cuda.transfer import send
from ostro.backends.page_rows import PageRows
from ostro.engine.batch import Chunk
from ostro.kernels.gpu.decode_attention import (
    DecodeScratch,
    decode_attention,
    plan_decode,
)
from ostro.kernels.gpu.invariant_attention import invariant_attention, invariant_tuning, single_tiles
from ostro.kernels.gpu.prefill_attention import Chunk as Piece
from ostro.kernels.gpu.prefill_attention import (
    PrefillTuning,
    prefill_attention,
    prefill_tiles,
    tokens_in_tile,
    tuning_for,
)
from ostro.kernels.gpu.prefix_attention import GROUP_ARRAYS, prefix_tuning_for
from ostro.kernels.gpu.step_inputs import LENGTH, POSITION
from ostro.models.architecture import AttentionSpec, ModelShape
from ostro.torch_models.base import Model


class KVPages:
    """[layers, key or value, pages, kv_heads, page_size, head_dim], of layers that have keys and values. In fp8 (e4m3),
    values saturate at ±448.
    """

    def __init__(
        self, shape: ModelShape, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        kept = [layer for layer in range(shape.num_layers) if shape.of_layer(layer).num_kv_heads]
        sizes = (len(kept), 2, num_pages + 1, shape.num_kv_heads, page_size, shape.head_dim)
        self.memory = torch.empty(sizes, dtype=dtype, device=device)
        self.layers = {layer: (own[0], own[1]) for layer, own in zip(kept, self.memory, strict=True)}

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes tokens' keys and values to their slots. Slot -1 ends the last page, which no sequence owns."""
        page, offset = slots // self.page_size, slots % self.page_size
        for cache, new in zip(self.layers[layer], (k, v), strict=True):
            if cache.dtype == torch.float8_e4m3fn:
                largest = torch.finfo(cache.dtype).max
                small = new.clamp(-largest, largest).to(cache.dtype)
                # As bytes: torch has no indexed writes for 8-bit floats.
                cache.view(torch.uint8)[page, :, offset] = small.view(torch.uint8)
            else:
                cache[page, :, offset] = new

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copies (from, to) pages in all layers; no page may be both written and read."""
        if pages:
            sources, targets = (torch.tensor(each, device=self.memory.device) for each in zip(*pages, strict=True))
            # As bytes: torch has no indexed writes for 8-bit floats.
            memory = self.memory.view(torch.uint8)
            memory[:, :, targets] = memory[:, :, sources]


class PageTables:
    """A batch's page tables on the device: row i belongs to the batch's i-th sequence. Transfers only changes."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.on_device = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._sent = PageRows(rows, width)

    @property
    def num_replaced(self) -> int:
        """See `PageRows`."""
        return self._sent.num_replaced

    def update(self, rows: Sequence[list[int]]) -> Tensor:
        """The table for these rows."""
        self.write(self.changes(rows))
        return self.on_device[: len(rows)]

    def changes(self, rows: Sequence[list[int]]) -> npt.NDArray[np.int64] | None:
        """[2, changes]: the cells that must be written for these rows, and their pages. Counts them as written."""
        cells, pages = self._sent.update(rows)
        return np.array([cells, pages], dtype=np.int64) if cells else None

    def write(self, changes: npt.NDArray[np.int64] | None) -> None:
        if changes is not None:
            where, what = send(changes, self.on_device.device)
            self.on_device.view(-1).index_copy_(0, where, what.to(torch.int32))


class StepAttention(ABC):
    """One step's attention context."""

    def __init__(self, pages: KVPages, tables: Tensor, slots: Tensor, *, is_padded: bool = False) -> None:
        """`is_padded` if some tokens may belong to no sequence: their results are zeros."""
        self.pages = pages
        self.slots = slots
        self._tables = tables
        self._is_padded = is_padded
        self._zeros: Tensor | None = None
        self.states: StepStates | None = None
        """For a model some of whose layers keep a recurrent state."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        self.pages.store(layer, self.slots, k, v)
        return self.attend_stored(layer, q, spec, sinks)

    @abstractmethod
    def attend_stored(
        self,
        layer: int,
        q: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        *,
        pdl: bool = False,
        leads: bool = False,
    ) -> Tensor:
        """Attends to keys and values that are already stored: [tokens, heads, head_dim] -> [tokens, heads * head_dim].

        `pdl` allows programmatic dependent launch where the kernel supports it, and `leads` allows it for the next
        kernel.
        """

    def _memory_for(self, q: Tensor) -> Tensor:
        """Memory for attention's results. Zeros stay zeros, so all layers can share padded memory."""
        if not self._is_padded:
            return torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._zeros is None:
            self._zeros = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        return self._zeros


class PlannedAttention(StepAttention):
    """Plans a step's work once for all layers with the same window."""

    def __init__(
        self,
        pages: KVPages,
        scratch: DecodeScratch,
        *,
        tables: Tensor,
        slots: Tensor,
        lens: Tensor,
        tiles: Tensor | None = None,
        groups: Tensor | None = None,
        is_padded: bool = False,
    ) -> None:
        """`lens` are the lengths of the single-token rows, and `groups` says which of these share prefixes; `tiles`
        cover the tokens after them, and any among them whose length is 0.
        """
        super().__init__(pages, tables, slots, is_padded=is_padded)
        self._scratch = scratch
        self._tiles = tiles
        self._groups = groups
        self._num_single = len(lens)
        if self._num_single:
            for window in scratch.items:
                plan_decode(lens, scratch, window, groups if window is None else None)

    def attend_stored(
        self,
        layer: int,
        q: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        *,
        pdl: bool = False,
        leads: bool = False,
    ) -> Tensor:
        keys, values = self.pages.layers[layer]
        out = self._memory_for(q)
        single = self._num_single
        if single:
            tables, scratch = self._tables[:single], self._scratch
            groups = self._groups if spec.window is None else None
            decode = partial(decode_attention, groups=groups, pdl=pdl, leads=leads)
            decode(q[:single], keys, values, tables, scratch, out[:single], spec, sinks)
        if self._tiles is not None:
            prefill_attention(q, keys, values, self._tables, self._tiles, out, spec, sinks=sinks)
        return out.flatten(1)


class InvariantAttention(StepAttention):
    """One tiled kernel for all tokens: a token's result does not depend on the rest of the batch."""

    def __init__(
        self,
        pages: KVPages,
        tuning: PrefillTuning,
        *,
        tables: Tensor,
        slots: Tensor,
        tiles: Tensor,
        is_padded: bool = False,
    ) -> None:
        super().__init__(pages, tables, slots, is_padded=is_padded)
        self._tuning = tuning
        self._tiles = tiles

    def attend_stored(
        self,
        layer: int,
        q: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        *,
        pdl: bool = False,
        leads: bool = False,
    ) -> Tensor:
        keys, values = self.pages.layers[layer]
        out = self._memory_for(q)
        invariant_attention(q, keys, values, self._tables, self._tiles, out, spec, self._tuning, sinks)
        return out.flatten(1)


class AttentionWorkspace:
    """Attention state that persists on the device across steps: the KV cache, page tables, scratch memory and
    tuning. Makes each step's attention.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        page_size: int,
        max_batch_seqs: int,
        kv_dtype: torch.dtype,
        deterministic: bool,
        cascades: bool = False,
        gpu: Gpu | None = None,
    ) -> None:
        """With `cascades`, steps may share prefixes. Without a `gpu`, the device itself is asked for its properties."""
        shape, parameter = model.shape, next(model.parameters())
        device, dtype = parameter.device, parameter.dtype
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        self.deterministic = deterministic
        self.pages = KVPages(shape, num_pages=num_pages, page_size=page_size, dtype=kv_dtype, device=device)
        self.tables = PageTables(max_batch_seqs, -(-shape.max_seq_len // page_size), device)
        self._tuning = invariant_tuning(dtype, heads, kv_heads, shape.head_dim) if deterministic else tuning_for(dtype)
        self.tokens_in_tile = tokens_in_tile(heads, kv_heads, self._tuning)
        windows = {spec.window for spec in _attention_specs(model)}
        shares = cascades and not deterministic and None in windows
        self.scratch = DecodeScratch(
            max_batch_seqs,
            heads,
            kv_heads,
            shape.head_dim,
            page_size,
            device,
            windows=sorted(windows, key=lambda window: window or 0),
            prefix_tuning=prefix_tuning_for(dtype, shape.head_dim) if shares else None,
            processors=None if gpu is None else gpu.multiprocessors.number,
            overlaps=None if gpu is None else gpu.overlaps,
        )
        # At fixed addresses, for graphs.
        self.groups = torch.zeros(GROUP_ARRAYS, max_batch_seqs, dtype=torch.int32, device=device)

    def of_single_tokens(self, sent: Tensor, slots: Tensor, *, shares_prefixes: bool = False) -> StepAttention:
        """The attention of a step in which every sequence has one token."""
        tables, lens = self.tables.on_device[: sent.shape[1]], sent[LENGTH]
        if self.deterministic:
            tiles = single_tiles(sent[POSITION], lens)
            return InvariantAttention(self.pages, self._tuning, tables=tables, slots=slots, tiles=tiles)
        groups = self.groups if shares_prefixes else None
        return PlannedAttention(self.pages, self.scratch, tables=tables, slots=slots, lens=lens, groups=groups)

    def tile(self, chunks: Sequence[Chunk]) -> tuple[int, npt.NDArray[np.int32] | None]:
        """How many single-token chunks come first, and the tiles of the other chunks, drafts included. Does not touch
        the device.
        """
        num_single = 0 if self.deterministic else sum(chunk.num_rows == 1 for chunk in chunks)
        listed = prefill_tiles(_pieces(chunks, num_single), self.tokens_in_tile)
        return num_single, np.array(listed, dtype=np.int32) if listed else None

    def of_tiles(
        self,
        rows: int,
        num_single: int,
        tiles: npt.NDArray[np.int32] | None,
        sent: Tensor,
        slots: Tensor,
        *,
        shares_prefixes: bool = False,
    ) -> StepAttention:
        """The attention of any step, with `rows` sequences."""
        tables, on_device = self.tables.on_device[:rows], None if tiles is None else send(tiles, sent.device)
        lens = sent[LENGTH, :num_single]
        return self._of_tiles(tables, lens, on_device, slots, shares_prefixes=shares_prefixes)

    def of_padded_tiles(self, num_single: int, tiles: Tensor, sent: Tensor, slots: Tensor) -> StepAttention:
        """The attention of a graph. Among the first `num_single` tokens, those with a length are single ones; the other
        tokens are in `tiles`, or belong to no sequence. Tiles may have no tokens.
        """
        return self._of_tiles(self.tables.on_device, sent[LENGTH, :num_single], tiles, slots, is_padded=True)

    def _of_tiles(
        self,
        tables: Tensor,
        lens: Tensor,
        tiles: Tensor | None,
        slots: Tensor,
        *,
        is_padded: bool = False,
        shares_prefixes: bool = False,
    ) -> StepAttention:
        if self.deterministic:
            assert tiles is not None
            return InvariantAttention(
                self.pages, self._tuning, tables=tables, slots=slots, tiles=tiles, is_padded=is_padded
            )
        return PlannedAttention(
            self.pages,
            self.scratch,
            tables=tables,
            slots=slots,
            lens=lens,
            tiles=tiles,
            groups=self.groups if shares_prefixes else None,
            is_padded=is_padded,
        )


def _pieces(chunks: Sequence[Chunk], num_single: int) -> list[Piece]:
    """The chunks after the first `num_single`, in the attention kernel's format."""
    pieces, offset = [], num_single
    for row, chunk in enumerate(chunks[num_single:], num_single):
        pieces.append(Piece(row, offset, chunk.start, chunk.num_rows))
        offset += chunk.num_rows
    return pieces


def _attention_specs(model: Model) -> list[AttentionSpec]:
    specs = [getattr(module, "spec", None) for module in model.modules()]
    return [spec for spec in specs if isinstance(spec, AttentionSpec)]
