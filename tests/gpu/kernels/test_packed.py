"""Matmuls with packed weights of 4 and 8 bits, against their plain twins."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from ostro.kernels.gpu import packed
from ostro.kernels.gpu.epilogue import Epilogue
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.packed_layout import fits
from ostro.kernels.gpu.packed_vector import PackedVectorTiling
from ostro.kernels.gpu.packed_words import Packed, pack_codes, pack_pairs, unpacked_codes, widened
from ostro.kernels.gpu.prologue import Prologue
from ostro.kernels.gpu.tilings import DotTiling, Tiling

ON_GPU = DEVICE.type == "cuda"
ONE = PackedVectorTiling(outs=4, ins=256, warps=4)
LONG = PackedVectorTiling(outs=1, ins=4096, warps=4)
# Several chunks of a row, the last one cut.
CHUNKS = PackedVectorTiling(outs=2, ins=256, warps=1)
# More tiles than programs, and not as many for each.
TURNS = PackedVectorTiling(outs=1, ins=512, warps=1, turns=3)
CLOSE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FORMS = pytest.mark.parametrize(
    ("bits", "group", "has_minimum"),
    [(4, 128, False), (4, 256, False), (4, 32, True), (4, 64, False), (8, 16, True), (8, 32, False), (8, 256, False)],
)

# The interpreter cannot multiply matrices of bfloat16.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])


def dot(splits: int = 1) -> DotTiling:
    return DotTiling(outs=16, ins=256, warps=4, stages=2, splits=splits)


def drawn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def weights(device: torch.device, outs: int, ins: int, bits: int, group: int, has_minimum: bool) -> Packed:
    codes = torch.randint(0, 1 << bits, (outs, ins), dtype=torch.uint8)
    groups = -(-ins // group)
    scales = (torch.rand(outs, groups) + 0.1) / (1 << bits)
    seconds = torch.randn(outs, groups) if has_minimum else torch.randint(0, 1 << bits, (outs, groups)).float()
    words, pairs = pack_codes(codes, bits, group), pack_pairs(scales.half(), seconds.half())
    return Packed(words.to(device), pairs.to(device), bits, group, has_minimum)


def check(ours: Tensor, plain: Tensor) -> None:
    tolerance = CLOSE[plain.dtype]
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance * plain.abs().max().item())


@pytest.mark.parametrize("group", [32, 96, 128, 384])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_come_back_from_their_words(bits: int, group: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 384), dtype=torch.uint8)
    words = pack_codes(codes, bits, group)
    assert words.shape == (5, 384 * bits // 32)
    assert torch.equal(unpacked_codes(words, bits, group), codes.int())


def test_what_fits() -> None:
    assert fits(4, 4096, 128)
    assert fits(4, 4096, 4096)
    assert fits(4, 192, 32)
    assert fits(4, 384, 96)
    assert fits(8, 192, 16)
    assert not fits(4, 256, 16), "a word of several groups"
    assert not fits(4, 384, 256), "the last group is cut"


@FORMS
def test_unpacked_weights_are_those_of_the_plain_twin(
    device: torch.device, bits: int, group: int, has_minimum: bool
) -> None:
    torch.manual_seed(0)
    weight = weights(device, 21, 256, bits, group, has_minimum)
    torch.testing.assert_close(packed.unpacked(weight, torch.float32), widened(weight), rtol=1e-6, atol=1e-6)


@pytest.mark.cases(2)
@FORMS
@DTYPES
@pytest.mark.parametrize("rows", [1, 3])
def test_small_batch_matmul_equals_the_plain_twin(
    device: torch.device, rows: int, dtype: torch.dtype, bits: int, group: int, has_minimum: bool
) -> None:
    torch.manual_seed(0)
    x, bias = drawn(device, rows, 512, dtype=dtype), drawn(device, 11, dtype=dtype)
    weight, tiling = weights(device, 11, 512, bits, group, has_minimum), ONE if rows == 1 else dot()
    check(
        packed.packed_small_linear(x, weight, epilogue=Epilogue(bias), tiling=tiling),
        packed.packed_small_linear_plain(x, weight, epilogue=Epilogue(bias)),
    )


@FORMS
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_16_bit_gates_equal_the_plain_twins(
    device: torch.device, rows: int, bits: int, group: int, has_minimum: bool
) -> None:
    torch.manual_seed(0)
    x = drawn(device, rows, 512, dtype=torch.bfloat16) / 16
    weight, tiling = weights(device, 24, 512, bits, group, has_minimum), ONE if rows == 1 else dot()
    check(
        packed.packed_small_linear(x, weight, epilogue=Epilogue(activation="silu", gated=True), tiling=tiling),
        packed.packed_small_linear_plain(x, weight, epilogue=Epilogue(activation="silu", gated=True)),
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "tiling", [CHUNKS, LONG, TURNS, dot(splits=3)], ids=["chunks", "beyond the end", "turns", "split"]
)
def test_rows_of_other_lengths_than_tiles_have(device: torch.device, tiling: Tiling) -> None:
    torch.manual_seed(0)
    rows = 1 if isinstance(tiling, PackedVectorTiling) else 2
    x, weight = drawn(device, rows, 896), weights(device, 5, 896, 4, 128, False)
    check(packed.packed_small_linear(x, weight, tiling=tiling), packed.packed_small_linear_plain(x, weight))


@pytest.mark.full
@pytest.mark.parametrize("ins", [256, 512])
def test_epilogues_of_all_tiles_of_a_program(device: torch.device, ins: int) -> None:
    torch.manual_seed(0)
    tiling = PackedVectorTiling(outs=2, ins=ins, warps=1, turns=3)
    x, weight = drawn(device, 1, 512), weights(device, 22, 512, 4, 128, False)
    bias, prologue = drawn(device, 22), Prologue(NormWeights(drawn(device, 512), 1e-5))
    gated, added, stream = Epilogue(bias, "silu", gated=True), Epilogue(bias, adds=True), drawn(device, 1, 22)
    check(
        packed.packed_small_linear(x, weight, prologue, gated, tiling=tiling),
        packed.packed_small_linear_plain(x, weight, prologue, gated),
    )
    plain = packed.packed_small_linear_plain(x, weight, prologue, added, residual=stream.clone())
    check(packed.packed_small_linear(x, weight, prologue, added, residual=stream, tiling=tiling), plain)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_is_exact_in_the_vector_kernel(device: torch.device, bits: int) -> None:
    ins = 256
    codes = (torch.arange(ins) % (1 << bits)).to(torch.uint8)
    words = pack_codes(codes[None].repeat(4, 1), bits, ins)
    pairs = pack_pairs(torch.ones(4, 1).half(), torch.zeros(4, 1).half())
    weight = Packed(words.to(device), pairs.to(device), bits, ins, False)
    for place in (0, 15, 16, 77, 255):
        one = torch.zeros(1, ins, device=device)
        one[0, place] = 1.0
        ours = packed.packed_small_linear(one, weight, tiling=ONE)
        assert torch.equal(ours, torch.full_like(ours, float(codes[place])))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_of_one_row_comes_before_the_matmul(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, norm = drawn(device, 1, 384, dtype=dtype), NormWeights(drawn(device, 384, dtype=dtype), 1e-6)
    weight = weights(device, 20, 384, 4, 128, False)
    # Added to float32, so that no rounding hides what is wrong before it.
    stream = drawn(device, 1, 20)
    around = Prologue(norm), Epilogue(adds=True)
    plain = packed.packed_small_linear_plain(x, weight, *around, residual=stream.clone())
    check(packed.packed_small_linear(x, weight, *around, residual=stream, tiling=ONE), plain)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "tiling"), [(1, ONE), (2, dot()), (20, dot(splits=3))], ids=["vector", "dot", "split"]
)
def test_result_is_added_to_the_residual_in_place(device: torch.device, rows: int, tiling: Tiling) -> None:
    torch.manual_seed(0)
    x, weight, residual = drawn(device, rows, 384), weights(device, 20, 384, 4, 128, False), drawn(device, rows, 20)
    epilogue = Epilogue(adds=True, multiplier=0.5)
    plain = packed.packed_small_linear_plain(x, weight, epilogue=epilogue, residual=residual.clone())
    for _ in range(2):  # The second time finds the counters of splits as the first did.
        stream = residual.clone()
        ours = packed.packed_small_linear(x, weight, epilogue=epilogue, residual=stream, tiling=tiling)
        assert ours is stream
        check(stream, plain)


@pytest.mark.full
@pytest.mark.parametrize(("rows", "tiling"), [(1, ONE), (2, dot())], ids=["vector", "dot"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up_meet_in_one_program(device: torch.device, rows: int, tiling: Tiling, activation: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = drawn(device, rows, 256) / 16, weights(device, 24, 256, 4, 64, True), drawn(device, 24)
    for gated in (True, False):
        epilogue = Epilogue(bias, activation, gated)
        ours = packed.packed_small_linear(x, weight, epilogue=epilogue, tiling=tiling)
        assert ours.shape == (rows, 12 if gated else 24)
        check(
            ours,
            packed.packed_small_linear_plain(x, weight, epilogue=epilogue),
        )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 160, 300])
def test_default_tilings_give_the_plain_twins_results(device: torch.device, rows: int, bits: int) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, weight = drawn(device, rows, 512, dtype=dtype), weights(device, 16, 512, bits, 128, False)
    check(packed.packed_linear(x, weight), packed.packed_linear_plain(x, weight))
