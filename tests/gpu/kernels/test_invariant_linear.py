"""Matmuls that do not depend on their neighbours: near the plain twin, and bit for bit the same in any company."""

import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.epilogue import Epilogue
from ostro.kernels.gpu.invariant_linear import invariant_linear, sections, tiling_for
from ostro.kernels.gpu.small_batch import small_linear_plain

ON_GPU = torch.cuda.is_available()
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def drawn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(device, dtype)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows", [1, 40, 600])
@pytest.mark.parametrize(("outs", "ins"), [(64, 128), (37, 96), (40, 1100)])
def test_matmul_equals_the_plain_twin(device: torch.device, dtype: torch.dtype, rows: int, outs: int, ins: int) -> None:
    torch.manual_seed(0)
    if rows == 600 and dtype == torch.float32 and not ON_GPU:
        # Its tiles are smaller, and a quarter of the rows fills several.
        rows = 150
    x = drawn(device, rows, ins, dtype=dtype)
    weight, bias = drawn(device, outs, ins, dtype=dtype, scale=0.1), drawn(device, outs, dtype=dtype)
    for with_bias in (None, bias):
        ours, plain = (
            invariant_linear(x, weight, with_bias),
            small_linear_plain(x, weight, epilogue=Epilogue(with_bias)),
        )
        torch.testing.assert_close(ours, plain, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(
    ("outs", "ins"),
    [(70, 100), (40, 2100), *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in ((1024, 3072), (6144, 1024)))],
)
def test_a_row_has_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype, outs: int, ins: int) -> None:
    torch.manual_seed(0)
    rows = 1000 if ON_GPU else 600 if dtype == torch.float16 else 150
    x, weight, bias = drawn(device, rows, ins, dtype=dtype), drawn(device, outs, ins, dtype=dtype), drawn(device, outs)
    together = invariant_linear(x, weight, bias.to(dtype))
    for first, last in ((0, 1), (rows - 1, rows), (3, 20), (30, 140), (1, rows // 2)):
        assert torch.equal(invariant_linear(x[first:last], weight, bias.to(dtype)), together[first:last])


def test_both_ways_to_add_sections_up_are_tried_above() -> None:
    for dtype in (torch.float32, torch.float16):
        assert sections(40, 2100, tiling_for(dtype)) > 1
        assert sections(70, 100, tiling_for(dtype)) == 1


def test_counters_are_left_as_they_were_found(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = drawn(device, 3, 1024), drawn(device, 40, 1024)
    assert torch.equal(invariant_linear(x, weight), invariant_linear(x, weight))
