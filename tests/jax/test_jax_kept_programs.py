"""Programs of an earlier start are loaded instead of compiled, unless anything about them is wrong."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from jax_models import FAMILIES
from native_models import ModelCheckpoint, savable_model

from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.models.registry import describe
from ostro.runner.jax.placed import PlacedModel
from ostro.runner.jax.runner import JaxRunner
from ostro.runner.jax.shapes import Sizes
from ostro.sampling_params import SamplingParams

SIZES = Sizes(page_size=4, num_pages=32, max_batch_tokens=64, max_batch_seqs=8)
NUM_PROGRAMS = 6


@cache
def placed() -> PlacedModel:
    """On two of the eight devices that the process has."""
    config = FAMILIES["llama"]
    return PlacedModel.load(describe(config), ModelCheckpoint(savable_model(config), config), tensor_parallel=2)


def started(sizes: Sizes = SIZES) -> JaxRunner:
    return JaxRunner(placed(), sizes, keeps_programs=True)


def tokens(runner: JaxRunner) -> list[int]:
    core = EngineCore(runner)
    params = SamplingParams(max_tokens=10, temperature=1.0, top_k=50, n=2)
    core.add(Request(id=0, prompt_ids=tuple(range(20)), params=params, seed=0))
    found: list[int] = []
    while core.has_work:
        for step in core.step():
            found += step.token_ids
    core.check_integrity()
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of a first start."""
    monkeypatch.setenv("OSTRO_CACHE", str(directory))
    if not directory.joinpath("programs").exists():
        assert started().programs.num_compiled == NUM_PROGRAMS
    return sorted(path for path in directory.glob("programs/*/*") if path.is_file())


def test_a_second_start_compiles_nothing_and_gives_the_same_tokens(kept: list[Path]) -> None:
    assert len(kept) == NUM_PROGRAMS
    first, second = JaxRunner(placed(), SIZES), started()
    assert (second.programs.num_compiled, len(second.programs)) == (0, NUM_PROGRAMS)
    assert tokens(second) == tokens(first)
    assert second.programs.step_bytes() == first.programs.step_bytes()


@pytest.mark.parametrize("harm", ["cut", "changed", "writable", "link"])
def test_a_program_that_cannot_be_trusted_is_compiled_again(
    kept: list[Path], harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    harms: dict[str, Callable[[Path], object]] = {
        "cut": lambda path: path.write_bytes(path.read_bytes()[:1000]),
        "changed": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        "writable": lambda path: path.chmod(0o666),
        "link": lambda path: path.rename(path.with_name("other")) and path.symlink_to(path.with_name("other")),
    }
    victim = kept[2]
    whole = victim.read_bytes()
    harms[harm](victim)
    assert started().programs.num_compiled == 1
    assert str(victim) in caplog.text
    assert victim.read_bytes()[:32] != b""
    assert (victim.stat().st_mode & 0o777, victim.is_symlink()) == (0o600, False)
    assert len(victim.read_bytes()) == pytest.approx(len(whole), rel=0.1)
    assert started().programs.num_compiled == 0


def test_other_sizes_have_other_programs(kept: list[Path]) -> None:
    more = started(Sizes(page_size=4, num_pages=40, max_batch_tokens=64, max_batch_seqs=8))
    assert more.programs.num_compiled > 0


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "file"))
    assert started().programs.num_compiled == NUM_PROGRAMS
