from functools import partial

import pytest
import torch
from described_parts import described_mlp
from torch import Tensor

from ostro.kernels.gpu.epilogue import Epilogue
from ostro.kernels.gpu.mlp import PLAIN
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.prologue import Delta, Prologue
from ostro.kernels.gpu.small_batch import small_linear, small_linear_plain
from ostro.kernels.gpu.tilings import DotTiling, Tiling, VectorTiling
from ostro.models.architecture import Norm
from ostro.torch_models.layers import GatedMLP, RMSNorm

VECTOR = VectorTiling(outs=4, ins=64, warps=4)
DOT = DotTiling(outs=16, ins=32, warps=4, stages=2)
HELD = DotTiling(outs=64, ins=32, warps=4, stages=2, held=2)
SPLIT = DotTiling(outs=16, ins=32, warps=4, stages=2, splits=3)
HELD_SPLIT = DotTiling(outs=64, ins=32, warps=4, stages=2, splits=3, held=1)
TILES = pytest.mark.parametrize("tiling", [VECTOR, DOT, HELD], ids=["vector", "dot", "held"])
JOINED = pytest.mark.parametrize(
    "tiling", [VECTOR, DOT, SPLIT, HELD_SPLIT], ids=["vector", "dot", "split", "held split"]
)
DOTS = pytest.mark.parametrize("tiling", [DOT, HELD, SPLIT, HELD_SPLIT], ids=["dot", "held", "split", "held split"])
GATED, ADDED = Epilogue(activation="silu", gated=True), Epilogue(adds=True)
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def drawn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(device, dtype)


def check(ours: Tensor, plain: Tensor) -> None:
    tolerance = CLOSE[plain.dtype]
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


