"""Which tilings are tried for a shape, for shapes of real models, odd ones and made-up ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue
from ostro.kernels.gpu.small_batch import small_linear, small_linear_plain
from ostro.kernels.gpu.tilings import (
    ROWS,
    DotTiling,
    Matmul,
    Multiprocessors,
    SliceTiling,
    Tiling,
    VectorTiling,
    binary_of,
    block_rows,
    candidates,
    default_tiling,
    fits,
    predicted_time,
    shared_memory,
    slice_candidates,
    slice_tilings,
)

H200 = Multiprocessors(132, 220 << 10)
DEVICES = {"H200": H200, "A100": Multiprocessors(108, 156 << 10), "L40S": Multiprocessors(142, 92 << 10)}
# Widths, inner widths and vocabularies of Qwen2.5-0.5B, Gemma-3-1B, Qwen2.5-1.5B, Qwen3-4B, Llama-3.2-3B, Qwen3-32B;
# and ones that are multiples of nothing.
SHAPES = [
    *((1152, 896), (896, 4864), (1536, 1152), (1152, 6912), (1536, 8960), (6144, 2560), (2560, 9728), (5120, 25600)),
    *((3072, 8192), (262144, 1152), (128256, 3072), (1000, 1000), (24, 8), (13696, 4096)),
]
matmuls = st.builds(
    Matmul,
    out_features=st.integers(1, 40_000).map(lambda n: 8 * n),
    in_features=st.integers(1, 4_000).map(lambda n: 8 * n),
    bits=st.sampled_from([16, 32]),
    epilogue=st.sampled_from(["plain", "added", "activated", "gated"]),
)


@given(matmuls, st.sampled_from(ROWS), st.sampled_from(sorted(DEVICES)), st.integers(1, 4))
def test_candidate_tilings_are_valid_and_distinct(matmul: Matmul, rows: int, name: str, most: int) -> None:
    device = DEVICES[name]
    found = candidates(matmul, rows, device, most)
    assert len(set(found)) == len(found) <= most
    for tiling in found:
        assert fits(matmul, rows, tiling, device)
        assert isinstance(tiling, VectorTiling) == (rows == 1)
        if isinstance(tiling, DotTiling):
            assert shared_memory(matmul, rows, tiling) <= device.shared_memory
            assert matmul.bits == 16
            # Every split has inputs of its own.
            blocks = -(-matmul.in_features // (tiling.splits * tiling.ins))
            assert (tiling.splits - 1) * blocks * tiling.ins < matmul.in_features
            sums = tiling.outs * block_rows(rows) * (2 if matmul.is_gated else 1)
            assert sums <= 128 * 32 * tiling.warps, "more sums than registers"


@given(matmuls, st.sampled_from(ROWS[1:]))
def test_the_likeliest_comes_first(matmul: Matmul, rows: int) -> None:
    times = [predicted_time(matmul, rows, each, H200) for each in candidates(matmul, rows, H200, 4)]
    assert times == sorted(times)
    assert all(time > 0 for time in times)


def test_for_one_row_the_default_is_among_those_that_are_tried() -> None:
    for shape in SHAPES:
        assert candidates(Matmul(*shape, 16), 1, H200)[0] == default_tiling(1, *shape, gated=False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_every_shape_has_tilings_to_try_for_every_number_of_rows(shape: tuple[int, int], gated: bool) -> None:
    for rows in ROWS:
        assert candidates(Matmul(*shape, 16, "gated" if gated else "plain"), rows, H200)


def test_inputs_that_the_copy_engine_cannot_read_are_left_to_the_library() -> None:
    matmul = Matmul(64, 100, 16)
    assert candidates(matmul, 1, H200)
    assert not candidates(matmul, 16, H200)


def test_more_programs_are_made_of_few_outputs_by_splitting_the_inputs() -> None:
    """As measured on an H200: matrices of Qwen3-0.6B, Llama-3.1-8B, Llama-3.2-1B and Gemma-3-1B."""
    best = {(1024, 3072): 8, (4096, 4096): 2, (128256, 4096): 1, (2048, 8192): 4, (1536, 1152): 1, (1152, 6912): 4}
    for shape, splits in best.items():
        tried = candidates(Matmul(*shape, 16, "added"), 16, H200, most=3)
        assert splits in [each.splits for each in tried if isinstance(each, DotTiling)], shape


def test_a_gated_matmul_is_never_split() -> None:
    tiling = DotTiling(64, 128, 4, stages=2, splits=2)
    assert fits(Matmul(4096, 1024, 16, "added"), 16, tiling, H200)
    assert not fits(Matmul(4096, 1024, 16, "gated"), 16, tiling, H200)


@pytest.mark.parametrize(
    ("rows", "tiling"),
    [
        (16, VectorTiling(4, 256, 4)),
        (1, DotTiling(64, 128, 4, stages=2)),
        (16, DotTiling(48, 128, 4, stages=2)),
        (16, DotTiling(64, 128, 4, stages=0)),
        (64, DotTiling(64, 128, 4, stages=8)),
        (17, SliceTiling(16, 1024, 4)),
        (8, SliceTiling(16, 1000, 4)),
        (8, SliceTiling(4, 1024, 4)),
    ],
    ids=[
        *("a vector's for many rows", "a matrix's for one", "no power of two", "no stages", "too much shared memory"),
        *("a slice's for many rows", "no whole chunks", "too few outputs for tensor cores"),
    ],
)
def test_tilings_that_cannot_run_do_not_fit(rows: int, tiling: Tiling) -> None:
    assert not fits(Matmul(4096, 1024, 16), rows, tiling, H200)


@given(matmuls)
def test_slices_fit_and_cover_all_inputs_with_equal_groups(matmul: Matmul) -> None:
    for tiling in slice_tilings(matmul):
        assert fits(matmul, 8, tiling, H200) == (matmul.bits == 16)
        groups = -(-matmul.in_features // tiling.ins)
        assert (groups - 1) * tiling.ins < matmul.in_features
        held = tiling.outs * (2 if matmul.is_gated else 1) * tiling.ins * matmul.bits // 8
        assert held * min(groups, 2) <= 4 * 96 * 32 * tiling.warps, "more weights than registers"


@given(matmuls, st.sampled_from(ROWS), st.sampled_from(sorted(DEVICES)))
def test_few_slices_are_tried_which_fit_and_hold_all_inputs(matmul: Matmul, rows: int, name: str) -> None:
    found = slice_candidates(matmul, rows, DEVICES[name])
    assert len(set(found)) == len(found) <= 2
    for tiling in found:
        assert fits(matmul, rows, tiling, DEVICES[name])
        assert tiling.ins >= matmul.in_features
        assert tiling.folds == matmul.is_gated


def test_slices_are_tried_where_they_were_the_fastest_on_an_h200() -> None:
    """Of Qwen3-0.6B, Llama-3.2-1B, Gemma-3-1B and OLMo-2-1B; of larger matrices never."""
    fastest = {
        Matmul(4096, 1024, 16): SliceTiling(16, 1024, 4),
        Matmul(1024, 2048, 16, "added"): SliceTiling(16, 2048, 8),
        Matmul(6144, 1024, 16, "gated"): SliceTiling(8, 1024, 4, folds=True),
        Matmul(1024, 3072, 16, "added"): SliceTiling(16, 3072, 8),
        Matmul(3072, 2048, 16): SliceTiling(8, 2048, 4),
        Matmul(1536, 1152, 16): SliceTiling(16, 1280, 8),
        Matmul(1152, 1024, 16): SliceTiling(16, 1024, 4),
        Matmul(2048, 2048, 16): SliceTiling(16, 2048, 8),
    }
    for matmul, tiling in fastest.items():
        assert tiling in slice_candidates(matmul, 8, H200)
    for epilogue, shape in (("plain", (6144, 2048)), ("gated", (13824, 1152)), ("added", (2560, 4096))):
        assert not slice_candidates(Matmul(*shape, 16, epilogue), 8, H200)  # type: ignore[arg-type]


def test_held_blocks_that_are_all_of_the_inputs_leave_nothing_to_be_in_flight() -> None:
    all_held, looping = (DotTiling(64, 128, 4, stages=10, splits=8, held=held) for held in (2, 1))
    matmul = Matmul(1024, 2048, 16, "added")
    assert shared_memory(matmul, 16, all_held) < 64 << 10
    assert shared_memory(matmul, 16, looping) > 200 << 10


def test_default_tilings_are_powers_of_two() -> None:
    for shape in SHAPES:
        for rows in ROWS:
            for gated in (False, True):
                tiling = default_tiling(rows, *shape, gated=gated)
                numbers = [tiling.outs, tiling.ins, tiling.warps, getattr(tiling, "splits", 1)]
                assert all(number & (number - 1) == 0 for number in numbers)


def test_one_binary_serves_matrices_of_any_width_but_not_all_rows_and_epilogues() -> None:
    tiling, held = DotTiling(64, 128, 4, stages=4), DotTiling(64, 128, 4, stages=4, held=2)
    output, down, narrow = (Matmul(2048, ins, 16, "added") for ins in (2048, 8192, 256))
    assert binary_of(output, 16, tiling) == binary_of(down, 3, tiling)
    assert binary_of(output, 16, tiling) != binary_of(output, 17, tiling)
    assert binary_of(output, 16, tiling) != binary_of(Matmul(2048, 2048, 16), 16, tiling)
    assert binary_of(output, 16, held) != binary_of(narrow, 16, held), "all of its inputs are held"


@pytest.mark.cases(2)
@pytest.mark.parametrize("shape", [(24, 8), (40, 200), (72, 328), (64, 1152)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_candidates_for_odd_shapes_equal_the_plain_twin(
    shape: tuple[int, int], rows: int, device: torch.device
) -> None:
    x, weight = torch.randn(rows, shape[1], device=device), torch.randn(shape, device=device) * 0.1
    most = next(each for each in ROWS if each >= rows)
    for gated in (False, True):
        kind = Matmul(*shape, 16, "gated" if gated else "plain")
        epilogue = Epilogue(activation="silu", gated=True) if gated else NO_EPILOGUE
        plain = small_linear_plain(x, weight, epilogue=epilogue)
        for tiling in candidates(kind, most, H200, 4):
            ours = small_linear(x, weight, epilogue=epilogue, tiling=_in_float32(tiling))
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def _in_float32(tiling: VectorTiling | DotTiling) -> VectorTiling | DotTiling:
    """Wider numbers leave room for fewer stages."""
    if isinstance(tiling, VectorTiling):
        return tiling
    return DotTiling(tiling.outs, tiling.ins, tiling.warps, stages=2, splits=tiling.splits, held=tiling.held)
