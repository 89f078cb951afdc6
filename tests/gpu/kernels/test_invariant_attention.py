"""Attention that does not depend on how tokens come: near the plain twin, and the same bits in any tiles."""

import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.decode_attention import reference_attention
from ostro.kernels.gpu.invariant_attention import invariant_attention, invariant_tuning, single_tiles
from ostro.kernels.gpu.prefill_attention import Chunk, prefill_tiles, tokens_in_tile
from ostro.kernels.gpu.tile_attention import attend_packed_tile
from ostro.models.architecture import AttentionSpec

ON_GPU = torch.cuda.is_available()
LENGTH = 700 if ON_GPU else 130
# The interpreter is slow: there, one list with a border inside a block and one with short chunks on a block's border.
CHUNKS: list[tuple[int, ...]] = [(63, 2, LENGTH - 65), (1, 49, LENGTH - 50)]
if ON_GPU:
    CHUNKS += [(1, LENGTH - 1), (LENGTH - 7, 7), (50, 41, LENGTH - 91)]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Sequence:
    """Queries of all tokens of one sequence, and its pages: the first row of the table is another's."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        page_size: int = 64,
        window: int | None = None,
        softcap: float | None = None,
        sunk: bool = False,
    ) -> None:
        torch.manual_seed(0)
        pages = -(-LENGTH // page_size)
        cache = torch.full((2, pages + 1, kv_heads, page_size, head_dim), float("nan"))
        self.tables = torch.stack((torch.zeros(pages), 1 + torch.randperm(pages))).int().to(device)
        for at, page in enumerate(self.tables[1].tolist()):
            slots = min(page_size, LENGTH - at * page_size)
            cache[:, page, :, :slots] = torch.randn(2, kv_heads, slots, head_dim)
        self.keys, self.values = cache.to(device, dtype)
        # As a fused projection leaves it: keys and values follow in the same row.
        self.q = torch.randn(LENGTH, heads + 2 * kv_heads, head_dim).to(device, dtype)[:, :heads]
        self.spec = AttentionSpec(scale=head_dim**-0.5, window=window, softcap=softcap)
        self.sinks = 2 * torch.randn(heads).to(device, dtype) if sunk else None
        self.tuning = invariant_tuning(dtype, heads, kv_heads, head_dim)
        self.tile = tokens_in_tile(heads, kv_heads, self.tuning)

    def attend(self, tiles: list[tuple[int, int, int, int]]) -> Tensor:
        out = torch.zeros_like(self.q, memory_format=torch.contiguous_format)
        listed = torch.tensor(tiles, dtype=torch.int32, device=self.q.device)
        return invariant_attention(
            self.q, self.keys, self.values, self.tables, listed, out, self.spec, self.tuning, self.sinks
        )

    def in_chunks(self, *lengths: int) -> Tensor:
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        chunks = [Chunk(1, start, start, length) for start, length in zip(starts, lengths, strict=True)]
        return self.attend(prefill_tiles(chunks, self.tile))

    def check(self) -> None:
        whole = self.in_chunks(LENGTH)
        plain = reference_attention(self.q, self.keys, self.values, self.tables[1], 0, self.spec, self.sinks)
        assert (whole.float() - plain).norm() / plain.norm() < CLOSE[whole.dtype]
        for lengths in CHUNKS:
            assert torch.equal(self.in_chunks(*lengths), whole)
        some = range(0, LENGTH, 1 if ON_GPU else 43)
        singly = self.attend([(1, at, at, 1) for at in some])
        assert torch.equal(singly[some.start :: some.step], whole[some.start :: some.step])


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 2.0)])
def test_a_token_has_the_same_bits_in_any_tile(
    device: torch.device, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    Sequence(device, dtype, window=window, softcap=softcap).check()


@pytest.mark.full
def test_sinks_leave_results_batch_invariant(device: torch.device) -> None:
    Sequence(device, torch.float32, window=40, sunk=True).check()


@pytest.mark.cases(2)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 80), (3, 1, 64), (20, 1, 16), (4, 2, 128)])
def test_heads_of_every_kind(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> None:
    Sequence(device, torch.float16, heads=heads, kv_heads=kv_heads, head_dim=head_dim).check()


@pytest.mark.full
@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_pages_need_not_be_as_long_as_blocks(device: torch.device, page_size: int) -> None:
    Sequence(device, torch.float16, page_size=page_size).check()


def test_rows_of_single_tokens_make_their_own_tiles_and_empty_ones_read_nothing(device: torch.device) -> None:
    positions, lens = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([4, 0, 0], [5, 1, 0]))
    tiles = single_tiles(positions, lens)
    assert tiles.dtype == torch.int32
    assert tiles.tolist() == [[0, 0, 4, 1], [1, 1, 0, 1], [2, 2, 0, 0]]
    sequence = Sequence(device, torch.float32)
    assert not sequence.attend([(0, 2, 0, 0)]).any()


@pytest.mark.full
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 2.0)])
def test_packed_arrays_need_no_strides(device: torch.device, window: int | None, softcap: float | None) -> None:
    """As the JAX runner calls the kernel."""
    sequence = Sequence(device, torch.float32, heads=6, head_dim=20, window=window, softcap=softcap)
    q = sequence.q.contiguous()
    out, whole = torch.zeros_like(q), sequence.in_chunks(LENGTH)
    tiles = prefill_tiles([Chunk(1, 0, 0, LENGTH)], 8)
    attend_packed_tile[(2, len(tiles))](
        q,
        sequence.keys,
        sequence.values,
        sequence.tables,
        torch.tensor(tiles, dtype=torch.int32, device=device),
        out,
        scale=sequence.spec.scale,
        softcap=softcap or 0.0,
        window=window or 0,
        group=3,
        kv_heads=2,
        head_dim=20,
        padded_dim=32,
        page_size=64,
        table_width=sequence.tables.shape[1],
        rows=32,
        block=32,
        stages=3,
    )
    assert (out - whole).norm() / whole.norm() < CLOSE[torch.float32]
