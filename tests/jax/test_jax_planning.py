"""What a plan says of a device is what the device holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax_models import FAMILIES
from model_directory import write_model
from native_models import ModelCheckpoint, savable_model

from ostro.backends.backend import open_model
from ostro.backends.jax.compiling import Compiler
from ostro.backends.jax.layout import VectorLayout, matrix_values
from ostro.backends.jax.load import jax_runner
from ostro.backends.jax.mesh import check_whole_mesh, fitting_ranks
from ostro.backends.jax.placed import PlacedModel
from ostro.backends.jax.planning import step_bytes
from ostro.backends.jax.programs import Programs
from ostro.backends.jax.shapes import Sizes
from ostro.backends.memory import rounded
from ostro.backends.planning import plan
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.errors import BadRequest, Unsupported
from ostro.models.registry import describe
from ostro.weights import open_checkpoint

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.cases(11)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_weights_are_counted_as_each_rank_holds_them(family: str, tp: int) -> None:
    config = FAMILIES[family]
    placed = PlacedModel.load(describe(config), ModelCheckpoint(savable_model(config), config), tensor_parallel=tp)
    counted = matrix_values(placed.described, placed.cut) + VectorLayout.of(placed.described, placed.cut).total
    assert counted * np.dtype(np.float32).itemsize == placed.rank_bytes


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(("rows", "tokens"), [(32, 64), (64, 512)])
def test_the_memory_of_a_step_is_estimated_within_a_tenth(tp: int, rows: int, tokens: int) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = {**FAMILIES["llama"], **wide, "head_dim": 32, "vocab_size": 8000, "max_position_embeddings": 2048}
    placed = PlacedModel.load(describe(config), ModelCheckpoint(savable_model(config), config), tensor_parallel=tp)
    sizes = Sizes(page_size=64, num_pages=8, max_batch_tokens=tokens, max_batch_seqs=rows)
    compiler = Compiler(placed, sizes)
    programs = Programs(placed.mesh)
    programs.add(compiler.step(compiler.shapes[-1]))
    resolved = DEVICE_KINDS["tpu"].resolve(EngineConfig(page_size=64, max_batch_tokens=tokens, max_batch_seqs=rows))
    assert step_bytes(placed.described, placed.cut, resolved) == pytest.approx(programs.step_bytes(), rel=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads of queries, one of keys and values."""
    return write_model(tmp_path_factory.mktemp("model"))


def config(**changes: Any) -> EngineConfig:
    return replace(EngineConfig(backend="jax", device="cpu", max_batch_seqs=8, max_batch_tokens=64), **changes)


@pytest.mark.slow
def test_the_plan_of_a_cpu_is_what_is_loaded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path))
    asked = config(tensor_parallel=2, kv_memory=MIB)
    planned = plan(model, asked, memory=8 * GIB, device="cpu")
    runner = jax_runner(open_model(open_checkpoint(model), asked))
    spec = runner.spec
    assert (planned.backend, planned.precision, planned.devices) == (spec.backend, spec.precision, spec.devices)
    assert (planned.num_pages, planned.page_size) == (spec.num_pages, spec.page_size)
    # A KV head that two ranks share is kept twice.
    assert planned.page_bytes == 2 * plan(model, config(kv_memory=MIB), memory=8 * GIB, device="cpu").page_bytes


def test_devices_share_the_weights_and_the_vocabularys_padding_is_counted(model: Path) -> None:
    one, two = (plan(model, config(device="tpu", tensor_parallel=n), memory=16 * GIB) for n in (1, 2))
    assert (one.devices, two.devices) == (1, 2)
    assert one.precision == "bfloat16 weights, bfloat16 keys and values"
    assert 0.4 < two.weights_bytes / one.weights_bytes < 1
    assert two.fits
    assert two.total_bytes <= 0.9 * 16 * GIB


def test_a_number_of_devices_that_does_not_divide_is_refused_while_planning(model: Path) -> None:
    with pytest.raises(BadRequest, match="2 attention heads do not divide by it"):
        plan(model, config(device="tpu", tensor_parallel=3), memory=16 * GIB)


def test_what_does_not_run_on_jax_is_refused_while_planning(model: Path) -> None:
    with pytest.raises(Unsupported, match="quantize does not work with JAX"):
        plan(model, config(quantize="int8"), memory=GIB)


def test_numbers_of_pages_are_rounded_so_that_restarts_find_their_programs() -> None:
    assert [rounded(pages) for pages in (1, 31, 63, 64, 65, 1000, 1007, 1008)] == [1, 31, 63, 64, 64, 992, 992, 1008]
    assert all(0.968 < rounded(pages) / pages <= 1 for pages in range(1, 5000))
    assert all(rounded(rounded(pages)) == rounded(pages) for pages in range(1, 5000))


def test_auto_is_one_device_on_a_cpu_however_many_virtual_ones_there_are() -> None:
    assert fitting_ranks(describe(FAMILIES["llama"]), "cpu") == 1


def test_hosts_whose_devices_do_not_divide_a_model_have_to_be_more_or_fewer() -> None:
    """Other numbers were proposed, and refused because the mesh had more devices."""
    llama = describe(FAMILIES["llama"])
    check_whole_mesh(llama, 2)
    with pytest.raises(BadRequest, match=r"have 3 devices.* only over 1, 2.* more or fewer hosts"):
        check_whole_mesh(llama, 3)
