"""What is timed to choose kernels: on a GPU with its clock, in the interpreter without."""

import pytest
import torch
from torch import Tensor

from ostro.backends.cuda.choices import choose
from ostro.backends.cuda.measuring import DeviceClock, Kind, Operand, l2_cache_bytes, this_gpu
from ostro.kernels.gpu.tilings import DotTiling, EpilogueKind, Matmul, SliceTiling, Tiling, default_tiling

EPILOGUES: tuple[EpilogueKind, ...] = ("plain", "added", "activated", "gated")


def drawn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * 0.1).to(device, dtype)


def default(matmul: Matmul, rows: int) -> Tiling:
    return default_tiling(rows, matmul.out_features, matmul.in_features, gated=matmul.is_gated, bits=matmul.bits)


@pytest.mark.cases(2)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_every_way_to_compute_a_matmul_can_be_timed(
    epilogue: EpilogueKind, with_bias: bool, device: torch.device
) -> None:
    matmul = Matmul(32, 64, 32, epilogue)
    bias = drawn(device, 32) if with_bias else None
    matrices = [Operand(drawn(device, 32, 64), bias) for _ in range(2)]
    clock = DeviceClock({matmul: matrices}, "silu", overlaps=False, cache_bytes=0)
    for rows in (1, 3):
        clock.run(rows, Kind(matmul, default(matmul, rows)))
    clock.run(3, Kind(matmul, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slices_that_norm_their_inputs_are_timed_as_they_will_run(dtype: torch.dtype, device: torch.device) -> None:
    """Of float16, they norm none."""
    matmul = Matmul(32, 256, 16, "gated")
    clock = DeviceClock({matmul: [Operand(drawn(device, 32, 256, dtype=dtype), None)]}, "silu", overlaps=False)
    clock.run(3, Kind(matmul, SliceTiling(8, 256, 4, folds=True)))


@pytest.mark.gpu
def test_times_are_reported_only_for_matmuls_that_run(device: torch.device) -> None:
    matmuls = {
        Matmul(512, 256, 16, each): [Operand(drawn(device, 512, 256, dtype=torch.bfloat16), None)] for each in EPILOGUES
    }
    clock = DeviceClock(matmuls, "silu", overlaps=True, cache_bytes=l2_cache_bytes(device))
    gpu = this_gpu(device)
    for job in clock.trials(matmuls, gpu):
        job()
    for matmul in matmuls:
        huge = DotTiling(256, 256, 4, stages=10)
        [took, librarys, too_large] = clock(matmul, 16, [default(matmul, 16), None, huge])
        assert took is not None
        assert librarys is not None
        assert min(took, librarys) > 0
        assert too_large is None
    found = choose(matmuls, gpu, clock)
    assert all(matmul in found for matmul in matmuls)
