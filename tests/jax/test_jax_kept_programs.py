"""Programs of an earlier start are loaded instead of compiled, unless anything about them is wrong."""

import errno
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax_models import compilations

from ostro.backends.jax import kept_programs
from ostro.backends.jax.kept_programs import KeptPrograms
from ostro.backends.jax.mesh import AXIS, make_mesh
from ostro.backends.jax.programs import Programs, Recipe
from ostro.backends.jax.weights import BY_ROWS, COPIED

MESH = make_mesh(2)
"""Two of the eight devices that the process has."""


def shifted(values: jax.Array, by: jax.Array) -> dict[str, Any]:
    return {"values": values + by, "sum": lax.psum(values.sum(), AXIS), "nothing": None}


def recipe(rows: int) -> Recipe:
    whole = jax.ShapeDtypeStruct((rows, 3), np.float32, sharding=NamedSharding(MESH, BY_ROWS))
    number = jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(MESH, COPIED))
    return Recipe(
        key=("shift", rows),
        function=shifted,
        arguments=(whole, number),
        specs=(BY_ROWS, COPIED),
        results={"values": BY_ROWS, "sum": COPIED, "nothing": None},
        donated=(0,),
    )


def started(*facts: object) -> Programs:
    programs = Programs(MESH, KeptPrograms(MESH, facts))
    programs.add(recipe(2), recipe(4))
    return programs


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of a first start."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path))
    assert started().num_compiled == 2
    return sorted(tmp_path.glob("programs/*/*"))


def test_a_second_start_compiles_nothing_and_computes_the_same(kept: list[Path]) -> None:
    assert len(kept) == 2
    with compilations() as compiled:
        second = started()
    assert compiled == []
    assert (second.num_compiled, len(second)) == (0, 2)
    assert second.step_bytes() == started("other facts").step_bytes()
    pages = jax.device_put(np.ones((4, 3), np.float32), NamedSharding(MESH, BY_ROWS))
    result = second["shift", 4](pages, np.float32(2))
    assert (np.asarray(result["values"]) == 3).all()
    assert (float(result["sum"]), result["nothing"]) == (12.0, None)
    # The argument was donated to the loaded program, too.
    assert pages.is_deleted()


@pytest.mark.parametrize("harm", ["cut", "changed", "writable", "link"])
def test_a_program_that_cannot_be_trusted_is_compiled_again(
    kept: list[Path], harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    match harm:
        case "cut":
            kept[0].write_bytes(kept[0].read_bytes()[:1000])
        case "changed":
            kept[0].write_bytes(kept[0].read_bytes()[:-1] + b"?")
        case "writable":
            kept[0].chmod(0o666)
        case "link":
            kept[0].rename(kept[0].parent.with_name("other"))
            kept[0].symlink_to("../other")
    assert started().num_compiled == 1
    assert str(kept[0]) in caplog.text
    assert (kept[0].stat().st_mode & 0o777, kept[0].is_symlink()) == (0o600, False)
    assert started().num_compiled == 0


def test_what_programs_depend_on_is_told_apart(kept: list[Path]) -> None:
    assert started("another model").num_compiled == 2
    assert started().num_compiled == 0


def test_programs_whose_loading_killed_a_process_are_compiled_again(
    kept: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    # Nobody holds the lock of this mark.
    (kept[0].parent / ".loading-dead").write_text("")
    assert started().num_compiled == 2
    assert "died while it loaded" in caplog.text


def test_a_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It cost time at every start, and nobody was told."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "file"))
    assert started().num_compiled == 2
    assert "compiled at every start" in caplog.text
    assert "set OSTRO_CACHE" in caplog.text


def test_programs_that_crashed_and_cannot_be_deleted_are_left_alone(
    kept: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk, each start failed to delete them."""
    (kept[0].parent / ".loading-dead").write_text("")

    def read_only(_: Path) -> bool:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(kept_programs, "discard", read_only)
    assert started().num_compiled == 2


@pytest.mark.full
def test_only_the_newest_are_kept(kept: list[Path]) -> None:
    for number in range(20):
        started(number)
    assert len(list(kept[0].parent.parent.iterdir())) == 16
