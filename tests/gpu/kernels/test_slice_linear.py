"""The slice kernel against its plain twin. Triton's interpreter, which cannot multiply bfloat16, has other floats."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.prologue import Delta, Prologue
from ostro.kernels.gpu.small_batch import small_linear, small_linear_plain
from ostro.kernels.gpu.tilings import Matmul, SliceTiling, slice_tilings

ONE_GROUP, LOOPING, NARROW, WIDE = (
    SliceTiling(16, 256, 4),
    SliceTiling(16, 64, 2),
    SliceTiling(8, 128, 4),
    SliceTiling(32, 96, 1),
)
TILES = pytest.mark.parametrize(
    "tiling", [ONE_GROUP, LOOPING, NARROW, WIDE], ids=["one group", "looping", "narrow", "wide"]
)
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    """Tensor cores take 16 bits; the interpreter is most exact with 32."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def drawn(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(device, dtype)


def check(ours: Tensor, plain: Tensor) -> None:
    tolerance = CLOSE[ours.dtype]
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


@TILES
@pytest.mark.parametrize("rows", [2, 8, 11])
@pytest.mark.parametrize(("outs", "ins"), [(32, 256), (37, 200)])
def test_matmul_equals_the_plain_twin(
    device: torch.device, dtype: torch.dtype, tiling: SliceTiling, rows: int, outs: int, ins: int
) -> None:
    torch.manual_seed(0)
    x, weight = drawn(device, dtype, rows, ins), drawn(device, dtype, outs, ins, scale=0.1)
    biased = Epilogue(drawn(device, dtype, outs))
    check(small_linear(x, weight, tiling=tiling), small_linear_plain(x, weight))
    check(small_linear(x, weight, epilogue=biased, tiling=tiling), small_linear_plain(x, weight, epilogue=biased))


@pytest.mark.parametrize("tiling", [ONE_GROUP, LOOPING], ids=["one group", "looping"])
def test_half_precision_is_multiplied(device: torch.device, tiling: SliceTiling) -> None:
    torch.manual_seed(0)
    x, weight = (drawn(device, torch.float16, number, 200, scale=0.3) for number in (5, 24))
    check(small_linear(x, weight, tiling=tiling), small_linear_plain(x, weight))


@TILES
@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize("ins", [256, 200])
def test_norm_comes_before_the_matmul(
    device: torch.device, dtype: torch.dtype, tiling: SliceTiling, rows: int, ins: int
) -> None:
    torch.manual_seed(0)
    x, weight = drawn(device, dtype, rows, ins), drawn(device, dtype, 20, ins, scale=0.1)
    prologue = Prologue(NormWeights(drawn(device, dtype, ins), 1e-6))
    check(small_linear(x, weight, prologue, tiling=tiling), small_linear_plain(x, weight, prologue))


@pytest.mark.parametrize("tiling", [ONE_GROUP, LOOPING], ids=["one group", "looping"])
@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("with_norm", [True, False])
def test_normed_rows_are_added_to_the_stream_before_the_norm(
    device: torch.device, dtype: torch.dtype, tiling: SliceTiling, rows: int, with_norm: bool
) -> None:
    torch.manual_seed(0)
    x, weight = drawn(device, dtype, rows, 200), drawn(device, dtype, 20, 200, scale=0.1)
    norm = NormWeights(drawn(device, dtype, 200), 1e-6) if with_norm else None
    delta = Delta(drawn(device, dtype, rows, 200), NormWeights(drawn(device, dtype, 200), 1e-3), 0.5)
    before, streams = x.clone(), [torch.full_like(x, torch.nan) for _ in range(2)]
    gated = Epilogue(activation="silu", gated=True)
    ours = small_linear(x, weight, Prologue(norm, delta, streams[0]), gated, tiling=tiling)
    check(ours, small_linear_plain(x, weight, Prologue(norm, delta, streams[1]), gated))
    check(*streams)
    assert torch.equal(x, before), "programs that are late must find the stream as it was"


@TILES
def test_result_is_added_to_the_residual_in_place(
    device: torch.device, dtype: torch.dtype, tiling: SliceTiling
) -> None:
    torch.manual_seed(0)
    x, weight, bias = (drawn(device, dtype, *shape, scale=0.3) for shape in ((9, 200), (40, 200), (40,)))
    stream = drawn(device, dtype, 9, 40)
    added = Epilogue(bias, adds=True, multiplier=0.22)
    plain = small_linear_plain(x, weight, epilogue=added, residual=stream.clone())
    assert small_linear(x, weight, epilogue=added, residual=stream, tiling=tiling) is stream
    check(stream, plain)


