"""Weights keep their exact values on their way from files to panels, and lose what they should where bits are few."""

from ctypes import byref

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from native_models import needs_library

from ostro.kernels.cpu.library import CMatrix, library

pytestmark = needs_library

ROWS, COLS = 12, 512
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "F32", "F16", "BF16")
# Where a block keeps its halves; everything else in it may be any bits.
HALVES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "MXFP4": ()}


def stored(kind: str) -> tuple[Bytes, Floats]:
    """Rows of random blocks, and what they mean."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((ROWS, COLS)).astype(np.float32)
    if kind == "F32":
        return values.view(np.uint8), values
    if kind == "F16":
        halves = values.astype(np.float16)
        return halves.view(np.uint8), halves.astype(np.float32)
    if kind == "BF16":
        cut = values.view(np.uint32) & np.uint32(0xFFFF0000)
        return (cut >> np.uint32(16)).astype(np.uint16).view(np.uint8), cut.view(np.float32)
    ggml = GGMLQuantizationType[kind]
    size, nbytes = GGML_QUANT_SIZES[ggml]
    raw = rng.integers(0, 256, (ROWS, COLS // size * nbytes), dtype=np.uint8)
    blocks = raw.reshape(-1, nbytes)
    for at in HALVES.get(kind, (0, 2)):
        blocks[:, at : at + 2] = rng.standard_normal((len(blocks), 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(2, 252, len(blocks))
    return raw, dequantize(raw, ggml)


def through(kind: str, raw: Bytes, *, panel: int, bits: int = 0) -> Floats:
    """Packed, and unpacked again row by row."""
    lib, source = library(), int(GGMLQuantizationType[kind])
    matrix = CMatrix(rows=ROWS - ROWS % -panel, cols=COLS)
    matrix.rows = -(-ROWS // panel) * panel
    memory = np.zeros(lib.ostro_format(source, bits, byref(matrix)), np.uint8)
    rows = np.zeros(matrix.rows, np.uint64)
    rows[:ROWS] = raw.ctypes.data + np.arange(ROWS, dtype=np.uint64) * np.uint64(raw.strides[0])
    lib.ostro_pack(source, rows.ctypes.data, byref(matrix), panel, 3, memory.ctypes.data)
    lib.ostro_point(byref(matrix), memory.ctypes.data)
    back = np.empty((matrix.rows, COLS), np.float32)
    for row in range(matrix.rows):
        lib.ostro_unpack_row(byref(matrix), panel, row, back[row].ctypes.data)
    assert not back[ROWS:].any()
    return back[:ROWS]


@pytest.mark.parametrize("panel", [4, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_packed_exactly(kind: str, panel: int) -> None:
    raw, meant = stored(kind)
    np.testing.assert_array_equal(through(kind, raw, panel=panel), meant)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_take_hardly_more_bytes_than_the_file(kind: str) -> None:
    """Bytes are what a single stream's speed is made of."""
    if kind == "BF16":
        pytest.skip("it is widened to float32")
    matrix = CMatrix(rows=1024, cols=4096)
    packed = library().ostro_format(int(GGMLQuantizationType[kind]), 0, byref(matrix))
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert packed <= 1.03 * matrix.rows * matrix.cols / size * nbytes


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("bits", "most"), [(8, 1 / 127), (4, 1 / 15)])
def test_floats_are_rounded_within_their_group(kind: str, bits: int, most: float) -> None:
    raw, meant = stored(kind)
    given = through(kind, raw, panel=4, bits=bits)
    groups, back = meant.reshape(ROWS, -1, 32), given.reshape(ROWS, -1, 32)
    spans = np.abs(groups).max(-1) if bits == 8 else groups.max(-1) - groups.min(-1)
    # Half a step, or, where a narrower range was the better choice, the part that lies beyond it.
    room = 0.51 * most * spans if bits == 8 else 0.09 * spans
    assert (np.abs(groups - back).max(-1) <= room + 1e-3).all()
    errors = np.sqrt(((groups - back) ** 2).mean())
    assert errors <= most * spans.mean() / np.sqrt(12) * 1.02


def test_a_type_without_kernels_is_not_packed() -> None:
    matrix = CMatrix(rows=4, cols=256)
    assert library().ostro_format(int(GGMLQuantizationType.Q3_K), 0, byref(matrix)) < 0
    assert library().ostro_format(int(GGMLQuantizationType.Q8_0), 0, byref(CMatrix(rows=4, cols=48))) < 0
    assert library().ostro_format(int(GGMLQuantizationType.Q4_K), 0, byref(CMatrix(rows=4, cols=288))) < 0


def test_constant_and_empty_groups() -> None:
    values = np.zeros((ROWS, COLS), np.float32)
    values[1] = 3.0
    values[2, 40] = -1e-30
    for bits in (8, 4):
        given = through("F32", values.view(np.uint8), panel=4, bits=bits)
        np.testing.assert_allclose(given, values, atol=0.012 if bits == 8 else 1e-6)


def test_every_format_that_weights_get_can_be_packed_and_no_other() -> None:
    """A packed file says its matrices' formats, and kernels are compiled only for those that `ostro_format` chooses."""
    lib, chosen = library(), set[tuple[int, int, int]]()
    for kind in KINDS:
        for bits in (0, 4, 8):
            matrix = CMatrix(rows=ROWS, cols=COLS)
            assert lib.ostro_format(int(GGMLQuantizationType[kind]), bits, byref(matrix)) > 0
            chosen.add((matrix.codes, matrix.scales, matrix.has_minima))
    packable = {
        (codes, scales, minima)
        for codes in range(-1, 16)
        for scales in range(-1, 8)
        for minima in range(-1, 3)
        if lib.ostro_packed_bytes(
            byref(CMatrix(rows=ROWS, cols=COLS, codes=codes, scales=scales, has_minima=minima)), 4
        )
        > 0
    }
    assert packable == chosen
