"""Decode attention of rows that share prefixes against its plain twin, and the work that is planned for them."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode_attention import Case, a_case, assert_near, spec_for
from torch import Tensor
from triton_device import DEVICE

from ostro.kernels.gpu.decode_attention import DecodeScratch, DecodeTuning, decode_attention, plan_decode
from ostro.kernels.gpu.prefix_attention import PrefixTuning, group_arrays
from ostro.models.architecture import AttentionSpec

BLOCK = DecodeTuning().block


@dataclass(frozen=True)
class Group:
    rows: Sequence[int]
    pages: int


def a_shared_case(
    lens: Sequence[int],
    groups: Sequence[Group],
    device: torch.device,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype | None = None,
) -> tuple[Case, Tensor]:
    """Rows of a group have its first row's leading pages; and the groups, as the device reads them."""
    case = a_case(lens, device, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
    for group in groups:
        for row in group.rows:
            assert group.pages * page_size < lens[row]
            case.tables[row, : group.pages] = case.tables[group.rows[0], : group.pages]
    described = [(group.rows, group.pages * page_size) for group in groups]
    return case, torch.from_numpy(group_arrays(described, len(lens) + 1, BLOCK)).to(device)


def a_scratch(
    case: Case,
    *,
    windows: Sequence[int | None] = (None,),
    tuning: DecodeTuning | None = None,
    prefix_tuning: PrefixTuning | None = None,
) -> DecodeScratch:
    rows, heads, head_dim = case.q.shape
    kv_heads, page_size = case.keys.shape[1:3]
    prefix_tuning = prefix_tuning or PrefixTuning(queries=16)
    return DecodeScratch(
        rows + 1, heads, kv_heads, head_dim, page_size, case.q.device,
        windows=windows, tuning=tuning, prefix_tuning=prefix_tuning,
    )  # fmt: skip


def attend(
    case: Case, groups: Tensor | None, scratch: DecodeScratch, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    plan_decode(case.lens, scratch, spec.window, groups)
    # A part that nobody wrote shows.
    scratch.partial.fill_(float("nan"))
    scratch.partial_lse.fill_(float("nan"))
    out = torch.full_like(case.q, float("nan"), memory_format=torch.contiguous_format)
    decode_attention(case.q, case.keys, case.values, case.tables, scratch, out, spec, sinks, groups=groups)
    assert not scratch.arrived.any()
    return out


def assert_matches(case: Case, groups: Tensor, scratch: DecodeScratch, spec: AttentionSpec) -> None:
    assert_near(attend(case, groups, scratch, spec), case.expected(spec))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[Group], int]:
    """Lengths, groups and a page size: members anywhere in the batch, beside rows of no group and empty ones."""
    page_size = draw(st.sampled_from([16, 48, 64, 128]))
    sizes = draw(st.lists(st.tuples(st.integers(2, 5), st.integers(1, 200 // page_size + 1)), min_size=1, max_size=3))
    rows = sum(size for size, _ in sizes) + draw(st.integers(0, 3))
    order = draw(st.permutations(range(rows)))
    lens, groups, at = [draw(st.integers(0, 150)) for _ in range(rows)], [], 0
    for size, pages in sizes:
        groups.append(Group(order[at : at + size], pages))
        at += size
        for row in groups[-1].rows:
            lens[row] = pages * page_size + draw(st.integers(1, 150))
    return lens, groups, page_size


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(
    batch=batches(),
    heads=st.sampled_from([(2, 2), (3, 1), (4, 2), (20, 1)]),
    head_dim=st.sampled_from([16, 24]),
    queries=st.sampled_from([16, 32]),
)
def test_any_batch_matches_the_twin(
    batch: tuple[list[int], list[Group], int], heads: tuple[int, int], head_dim: int, queries: int
) -> None:
    lens, groups, page_size = batch
    case, arrays = a_shared_case(
        lens, groups, DEVICE, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, page_size=page_size
    )
    scratch = a_scratch(case, prefix_tuning=PrefixTuning(queries=queries))
    assert_matches(case, arrays, scratch, spec_for(case))


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [80, 128, 256])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_head_dims_and_softcaps_match_the_twin(head_dim: int, softcap: float | None, device: torch.device) -> None:
    case, groups = a_shared_case([140, 200, 65, 130], [Group((0, 1, 3), 2)], device, head_dim=head_dim, page_size=64)
    assert_matches(case, groups, a_scratch(case), spec_for(case, softcap=softcap))


# Exact matmuls of fp32 have small tiles only, which is what the runner gives them. The interpreter has any, but
# multiplies bfloat16 as if it were integers.
PRECISIONS = (
    [(torch.float32, 16), *((dtype, queries) for dtype in (torch.float16, torch.bfloat16) for queries in (16, 64, 128))]
    if DEVICE.type == "cuda"
    else [
        *((torch.float32, 16), (torch.float16, 128)),
        *(
            pytest.param(dtype, queries, marks=pytest.mark.full)
            for dtype, queries in product((torch.float32, torch.float16), (16, 64, 128))
            if (dtype, queries) not in ((torch.float32, 16), (torch.float16, 128))
        ),
    ]
)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "queries"), PRECISIONS)
def test_each_precision_and_tile_stays_near_the_twin(dtype: torch.dtype, queries: int, device: torch.device) -> None:
    lens = [300 + 7 * row for row in range(20)]
    case, groups = a_shared_case(lens, [Group(range(3, 19), 4)], device, head_dim=128, page_size=64, dtype=dtype)
    assert_matches(case, groups, a_scratch(case, prefix_tuning=PrefixTuning(queries=queries)), spec_for(case))


def test_keys_and_values_in_8_bits_match_the_twin(device: torch.device) -> None:
    case, groups = a_shared_case(
        [300, 400, 290, 500], [Group((0, 1, 3), 4)], device, head_dim=128, page_size=64, dtype=torch.bfloat16
    )
    keys, values = (each.to(torch.float8_e4m3fn) for each in (case.keys, case.values))
    case = replace(case, keys=keys, values=values)
    assert_matches(case, groups, a_scratch(case), spec_for(case))


def test_sinks_count_once_beside_a_prefix(device: torch.device) -> None:
    case, groups = a_shared_case([140, 200, 65, 130], [Group((0, 1, 3), 2)], device, page_size=64)
    spec, sinks = spec_for(case), torch.randn(case.q.shape[1]).to(case.q)
    assert_near(attend(case, groups, a_scratch(case), spec, sinks), case.expected(spec, sinks))


def test_windowed_layers_read_their_own_keys_beside_layers_that_share(device: torch.device) -> None:
    case, groups = a_shared_case([200, 170, 140], [Group((0, 1, 2), 8)], device)
    scratch = a_scratch(case, windows=(None, 40))
    assert_matches(case, groups, scratch, spec_for(case))
    windowed = spec_for(case, window=40)
    assert_near(attend(case, None, scratch, windowed), case.expected(windowed))


def test_a_second_kernel_joins_to_the_same_result(device: torch.device) -> None:
    case, groups = a_shared_case([400, 390, 90, 0], [Group((0, 1), 20)], device)
    scratch = a_scratch(case, tuning=DecodeTuning(joins_in_place=False))
    assert_matches(case, groups, scratch, spec_for(case))


@pytest.mark.full
def test_the_scratch_serves_batches_with_groups_and_without_in_turn(device: torch.device) -> None:
    case, groups = a_shared_case([200, 190, 180], [Group((0, 2), 8)], device)
    other, others = a_shared_case([300, 150, 290], [Group((1, 2), 4)], device)
    spec, scratch = spec_for(case), a_scratch(case)
    for each, arrays in [(case, groups), (case, None), (other, others), (other, None), (case, groups)] * 2:
        assert_near(attend(each, arrays, scratch, spec), each.expected(spec))


def test_rows_may_be_idle_while_groups_are_known(device: torch.device) -> None:
    """Graphs are captured with empty rows, whatever was sent before."""
    case, groups = a_shared_case([200, 190, 180], [Group((0, 2), 8)], device)
    idle = replace(case, lens=torch.zeros_like(case.lens))
    attend(idle, groups, a_scratch(case), spec_for(case))
    assert_matches(case, groups, a_scratch(case), spec_for(case))


@pytest.mark.full
@settings(max_examples=200 if DEVICE.type == "cuda" else 20, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(2, 12), st.integers(1, 30)), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (8, 1), (20, 1)]),
    target=st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_planned_parts_cover_each_prefix_once_and_have_slots_of_their_own(
    sizes: list[tuple[int, int]], heads: tuple[int, int], target: int, seed: int
) -> None:
    dice = random.Random(seed)
    rows = sum(size for size, _ in sizes) + 2
    order = dice.sample(range(rows), rows)
    group, tile = heads[0] // heads[1], 16
    scratch = DecodeScratch(rows, *heads, 16, 64, DEVICE, prefix_tuning=PrefixTuning(queries=tile))
    prefix = scratch.prefix
    assert prefix is not None
    # As if the device had so many processors.
    prefix.target = target
    capacity = math.ceil(rows * group / tile) + rows // 2 + target
    prefix.items = torch.zeros(capacity, 8, dtype=torch.int32, device=DEVICE)
    groups, lens, at = [], [100] * rows, 0
    for size, blocks in sizes:
        groups.append((order[at : at + size], blocks * BLOCK))
        for row in order[at : at + size]:
            lens[row] = blocks * BLOCK + dice.randint(1, 300)
        at += size
    arrays = torch.from_numpy(group_arrays(groups, rows, BLOCK)).to(DEVICE)
    plan_decode(torch.tensor(lens, dtype=torch.int32, device=DEVICE), scratch, None, arrays)

    count = int(prefix.count)
    assert count <= capacity
    items = prefix.items[:count].tolist()
    first_slot = scratch.row_parts[None][:, 1].tolist()
    slots: list[int] = []
    for begin, size, _, _, _, part, *_ in items:
        assert (begin, size) in {(sum(s for s, _ in sizes[:i]), sizes[i][0]) for i in range(len(sizes))}
        assert part >= 0
    begin = 0
    for members, keys in groups:
        own = [item for item in items if item[0] == begin]
        begin += len(members)
        for number in range(math.ceil(len(members) * group / tile)):
            parts = sorted(item[3:6] for item in own if item[2] == number)
            assert [part for _, _, part in parts] == list(range(len(parts)))
            assert [first for first, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
            assert parts[-1][1] == keys
        num_parts = len({item[5] for item in own})
        slots += [first_slot[row] + part for row in members for part in range(num_parts)]
    assert len(slots) <= rows + math.ceil(tile * target / group)
    listed = scratch.items[None][: int(scratch.counts[None])].tolist()
    slots += [slot + part for _, _, _, part, _, slot, *_ in listed]
    assert sorted(slots) == list(range(len(slots)))
    for row, length in enumerate(lens):
        own = sorted(item for item in listed if item[0] == row)
        own_prefix = next((keys for members, keys in groups if row in members), 0)
        assert [item[1] for item in own] == [own_prefix, *(item[2] for item in own[:-1])]
        assert own[-1][2] == length
        assert {item[6] for item in own} == {len(own)}
        assert {item[4] for item in own} == {own[-1][3] + 1}
