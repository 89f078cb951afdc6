"""Decode attention against its plain twin, over caches whose unwritten slots hold NaNs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.decode_attention import (
    DecodeScratch,
    DecodeTuning,
    decode_attention,
    plan_decode,
    reference_attention,
)
from ostro.models.architecture import AttentionSpec


@dataclass(frozen=True)
class Case:
    """One call's inputs."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    lens: Tensor

    def expected(self, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        rows = [
            reference_attention(self.q[i : i + 1], self.keys, self.values, self.tables[i], length - 1, spec, sinks)
            if length
            else torch.zeros_like(self.q[i : i + 1], dtype=torch.float32)
            for i, length in enumerate(self.lens.tolist())
        ]
        return torch.cat(rows)


def a_case(
    lens: Sequence[int],
    device: torch.device,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 64,
    dtype: torch.dtype | None = None,
) -> Case:
    """Pages in random order, with space between them; NaN in every slot that no token has written."""
    needed = [-(-length // page_size) for length in lens]
    num_pages = sum(needed) + 3
    order = torch.randperm(num_pages)
    cache = torch.full((num_pages, 2, kv_heads, page_size, head_dim), float("nan"))
    tables = torch.full((len(lens), max(needed) + 1), 2**30, dtype=torch.int32)
    used = 0
    for row, (length, pages) in enumerate(zip(lens, needed, strict=True)):
        tables[row, :pages] = order[used : used + pages].int()
        for index in range(pages):
            slots = min(page_size, length - index * page_size)
            cache[order[used + index], :, :, :slots] = torch.randn(2, kv_heads, slots, head_dim)
        used += pages
    # The interpreter is exact; on a GPU the matrix units are what is tested.
    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    cache = cache.to(device, dtype)
    # As a fused projection leaves it: keys and values follow in the same row.
    fused = torch.randn(len(lens), heads + 2 * kv_heads, head_dim).to(device, dtype)
    tokens = torch.tensor(lens, dtype=torch.int32, device=device)
    return Case(fused[:, :heads], cache[:, 0], cache[:, 1], tables.to(device), tokens)


def a_scratch(
    case: Case,
    *,
    windows: Sequence[int | None] = (None,),
    tuning: DecodeTuning | None = None,
) -> DecodeScratch:
    return DecodeScratch(
        case.q.shape[0] + 1,
        case.q.shape[1],
        case.keys.shape[1],
        case.q.shape[2],
        case.keys.shape[2],
        case.q.device,
        windows=windows,
        tuning=tuning,
    )


def attend(case: Case, scratch: DecodeScratch, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
    plan_decode(case.lens, scratch, spec.window)
    out = torch.full_like(case.q, float("nan"), memory_format=torch.contiguous_format)
    return decode_attention(case.q, case.keys, case.values, case.tables, scratch, out, spec, sinks)


def some_sinks(case: Case) -> Tensor:
    """Sinks in the queries' dtype; one takes everything, and one nothing."""
    sinks = 3 * torch.randn(case.q.shape[1])
    sinks[0], sinks[-1] = 300.0, -300.0
    return sinks.to(case.q)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    error = (actual.float() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[actual.dtype]


def spec_for(case: Case, *, window: int | None = None, softcap: float | None = None) -> AttentionSpec:
    return AttentionSpec(scale=case.q.shape[2] ** -0.5, window=window, softcap=softcap)


@pytest.mark.cases(3)
@pytest.mark.parametrize("lens", [[1], [64], [65], [600], [1, 63, 64, 65, 130, 7], [0, 200, 0, 0, 31], [0]])
def test_lengths_of_every_kind_match_the_twin(lens: list[int], device: torch.device) -> None:
    case = a_case(lens, device)
    spec = spec_for(case)
    assert_near(attend(case, a_scratch(case), spec), case.expected(spec))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (4, 1), (14, 2), (16, 1), (40, 2)])
def test_groups_of_every_size_match_the_twin(heads: int, kv_heads: int, device: torch.device) -> None:
    case = a_case([150, 40, 0], device, heads=heads, kv_heads=kv_heads, head_dim=32)
    spec = spec_for(case)
    assert_near(attend(case, a_scratch(case), spec), case.expected(spec))


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_head_dims_of_every_size_match_the_twin(head_dim: int, device: torch.device) -> None:
    case = a_case([150, 40], device, head_dim=head_dim)
    spec = spec_for(case)
    assert_near(attend(case, a_scratch(case), spec), case.expected(spec))


@pytest.mark.cases(2)
@pytest.mark.parametrize("page_size", [16, 32, 48, 128, 256])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_pages_need_not_be_as_long_as_blocks(page_size: int, block: int, device: torch.device) -> None:
    case = a_case([300, 129, 17], device, page_size=page_size)
    spec = spec_for(case)
    scratch = a_scratch(case, tuning=DecodeTuning(block=block, buffers=1))
    assert_near(attend(case, scratch, spec), case.expected(spec))


@pytest.mark.cases(2)
@pytest.mark.parametrize("window", [1, 50, 64, 65, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_window_and_softcap_match_the_twin(window: int, softcap: float | None, device: torch.device) -> None:
    case = a_case([400, 128, 10, 0], device, heads=2, kv_heads=1)
    spec = spec_for(case, window=window, softcap=softcap)
    scratch = a_scratch(case, windows=(None, window))
    assert_near(attend(case, scratch, spec), case.expected(spec))
    everything = spec_for(case, softcap=softcap)
    assert_near(attend(case, scratch, everything), case.expected(everything))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's notice of the sink that takes everything
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("joins_in_place", [True, False])
def test_sinks_match_the_twin(window: int | None, joins_in_place: bool, device: torch.device) -> None:
    """In rows of one part and of several, and in one without keys."""
    case = a_case([400, 30, 1, 0], device, heads=6, kv_heads=2)
    spec, sinks = spec_for(case, window=window), some_sinks(case)
    scratch = a_scratch(case, windows=(window,), tuning=DecodeTuning(joins_in_place=joins_in_place))
    assert_near(attend(case, scratch, spec, sinks), case.expected(spec, sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_precision_stays_near_the_twin(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 as if it were integers")
    case = a_case([333, 80, 5], device, head_dim=128, dtype=dtype)
    spec = spec_for(case)
    assert_near(attend(case, a_scratch(case), spec), case.expected(spec))


def test_eight_bit_keys_and_values_stay_near_the_twin(device: torch.device) -> None:
    wide = a_case([333, 80, 5, 0], device, head_dim=128, dtype=torch.bfloat16)
    case = replace(wide, keys=wide.keys.to(torch.float8_e4m3fn), values=wide.values.to(torch.float8_e4m3fn))
    spec = spec_for(case)
    assert_near(attend(case, a_scratch(case), spec), case.expected(spec))


def test_a_second_kernel_joins_to_the_same_result(device: torch.device) -> None:
    case = a_case([600, 90, 0], device)
    spec = spec_for(case)
    tuning = DecodeTuning()
    apart = attend(case, a_scratch(case, tuning=replace(tuning, joins_in_place=False)), spec)
    assert_near(attend(case, a_scratch(case, tuning=tuning), spec), apart.float())


@pytest.mark.full
def test_the_scratch_serves_call_after_call(device: torch.device) -> None:
    """The counters of the joins must be back at zero when a call ends."""
    scratch = a_scratch(a_case([600, 600, 600], device))
    for lens in ([600, 90, 3], [64, 0, 512], [1, 600]):
        case = a_case(lens, device)
        spec = spec_for(case)
        for _ in range(2):
            assert_near(attend(case, scratch, spec), case.expected(spec))
        assert not scratch.arrived.any()


@pytest.mark.full
@pytest.mark.parametrize("programs_per_sm", [1, 3, 1000])
def test_any_number_of_programs_gives_the_same_result(programs_per_sm: int, device: torch.device) -> None:
    case = a_case([300, 90, 0, 1], device)
    spec = spec_for(case)
    few = a_scratch(case, tuning=DecodeTuning(programs_per_sm=programs_per_sm))
    assert torch.equal(attend(case, few, spec), attend(case, a_scratch(case), spec))


def work_list(lens: Sequence[int], scratch: DecodeScratch, device: torch.device) -> list[list[int]]:
    """The planned (row, first key, end, part, parts, first slot), in order."""
    plan_decode(torch.tensor(lens, dtype=torch.int32, device=device), scratch)
    return scratch.items[None][: int(scratch.counts[None])].tolist()


def a_planner(rows: int, device: torch.device, *, target: int) -> DecodeScratch:
    # As many tiles as multiprocessors.
    tuning = DecodeTuning(parts_per_sm=target)
    return DecodeScratch(rows, 2, 2, 32, 64, device, tuning=tuning, processors=2)


def test_a_short_list_is_cut_at_every_block_and_a_long_one_is_not(device: torch.device) -> None:
    scratch = a_planner(40, device, target=8)
    lone = work_list([500], scratch, device)
    assert [item[1:3] for item in lone] == [[64 * i, min(500, 64 * i + 64)] for i in range(8)]
    assert len(work_list([500] * 40, scratch, device)) == 40


def test_parts_cover_each_row_once_and_long_parts_come_first_then_first_parts(device: torch.device) -> None:
    scratch = a_planner(7, device, target=9)
    lens = [500, 0, 64, 130, 1000, 1, 500]
    planned = work_list(lens, scratch, device)
    assert len(planned) <= 7 + 9

    def rank(item: list[int]) -> tuple[int, int, int]:
        blocks = math.ceil(lens[item[0]] / 64)
        return -math.ceil(blocks / item[4]), item[3], item[0]

    assert planned == sorted(planned, key=rank)
    slots = sorted(item[5] + item[3] for item in planned)
    assert slots == list(range(len(planned)))
    for row, length in enumerate(lens):
        own = [item for item in planned if item[0] == row]
        assert [item[3] for item in own] == list(range(own[0][4]))
        assert [item[1] for item in own] == [0, *(item[2] for item in own[:-1])]
        assert own[-1][2] == length


@pytest.mark.parametrize(
    ("head_dim", "tuning", "element_size", "resident"),
    [
        (128, DecodeTuning(), 2, 3),
        (256, DecodeTuning(), 2, 1),
        (256, DecodeTuning(block=32), 2, 3),
        (128, DecodeTuning(), 4, 1),
        (256, DecodeTuning(), 1, 3),
        (256, DecodeTuning(resident=2), 2, 2),
    ],
)
def test_as_many_programs_are_launched_for_few_rows_as_fit(
    head_dim: int, tuning: DecodeTuning, element_size: int, resident: int
) -> None:
    scratch = DecodeScratch(8, 4, 1, head_dim, 64, torch.device("meta"), tuning=tuning, processors=132, overlaps=True)
    assert scratch.programs(8, element_size) == 132 * resident


def test_wide_heads_match_the_twin_with_windows_of_several_parts(device: torch.device) -> None:
    case = a_case([600, 590, 40, 0], device, heads=4, kv_heads=1, head_dim=256)
    spec = spec_for(case, window=512)
    assert_near(attend(case, a_scratch(case, windows=(512,)), spec), case.expected(spec))
