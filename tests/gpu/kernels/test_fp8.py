"""Matmuls with 8-bit weights, against their plain twins."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE
from triton_fp8 import round_as_gpus_do

from ostro.kernels.gpu import fp8
from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue
from ostro.kernels.gpu.mlp import PLAIN
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.prologue import Prologue
from ostro.kernels.gpu.tilings import DotTiling, Tiling, VectorTiling

ON_GPU = DEVICE.type == "cuda"
ONE = VectorTiling(outs=4, ins=64, warps=4)
GATED, ADDED = Epilogue(activation="silu", gated=True), Epilogue(adds=True)
MANY_OUTS = VectorTiling(outs=64, ins=64, warps=4)
DOT = DotTiling(outs=16, ins=32, warps=4, stages=2)
SPLIT = DotTiling(outs=16, ins=32, warps=4, stages=2, splits=3)
FEW = pytest.mark.parametrize(
    ("rows", "tiling"),
    [(1, ONE), (1, DOT), (3, DOT), (16, DOT), (17, DOT)],
    ids=["vector", "dot of one", "dot", "most unrounded", "rounded"],
)
MOST_FUSED = 256
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_gpus_do(monkeypatch)


def drawn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(device, dtype)


def weights(device: torch.device, outs: int, ins: int) -> tuple[Tensor, Tensor]:
    # Channels of different sizes, so that a scale in the wrong place shows.
    return fp8.quantize_weight(drawn(device, outs, ins, scale=0.1) * torch.rand(outs, 1, device=device).add_(0.1))


def check(ours: Tensor, plain: Tensor) -> None:
    tolerance = CLOSE[plain.dtype]
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


def test_a_weight_comes_back_within_half_a_step(device: torch.device) -> None:
    torch.manual_seed(0)
    weight = drawn(device, 5000, 32) * torch.logspace(-6, 6, 5000, device=device)[:, None]
    small, scale = fp8.quantize_weight(weight)
    assert small.dtype == fp8.FP8
    assert scale.shape == (5000,)
    most = weight.abs().amax(1)
    torch.testing.assert_close(fp8.widened(small, scale).abs().amax(1), most)
    # Three bits after the leading one, and a smallest step of 2 ** -9.
    allowed = torch.maximum(weight.abs() / 16, scale[:, None] * 2**-10)
    assert ((fp8.widened(small, scale) - weight).abs() <= allowed * 1.0001).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, of infinity times zero
def test_zeros_stay_zero_and_what_is_not_finite_does_not_become_finite(device: torch.device) -> None:
    x = torch.zeros(4, 32, device=device)
    x[1, 3] = float("nan")
    x[2, 3] = float("inf")
    x[3, 3] = 5.0
    for quantize in (fp8.quantize_rows, fp8.quantize_rows_plain):
        back = fp8.widened(*quantize(x))
        assert torch.equal(back[[0, 3]], x[[0, 3]])
        assert not back[1].isfinite().all()
        assert not back[2].isfinite().all()


@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (5, 80), (3, 3072), (2, fp8._WIDEST_BLOCK + 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_rounded_as_by_the_plain_twin(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = drawn(device, rows, 2, width, dtype=dtype, scale=3.0)[:, 1]
    small, scale = fp8.quantize_rows(x)
    plain, plain_scale = fp8.quantize_rows_plain(x)
    assert torch.equal(scale, plain_scale)
    assert torch.equal(small.view(torch.uint8), plain.view(torch.uint8))


def test_every_byte_means_to_the_vector_kernel_what_it_means_to_torch(device: torch.device) -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8, device=device)
    bytes_[[127, 255]] = 0  # not a number
    weight = bytes_.view(fp8.FP8)[:, None].repeat(1, 16).contiguous()
    one = torch.zeros(1, 16, device=device)
    for place in range(4):
        one[0, place] = 1.0
        ours = fp8.fp8_small_linear(one, weight, torch.ones(256, device=device), tiling=MANY_OUTS)
        assert torch.equal(ours[0], bytes_.view(fp8.FP8).float() * (place + 1))


@FEW
@pytest.mark.parametrize(("outs", "ins"), [(32, 128), (37, 96), (16, 208)])
def test_small_batch_matmul_equals_the_plain_twin(
    device: torch.device, rows: int, tiling: Tiling, outs: int, ins: int
) -> None:
    torch.manual_seed(0)
    x, (weight, scale), bias = drawn(device, rows, ins), weights(device, outs, ins), drawn(device, outs)
    check(
        fp8.fp8_small_linear(x, weight, scale, tiling=tiling),
        fp8.fp8_small_linear_plain(x, weight, scale),
    )
    check(
        fp8.fp8_small_linear(x, weight, scale, epilogue=Epilogue(bias), tiling=tiling),
        fp8.fp8_small_linear_plain(x, weight, scale, epilogue=Epilogue(bias)),
    )


@pytest.mark.parametrize("ins", [128, 208])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_of_one_row_comes_before_the_matmul(device: torch.device, ins: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, norm = drawn(device, 1, ins, dtype=dtype), NormWeights(drawn(device, ins, dtype=dtype), 1e-6)
    weight, scale = weights(device, 20, ins)
    # Added to float32, so that no rounding hides what is wrong before it.
    stream = drawn(device, 1, 20)
    plain = fp8.fp8_small_linear_plain(x, weight, scale, Prologue(norm), ADDED, residual=stream.clone())
    check(fp8.fp8_small_linear(x, weight, scale, Prologue(norm), ADDED, residual=stream, tiling=ONE), plain)


@pytest.mark.parametrize(
    ("rows", "tiling"), [(1, ONE), (2, DOT), (2, SPLIT), (20, SPLIT)], ids=["vector", "dot", "split", "rounded"]
)
@pytest.mark.parametrize("ins", [192, 208])
def test_result_is_added_to_the_residual_in_place(device: torch.device, rows: int, tiling: Tiling, ins: int) -> None:
    torch.manual_seed(0)
    x, (weight, scale), residual = drawn(device, rows, ins), weights(device, 40, ins), drawn(device, rows, 40)
    plain = fp8.fp8_small_linear_plain(x, weight, scale, epilogue=ADDED, residual=residual.clone())
    for _ in range(2):  # The second time finds the counters of splits as the first did.
        stream = residual.clone()
        assert fp8.fp8_small_linear(x, weight, scale, epilogue=ADDED, residual=stream, tiling=tiling) is stream
        check(stream, plain)


@FEW
@pytest.mark.parametrize("activation", sorted(PLAIN))
def test_gate_and_up_meet_in_one_program(device: torch.device, rows: int, tiling: Tiling, activation: str) -> None:
    torch.manual_seed(0)
    x, (weight, scale), bias = drawn(device, rows, 96), weights(device, 72, 96), drawn(device, 72)
    epilogue = Epilogue(bias, activation, gated=True)
    ours = fp8.fp8_small_linear(x, weight, scale, epilogue=epilogue, tiling=tiling)
    assert ours.shape == (rows, 36)
    check(ours, fp8.fp8_small_linear_plain(x, weight, scale, epilogue=epilogue))


@FEW
def test_plain_activations_and_multiplied_sums_come_after_the_scales(
    device: torch.device, rows: int, tiling: Tiling
) -> None:
    torch.manual_seed(0)
    x, (weight, scale), bias = drawn(device, rows, 96), weights(device, 48, 96), drawn(device, 48)
    ours = fp8.fp8_small_linear(x, weight, scale, epilogue=Epilogue(bias, activation="gelu"), tiling=tiling)
    check(ours, fp8.fp8_small_linear_plain(x, weight, scale, epilogue=Epilogue(bias, activation="gelu")))
    stream = drawn(device, rows, 48)
    epilogue = Epilogue(bias, adds=True, multiplier=0.22)
    plain = fp8.fp8_small_linear_plain(x, weight, scale, epilogue=epilogue, residual=stream.clone())
    check(fp8.fp8_small_linear(x, weight, scale, epilogue=epilogue, residual=stream, tiling=tiling), plain)


def test_weights_beyond_the_registers_are_read_in_a_loop(device: torch.device) -> None:
    torch.manual_seed(0)
    x, norm, (weight, scale) = drawn(device, 1, 8192), NormWeights(drawn(device, 8192), 1e-6), weights(device, 16, 8192)
    prologue, tiling = Prologue(norm), VectorTiling(outs=4, ins=512, warps=1)
    ours = fp8.fp8_small_linear(x, weight, scale, prologue, GATED, tiling=tiling)
    plain = fp8.fp8_small_linear_plain(x, weight, scale, prologue, GATED)
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tiling", [DOT, SPLIT], ids=["dot", "split"])
def test_a_row_does_not_depend_on_its_neighbours(device: torch.device, tiling: Tiling) -> None:
    torch.manual_seed(0)
    x, (weight, scale) = drawn(device, 5, 192), weights(device, 24, 192)
    together = fp8.fp8_small_linear(x, weight, scale, tiling=tiling)
    for row in range(5):
        assert torch.equal(fp8.fp8_small_linear(x[row : row + 1], weight, scale, tiling=tiling)[0], together[row])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_large_batch_matmul_equals_the_plain_twin(device: torch.device, rows: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, (weight, scale) = drawn(device, rows, 256, dtype=dtype), weights(device, 48, 256)
    bias = drawn(device, 48, dtype=dtype) if with_bias else None
    check(fp8.fp8_linear(x, weight, scale, bias), fp8.fp8_linear_plain(x, weight, scale, bias))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("outs", "ins"), [(6144, 4096), (4096, 14336), (28672, 4096), (1024, 3072), (6144, 1024)])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 100, 256, 300])
@pytest.mark.parametrize("pdl", [False, True])
def test_real_shapes_in_bfloat16_and_in_a_graph(
    device: torch.device, outs: int, ins: int, rows: int, pdl: bool
) -> None:
    torch.manual_seed(0)
    x, (weight, scale) = drawn(device, rows, ins, dtype=torch.bfloat16), weights(device, outs, ins)
    epilogue = GATED if outs in (28672, 6144) and rows <= MOST_FUSED else NO_EPILOGUE

    def matmul() -> Tensor:
        if rows > MOST_FUSED:
            return fp8.fp8_linear(x, weight, scale, pdl=pdl)
        return fp8.fp8_small_linear(x, weight, scale, epilogue=epilogue, pdl=pdl)

    matmul()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul()
    x.copy_(drawn(device, rows, ins, dtype=torch.bfloat16))
    out.fill_(float("nan"))
    graph.replay()
    if rows > MOST_FUSED:
        plain = fp8.fp8_linear_plain(x.float(), weight, scale)
    else:
        plain = fp8.fp8_small_linear_plain(x.float(), weight, scale, epilogue=epilogue)
    assert (out.float() - plain).norm() < 5e-3 * plain.norm()