@TILES
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("outs", "ins"), [(32, 128), (37, 96), (16, 200)])
def test_matmul_equals_the_plain_twin(device: torch.device, tiling: Tiling, rows: int, outs: int, ins: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = drawn(device, rows, ins), drawn(device, outs, ins, scale=0.1), drawn(device, outs)
    check(small_linear(x, weight, tiling=tiling), small_linear_plain(x, weight))
    biased = Epilogue(bias)
    check(small_linear(x, weight, epilogue=biased, tiling=tiling), small_linear_plain(x, weight, epilogue=biased))


@pytest.mark.parametrize("ins", [128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_comes_before_the_matmul(device: torch.device, ins: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = drawn(device, 3, ins, dtype=dtype), drawn(device, 20, ins, dtype=dtype, scale=0.1)
    norm = NormWeights(drawn(device, ins, dtype=dtype), 1e-6)
    check(small_linear(x, weight, Prologue(norm), tiling=VECTOR), small_linear_plain(x, weight, Prologue(norm)))


@pytest.mark.parametrize(("ins", "tiling"), [(200, VECTOR), (512, VectorTiling(outs=8, ins=64, warps=1))])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_normed_row_is_added_to_the_stream_before_the_norm(
    device: torch.device, ins: int, tiling: Tiling, with_norm: bool, dtype: torch.dtype
) -> None:
    """Of the second, more than registers hold: what is added is read in the loop, too."""
    torch.manual_seed(0)
    x, weight = drawn(device, 1, ins, dtype=dtype), drawn(device, 20, ins, dtype=dtype, scale=0.1)
    norm = NormWeights(drawn(device, ins), 1e-6) if with_norm else None
    before = x.clone()
    sums = []
    for matmul in (partial(small_linear, tiling=tiling), small_linear_plain):
        torch.manual_seed(1)
        delta = Delta(drawn(device, 1, ins, dtype=dtype), NormWeights(drawn(device, ins), 1e-3), 0.5)
        stream = torch.empty_like(x)
        sums.append((matmul(x, weight, Prologue(norm, delta, stream), GATED), stream))
    for ours, plain in zip(*sums, strict=True):
        check(ours, plain)
    assert torch.equal(x, before), "programs that are late must find the stream as it was"


def test_norm_of_large_half_precision_rows_does_not_overflow(device: torch.device) -> None:
    torch.manual_seed(0)
    x = drawn(device, 2, 64, dtype=torch.float16, scale=3000.0)
    weight = drawn(device, 16, 64, dtype=torch.float16, scale=0.1)
    norm = NormWeights(drawn(device, 64, dtype=torch.float16, scale=20.0), 1e-6)
    ours, plain = small_linear(x, weight, Prologue(norm), tiling=VECTOR), small_linear_plain(x, weight, Prologue(norm))
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=5e-2)


@JOINED
@pytest.mark.parametrize("ins", [192, 200])
def test_result_is_added_to_the_residual_in_place(device: torch.device, tiling: Tiling, ins: int) -> None:
    torch.manual_seed(0)
    x, weight, residual = drawn(device, 2, ins), drawn(device, 40, ins, scale=0.1), drawn(device, 2, 40)
    plain = small_linear_plain(x, weight, epilogue=ADDED, residual=residual.clone())
    stream = residual.clone()
    for _ in range(2):  # The second time finds the counters of splits as the first did.
        stream = residual.clone()
        assert small_linear(x, weight, epilogue=ADDED, residual=stream, tiling=tiling) is stream
        check(stream, plain)


@TILES
@pytest.mark.parametrize("activation", sorted(PLAIN))
def test_gate_and_up_meet_in_one_program(device: torch.device, tiling: Tiling, activation: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = drawn(device, 2, 96), drawn(device, 72, 96, scale=0.1), drawn(device, 72)
    norm = NormWeights(drawn(device, 96), 1e-5) if tiling is VECTOR else None
    ours = small_linear(x, weight, Prologue(norm), Epilogue(bias, activation=activation, gated=True), tiling=tiling)
    assert ours.shape == (2, 36)
    check(ours, small_linear_plain(x, weight, Prologue(norm), Epilogue(bias, activation=activation, gated=True)))


@JOINED
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu"])
def test_a_plain_mlps_activation_comes_after_the_bias(device: torch.device, tiling: Tiling, activation: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = drawn(device, 2, 96), drawn(device, 40, 96, scale=0.1), drawn(device, 40)
    ours = small_linear(x, weight, epilogue=Epilogue(bias, activation=activation), tiling=tiling)
    assert ours.shape == (2, 40)
    check(ours, small_linear_plain(x, weight, epilogue=Epilogue(bias, activation=activation)))


@JOINED
def test_what_is_added_to_the_residual_may_be_multiplied(device: torch.device, tiling: Tiling) -> None:
    torch.manual_seed(0)
    x, weight, bias = drawn(device, 2, 96), drawn(device, 40, 96, scale=0.1), drawn(device, 40)
    stream, plain = (drawn(device, 2, 40) for _ in range(2))
    plain.copy_(stream)
    small_linear(x, weight, epilogue=Epilogue(bias, adds=True, multiplier=0.22), residual=stream, tiling=tiling)
    check(stream, small_linear_plain(x, weight, epilogue=Epilogue(bias, adds=True, multiplier=0.22), residual=plain))


@pytest.mark.full
@pytest.mark.parametrize(
    "tiling", [VECTOR, VectorTiling(outs=2, ins=1024, warps=4)], ids=["warp a row", "warps along a row"]
)
def test_pairs_of_bfloat16_are_unpacked_in_order(device: torch.device, tiling: Tiling) -> None:
    torch.manual_seed(0)
    x = drawn(device, 2, 1024, dtype=torch.bfloat16)
    weight = drawn(device, 12, 1024, dtype=torch.bfloat16, scale=0.03)
    norm = NormWeights(drawn(device, 1024, dtype=torch.bfloat16), 1e-6)
    ours = small_linear(x, weight, Prologue(norm), out_dtype=torch.float32, tiling=tiling)
    check(ours, small_linear_plain(x, weight, Prologue(norm), out_dtype=torch.float32))
    # Some norms keep their weights in float32.
    exact = NormWeights(drawn(device, 1024), 1e-6)
    ours = small_linear(x, weight, Prologue(exact), out_dtype=torch.float32, tiling=tiling)
    check(ours, small_linear_plain(x, weight, Prologue(exact), out_dtype=torch.float32))
    delta = Delta(drawn(device, 1, 1024, dtype=torch.bfloat16), NormWeights(drawn(device, 1024), 1e-3), 0.5)
    ours_joined, plain_joined = (Prologue(exact, delta, torch.empty_like(delta.value)) for _ in range(2))
    ours = small_linear(x[:1], weight, ours_joined, out_dtype=torch.float32, tiling=tiling)
    plain = small_linear_plain(x[:1], weight, plain_joined, out_dtype=torch.float32)
    assert ours_joined.stream is not None
    assert plain_joined.stream is not None
    check(ours_joined.stream, plain_joined.stream)
    # A sum between two bfloat16 values may be rounded either way.
    torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)


def test_weights_beyond_the_registers_are_read_in_a_loop(device: torch.device) -> None:
    torch.manual_seed(0)
    tiling = VectorTiling(outs=8, ins=256, warps=1)
    x, weight, norm = drawn(device, 1, 4096), drawn(device, 32, 4096, scale=0.1), NormWeights(drawn(device, 4096), 1e-6)
    ours = small_linear(x, weight, Prologue(norm), GATED, tiling=tiling)
    torch.testing.assert_close(ours, small_linear_plain(x, weight, Prologue(norm), GATED), rtol=1e-3, atol=1e-3)


@JOINED
def test_a_row_does_not_depend_on_its_neighbours(device: torch.device, tiling: Tiling) -> None:
    torch.manual_seed(0)
    x, weight = drawn(device, 5, 192), drawn(device, 24, 192)
    together = small_linear(x, weight, tiling=tiling)
    for row in range(5):
        assert torch.equal(small_linear(x[row : row + 1], weight, tiling=tiling)[0], together[row])


@pytest.mark.parametrize("rows", [1, 4])
def test_an_mlp_of_two_matmuls_agrees_with_the_model(device: torch.device, rows: int) -> None:
    torch.manual_seed(0)
    norm, mlp = RMSNorm(Norm("norm", 64, 1e-6)).to(device), GatedMLP(described_mlp(64, 80)).to(device)
    for weight in (*norm.parameters(), *mlp.parameters()):
        weight.data.normal_(0, 0.2)
    x = drawn(device, rows, 64)
    expected = x + mlp(norm(x))
    read, folded = (x, NormWeights(norm.weight.data, 1e-6)) if rows == 1 else (norm(x).detach(), None)
    inner = small_linear(read, mlp.gate_up_proj.weight.data, Prologue(folded), GATED)
    check(small_linear(inner, mlp.down_proj.weight.data, epilogue=ADDED, residual=x), expected)


@pytest.mark.parametrize("rows", [17, 200])
def test_matmuls_of_many_rows_are_one_tile_each(device: torch.device, rows: int) -> None:
    torch.manual_seed(0)
    x, weight = drawn(device, rows, 64), drawn(device, 40, 64, scale=0.1)
    check(small_linear(x, weight), small_linear_plain(x, weight))
    check(
        small_linear(x, weight, epilogue=GATED),
        small_linear_plain(x, weight, epilogue=GATED),
    )