@TILES
@pytest.mark.parametrize("gated", [True, False])
def test_activations_come_after_the_bias(
    device: torch.device, dtype: torch.dtype, tiling: SliceTiling, gated: bool
) -> None:
    torch.manual_seed(0)
    x, weight, bias = (drawn(device, dtype, *shape, scale=0.3) for shape in ((5, 96), (72, 96), (72,)))
    epilogue = Epilogue(bias, activation="gelu_tanh", gated=gated)
    ours = small_linear(x, weight, epilogue=epilogue, tiling=tiling)
    assert ours.shape == (5, 36 if gated else 72)
    check(ours, small_linear_plain(x, weight, epilogue=epilogue))


@TILES
def test_a_row_does_not_depend_on_its_neighbours(device: torch.device, dtype: torch.dtype, tiling: SliceTiling) -> None:
    torch.manual_seed(0)
    x, weight = drawn(device, dtype, 8, 192), drawn(device, dtype, 24, 192)
    together = small_linear(x, weight, tiling=tiling)
    assert torch.equal(small_linear(x[2:5], weight, tiling=tiling), together[2:5])


def test_rows_may_be_part_of_wider_ones(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide, weight = drawn(device, dtype, 4, 320), drawn(device, dtype, 24, 192)
    x = wide[:, 64:256]
    assert torch.equal(small_linear(x, weight, tiling=NARROW), small_linear(x.contiguous(), weight, tiling=NARROW))


@pytest.mark.full
@pytest.mark.parametrize("ins", [1024, 1152, 6912, 9728])
@pytest.mark.parametrize("kind", ["plain", "added", "gated"])
def test_tilings_of_real_widths_equal_the_plain_twin(
    device: torch.device, dtype: torch.dtype, ins: int, kind: str
) -> None:
    torch.manual_seed(0)
    matmul = Matmul(40, ins, 16, kind)  # type: ignore[arg-type]
    x, weight = drawn(device, dtype, 8, ins), drawn(device, dtype, 40, ins, scale=ins**-0.5)
    epilogues = {
        "plain": NO_EPILOGUE,
        "added": Epilogue(adds=True),
        "gated": Epilogue(activation="silu", gated=True),
    }
    epilogue = epilogues[kind]
    residual = drawn(device, dtype, 8, 40) if epilogue.adds else None
    plain = small_linear_plain(x, weight, epilogue=epilogue, residual=None if residual is None else residual.clone())
    for tiling in slice_tilings(matmul):
        stream = None if residual is None else residual.clone()
        check(small_linear(x, weight, epilogue=epilogue, residual=stream, tiling=tiling), plain)


# In a process of its own, as this one may run kernels in the interpreter.
_COMPILES = """
from functools import partial
import torch
from ostro.kernels.gpu import signatures
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.prologue import Prologue
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.tilings import SliceTiling
signatures.compile_for("9.0")
drawn = partial(torch.empty, dtype=torch.bfloat16, device="meta")
x, weight, norm = drawn(8, 1024), drawn(64, 1024), drawn(1024)
launch = partial(small_linear, x, weight, Prologue(NormWeights(norm, 1e-6)), tiling=SliceTiling(16, 1024, 4), pdl=True)
[signature] = signatures.recorded([launch])
print(signatures._kernel(signature).preload(signature).asm["ptx"])
"""


@pytest.mark.full
def test_weights_go_from_memory_to_the_tensor_cores_through_registers_alone() -> None:
    """Nothing is exchanged between threads before the last of the products, and the weights are on their way before
    the wait for the previous kernel.
    """
    pytest.importorskip("triton.backends.nvidia.compiler")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILES], capture_output=True, text=True, check=True, timeout=300, env=environment
    )
    before, _, after = done.stdout.partition("griddepcontrol.wait")
    assert len(re.findall(r"ld\.global.*evict_first.*v4\.b32", before)) == 16
    products = after[: after.rindex("mma.sync")]
    assert products.count("mma.sync") == 15
    assert "ldmatrix" not in after
    # Before the last product, only sums of squares may be exchanged: none of the 24 loads of 16 bytes is.
    assert not re.search(r"(st|ld)\.shared\.v4|shfl", products.partition("mma.sync")[0])
