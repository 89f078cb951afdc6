"""Prefill attention against its plain twin, over caches whose unwritten slots hold NaNs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.decode_attention import reference_attention
from ostro.kernels.gpu.prefill_attention import (
    Chunk,
    PrefillTuning,
    prefill_attention,
    prefill_tiles,
    tokens_in_tile,
    tuning_for,
)
from ostro.models.architecture import AttentionSpec


@dataclass(frozen=True)
class Case:
    """One call's inputs; tokens before the first chunk belong to nobody and must be left alone."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    chunks: Sequence[Chunk]

    def expected(self, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        out = torch.zeros(self.q.shape, device=self.q.device)
        for chunk in self.chunks:
            span = slice(chunk.offset, chunk.offset + chunk.length)
            pages = self.tables[chunk.row]
            out[span] = reference_attention(self.q[span], self.keys, self.values, pages, chunk.start, spec, sinks)
        return out


def a_case(
    spans: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 64,
    dtype: torch.dtype | None = None,
    unused: int = 3,
) -> Case:
    """Chunks of (start, length); pages in random order; NaN in every slot that no token has written."""
    needed = [-(-(start + length) // page_size) for start, length in spans]
    num_pages = sum(needed) + 3
    order = torch.randperm(num_pages)
    cache = torch.full((num_pages, 2, kv_heads, page_size, head_dim), float("nan"))
    tables = torch.full((len(spans) + 1, max(needed) + 1), 2**30, dtype=torch.int32)
    chunks = []
    used, offset = 0, unused
    for row, ((start, length), pages) in enumerate(zip(spans, needed, strict=True), start=1):
        tables[row, :pages] = order[used : used + pages].int()
        for index in range(pages):
            slots = min(page_size, start + length - index * page_size)
            cache[order[used + index], :, :, :slots] = torch.randn(2, kv_heads, slots, head_dim)
        chunks.append(Chunk(row, offset, start, length))
        used, offset = used + pages, offset + length
    # The interpreter is exact; on a GPU the matrix units are what is tested.
    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    cache = cache.to(device, dtype)
    # As a fused projection leaves it: keys and values follow in the same row.
    fused = torch.randn(offset, heads + 2 * kv_heads, head_dim).to(device, dtype)
    return Case(fused[:, :heads], cache[:, 0], cache[:, 1], tables.to(device), chunks)


def attend(case: Case, spec: AttentionSpec, tuning: PrefillTuning, sinks: Tensor | None = None) -> Tensor:
    listed = prefill_tiles(case.chunks, tokens_in_tile(case.q.shape[1], case.keys.shape[1], tuning))
    tiles = torch.tensor(listed, dtype=torch.int32, device=case.q.device)
    out = torch.zeros_like(case.q, memory_format=torch.contiguous_format)
    return prefill_attention(case.q, case.keys, case.values, case.tables, tiles, out, spec, tuning, sinks)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    error = (actual.float() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[actual.dtype]


def spec_for(case: Case, *, window: int | None = None, softcap: float | None = None) -> AttentionSpec:
    return AttentionSpec(scale=case.q.shape[2] ** -0.5, window=window, softcap=softcap)


# Small, so that a tile has many blocks; enough for groups of 20.
SMALL = PrefillTuning(rows=64, block=32, buffers=1, warps=4)


@pytest.mark.cases(2)
@pytest.mark.parametrize("spans", [[(0, 1)], [(0, 64)], [(0, 200), (64, 65), (130, 33)], [(300, 1), (0, 5), (63, 2)]])
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("blocks_a_step", [1, 2])
def test_chunks_of_every_kind_match_the_twin(
    spans: list[tuple[int, int]], descriptors: bool, blocks_a_step: int, device: torch.device
) -> None:
    case = a_case(spans, device)
    spec = spec_for(case)
    tuning = PrefillTuning(rows=64, block=32, buffers=1, warps=4, descriptors=descriptors, blocks_a_step=blocks_a_step)
    assert_near(attend(case, spec, tuning), case.expected(spec))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's notice of the sink that takes everything
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_match_the_twin(window: int | None, device: torch.device) -> None:
    case = a_case([(0, 70), (64, 33)], device, heads=6)
    sinks = 3 * torch.randn(6)
    sinks[0], sinks[-1] = 300.0, -300.0
    spec, sinks = spec_for(case, window=window), sinks.to(case.q)
    assert_near(attend(case, spec, SMALL, sinks), case.expected(spec, sinks))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("descriptors", [False, True])
def test_tiles_of_zeros_have_no_tokens(window: int | None, descriptors: bool, device: torch.device) -> None:
    """A graph's grid has room for more tiles than there are: what they would write to stays as it is."""
    case = a_case([(0, 70), (33, 5)], device)
    spec, tuning = spec_for(case, window=window), replace(SMALL, descriptors=descriptors)
    listed = prefill_tiles(case.chunks, tokens_in_tile(case.q.shape[1], case.keys.shape[1], tuning))
    tiles = torch.tensor([*listed, *[(0, 0, 0, 0)] * 7], dtype=torch.int32, device=device)
    out = torch.zeros_like(case.q, memory_format=torch.contiguous_format)
    prefill_attention(case.q, case.keys, case.values, case.tables, tiles, out, spec, tuning)
    assert_near(out, case.expected(spec))
    nothing = torch.full_like(out, 7.0)
    prefill_attention(case.q, case.keys, case.values, case.tables, tiles[len(listed) :], nothing, spec, tuning)
    assert (nothing == 7.0).all()


@pytest.mark.full
def test_the_default_tuning_matches_the_twin(device: torch.device) -> None:
    case = a_case([(0, 300), (100, 140)], device)
    spec = spec_for(case)
    assert_near(attend(case, spec, tuning_for(case.q.dtype)), case.expected(spec))


@pytest.mark.cases(2)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (14, 2), (16, 1), (40, 2)])
def test_groups_of_every_size_match_the_twin(heads: int, kv_heads: int, device: torch.device) -> None:
    case = a_case([(0, 40), (70, 33)], device, heads=heads, kv_heads=kv_heads, head_dim=32)
    spec = spec_for(case)
    assert_near(attend(case, spec, SMALL), case.expected(spec))


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_head_dims_of_every_size_match_the_twin(head_dim: int, device: torch.device) -> None:
    case = a_case([(0, 70), (100, 30)], device, head_dim=head_dim)
    spec = spec_for(case)
    assert_near(attend(case, spec, SMALL), case.expected(spec))


@pytest.mark.parametrize("page_size", [16, 48, 128, 256])
@pytest.mark.parametrize("block", [32, 64])
def test_pages_need_not_be_as_long_as_blocks(page_size: int, block: int, device: torch.device) -> None:
    case = a_case([(0, 140), (129, 30)], device, page_size=page_size)
    spec = spec_for(case)
    tuning = PrefillTuning(rows=64, block=block, buffers=1, warps=4)
    assert_near(attend(case, spec, tuning), case.expected(spec))


@pytest.mark.cases(2)
@pytest.mark.parametrize("window", [1, 20, 64, 65, 120, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_window_and_softcap_match_the_twin(window: int, softcap: float | None, device: torch.device) -> None:
    case = a_case([(0, 200), (150, 60), (64, 1)], device, heads=2, kv_heads=1)
    spec = spec_for(case, window=window, softcap=softcap)
    tuning = PrefillTuning(rows=32, block=32, buffers=1, warps=4, blocks_a_step=1 if softcap else 2)
    assert_near(attend(case, spec, tuning), case.expected(spec))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_precision_stays_near_the_twin(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 as if it were integers")
    case = a_case([(0, 200), (128, 100)], device, head_dim=128, dtype=dtype)
    spec = spec_for(case)
    assert_near(attend(case, spec, tuning_for(dtype)), case.expected(spec))


@pytest.mark.full
@pytest.mark.parametrize("descriptors", [False, True])
def test_eight_bit_keys_and_values_stay_near_the_twin(descriptors: bool, device: torch.device) -> None:
    wide = a_case([(0, 200), (128, 100)], device, head_dim=128, dtype=torch.bfloat16)
    case = replace(wide, keys=wide.keys.to(torch.float8_e4m3fn), values=wide.values.to(torch.float8_e4m3fn))
    spec = spec_for(case)
    tuning = replace(tuning_for(torch.bfloat16), descriptors=descriptors)
    assert_near(attend(case, spec, tuning), case.expected(spec))


def test_tiles_cover_each_chunk_once_and_long_work_comes_first() -> None:
    chunks = [Chunk(4, 0, 0, 100), Chunk(1, 100, 500, 130), Chunk(2, 230, 0, 1)]
    tiles = prefill_tiles(chunks, 64)
    assert tiles == [
        (1, 228, 628, 2),
        (1, 164, 564, 64),
        (1, 100, 500, 64),
        (4, 64, 64, 36),
        (4, 0, 0, 64),
        (2, 230, 0, 1),
    ]
