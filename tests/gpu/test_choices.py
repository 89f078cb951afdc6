"""Which matmuls are our own: measured by a clock that the tests set, kept, shipped, or given."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ostro.backends.cuda import choices as module
from ostro.backends.cuda.choices import (
    TRIED,
    Choices,
    Gpu,
    choose,
    conceivable,
    keep,
    kept,
    known,
    known_for,
    read,
    rows_to_try,
    shipped,
    to_try,
    written,
)
from ostro.errors import BadRequest
from ostro.kernels.gpu.tilings import ROWS, DotTiling, Matmul, Multiprocessors, SliceTiling, Tiling, VectorTiling, fits

H200 = Gpu("NVIDIA H200", "9.0", Multiprocessors(132, 220 << 10))
H100 = Gpu("NVIDIA H100 80GB HBM3", "9.0", Multiprocessors(132, 220 << 10))
A100 = Gpu("NVIDIA A100-SXM4-80GB", "8.0", Multiprocessors(108, 156 << 10))
QKV, DOWN, UP = Matmul(3072, 2048, 16), Matmul(2048, 8192, 16, "added"), Matmul(16384, 2048, 16, "gated")
DOT, VECTOR = DotTiling(64, 128, 4, stages=4, splits=2, held=1), VectorTiling(4, 256, 4)
SLICE = SliceTiling(16, 1024, 8, folds=True)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Watch:
    """A clock on which the library takes `library` and our own tilings take `own`, less for later ones."""

    def __init__(self, *, own: float | None = 2.0, library: Mapping[int, float] | None = None) -> None:
        self.own, self.library, self.asked = own, library or {}, list[tuple[Matmul, int]]()

    def __call__(self, matmul: Matmul, rows: int, tried: Sequence[Tiling | None]) -> Sequence[float | None]:
        self.asked.append((matmul, rows))
        own = (None if self.own is None else self.own - 0.1 * order for order in range(len(tried)))
        return [self.library.get(rows, 3.0) if each is None else next(own) for each in tried]


def test_the_fastest_is_chosen_for_each_matmul_and_number_of_rows() -> None:
    found = choose([QKV, DOWN], H200, Watch(library={64: 1.0}))
    for matmul in (QKV, DOWN):
        for rows in rows_to_try(matmul, H200):
            assert found.tiling(matmul, rows) == (None if rows == 64 else to_try(matmul, rows, H200)[-1])


def test_up_to_8_rows_are_measured_apart_only_where_slices_are_tried() -> None:
    assert isinstance(choose([QKV], H200, Watch()).tiling(QKV, 8), SliceTiling)
    assert set(rows_to_try(QKV, H200)) == TRIED.keys()
    watch = Watch()
    assert choose([UP], H200, watch).tiling(UP, 8) == to_try(UP, 16, H200)[-1]
    assert (UP, 8) not in watch.asked


def test_every_tiling_that_may_be_chosen_is_conceivable() -> None:
    found = [*conceivable([QKV, DOWN, UP], H200)]
    for matmul in (QKV, DOWN, UP):
        for rows in rows_to_try(matmul, H200):
            assert {each.table[matmul][rows] for each in found} == {*to_try(matmul, rows, H200)}
    assert [*conceivable([], H200)] == []


def test_for_one_row_the_library_is_not_even_tried() -> None:
    found = choose([DOWN], H200, Watch(library=dict.fromkeys(ROWS, 0.0)))
    assert found.tiling(DOWN, 1) in to_try(DOWN, 1, H200)
    assert all(found.tiling(DOWN, rows) is None for rows in ROWS[1:])


def test_tilings_that_do_not_run_leave_a_matmul_to_the_library() -> None:
    found = choose([QKV], H200, Watch(own=None))
    assert all(found.tiling(QKV, rows) is None for rows in ROWS[1:])
    assert isinstance(found.tiling(QKV, 1), VectorTiling), "one row has a default"


def test_where_there_is_nothing_to_choose_from_nothing_is_measured() -> None:
    watch = Watch()
    wide = Matmul(64, 64, 32)
    assert choose([wide], H200, watch).tiling(wide, 16) is None
    assert {rows for _, rows in watch.asked} <= {1}


def test_a_choice_is_for_fewer_rows_as_well() -> None:
    found = Choices({QKV: {1: VECTOR, 16: DOT, 64: None, 128: DOT}})
    own = [rows for rows in range(1, 300) if found.tiling(QKV, rows) is not None]
    assert own == [*range(1, 17), *range(65, 129)]
    assert found.tiling(QKV, 1) == VECTOR


def test_without_a_choice_one_row_is_ours_and_more_are_the_librarys() -> None:
    found = Choices()
    assert isinstance(found.tiling(QKV, 1), VectorTiling)
    assert found.tiling(QKV, 2) is None


def test_choices_are_read_as_they_were_written(tmp_path: Path) -> None:
    table = Choices({QKV: {1: VECTOR, 8: SLICE, 16: DOT, 64: None}, UP: {}, DOWN: {256: None}})
    path = tmp_path / "choices.json"
    path.write_text(written(table, H200))
    assert read(path) == ("NVIDIA H200", "9.0", 132, table)


def test_measurements_are_kept_for_the_next_start_on_the_same_gpu() -> None:
    first, second = Choices({QKV: {16: DOT}}), Choices({DOWN: {16: None}})
    keep(first, H200)
    keep(second, H200)
    assert kept(H200) == first | second
    assert kept(H100) == kept(A100) == Choices()
    assert kept(Gpu(H200.name, H200.capability, Multiprocessors(66, 220 << 10))) == Choices()


def test_measurements_of_other_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(Choices({QKV: {16: DOT}}), H200)
    monkeypatch.setattr(module, "_kernels_digest", lambda: "changed since")
    assert kept(H200) == Choices()


@pytest.mark.parametrize("text", ["", "{", '{"products": [{}]}', "[]", "\x00"])
def test_a_damaged_file_is_measured_again(text: str, cache_of_its_own: Path) -> None:
    keep(Choices({QKV: {16: DOT}}), H200)
    [path] = cache_of_its_own.glob("kernel-choices/*.json")
    path.write_text(text)
    assert kept(H200) == Choices()
    keep(Choices({DOWN: {16: DOT}}), H200)
    assert kept(H200) == Choices({DOWN: {16: DOT}})


def test_a_cache_that_cannot_be_written_keeps_nothing(cache_of_its_own: Path) -> None:
    cache_of_its_own.write_text("a file where the directory should be")
    keep(Choices({QKV: {16: DOT}}), H200)


def test_a_kept_file_can_be_named(cache_of_its_own: Path) -> None:
    keep(Choices({QKV: {16: DOT}}), H200)
    [path] = cache_of_its_own.glob("kernel-choices/*.json")
    assert known(str(path), H200) == Choices({QKV: {16: DOT}})
    with pytest.raises(BadRequest, match="was measured on NVIDIA H200 with 132 multiprocessors"):
        known(str(path), A100)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"epilogue": "sideways"}, "epilogue 'sideways'"),
        ({"in_features": "2048"}, "sizes"),
        ({"bits": 0}, "sizes"),
        ({"rows": {"17": "library"}}, "rows"),
        ({"rows": {"16": "magic"}}, "tiling 'magic'"),
        ({"rows": {"16": {"kernel": "dot", "outs": 64}}}, "missing"),
        ({"rows": {"1": {"kernel": "dot", "outs": 64, "ins": 128, "warps": 4, "stages": 2}}}, "does not fit"),
        ({"rows": {"64": {"kernel": "dot", "outs": 64, "ins": 128, "warps": 4, "stages": 90}}}, "does not fit"),
    ],
)
def test_a_file_with_something_else_in_it_is_refused_by_name(
    changed: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    content = json.loads(written(Choices({QKV: {16: DOT}}), H200))
    content["products"][0] |= changed
    path.write_text(json.dumps(content))
    with pytest.raises(BadRequest, match=f"mine.json.*{reason}") as refused:
        known(str(path), H200)
    assert refused.value.param == "kernel_choices"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="nowhere"):
        known(str(tmp_path / "nowhere.json"), H200)


def test_shipped_choices_fit_the_gpu_that_they_were_measured_on() -> None:
    found = shipped(H200)
    assert found.table
    for matmul, rows in found.table.items():
        for most, tiling in rows.items():
            assert tiling is not None
            assert fits(matmul, most, tiling, H200.multiprocessors)


def test_a_shipped_file_is_as_it_would_be_written() -> None:
    [path] = Path(module.__file__).with_name("shipped_choices").glob("*.json")
    assert written(shipped(H200), H200) == path.read_text(encoding="utf-8")


def test_shipped_choices_serve_similar_gpus_unless_those_are_to_be_measured() -> None:
    assert known("off", H100) == shipped(H200)
    assert known("auto", H100) == Choices()
    assert known("off", A100) == Choices()


def test_shipped_choices_come_before_what_was_kept() -> None:
    shipped_matmul = next(iter(shipped(H200).table))
    keep(Choices({shipped_matmul: {16: None}, QKV: {16: DOT}}), H200)
    assert known("auto", H200) == shipped(H200) | Choices({QKV: {16: DOT}})
    assert known("off", H200) == shipped(H200)


def test_choices_known_by_gpu_name_equal_those_found_at_start(
    monkeypatch: pytest.MonkeyPatch, cache_of_its_own: Path
) -> None:
    keep(Choices({QKV: {16: DOT}}), H200)
    assert known_for("auto", H200.name) == known("auto", H200)
    assert known_for("off", H200.name) == known("off", H200)
    assert known_for("auto", A100.name) is None
    [path] = cache_of_its_own.glob("kernel-choices/*.json")
    assert known_for(str(path), H200.name) == Choices({QKV: {16: DOT}})
    monkeypatch.setattr(module, "_kernels_digest", lambda: "changed since")
    assert known_for("auto", H200.name) == shipped(H200)
    with pytest.raises(BadRequest, match="nowhere"):
        known_for(str(cache_of_its_own / "nowhere.json"), H200.name)


def test_rows_are_reported_as_ranges() -> None:
    found = Choices({QKV: {1: VECTOR, 16: DOT, 64: None, 128: DOT}})
    assert found.own_rows(QKV) == "1-16, 65-128"
    assert found.own_rows(DOWN) == "1"


def test_choices_for_qwen3_0_6b_and_llama_3_1_8b_ship_for_the_h200() -> None:
    """(out, in) of queries, keys and values; output; gate and up; down; head; and up to how many rows."""
    models = {
        64: ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
        128: ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    }
    found = shipped(H200)
    for most, shapes in models.items():
        for shape, epilogue in zip(shapes, ("plain", "added", "gated", "added", "plain"), strict=True):
            own = [rows for rows in ROWS if found.tiling(Matmul(*shape, 16, epilogue), rows) is not None]  # type: ignore[arg-type]
            assert own == [rows for rows in ROWS if rows <= most]
