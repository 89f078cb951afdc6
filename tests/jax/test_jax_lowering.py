"""The programs lower for TPUs and GPUs, which tests have none of: they use nothing that only CPUs have."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from every_family import DIVISIBLE_STATES, some
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax_models import FAMILIES
from native_models import ModelCheckpoint, savable_model
from peft_directory import random_adapter

from ostro.backends.jax.attention import Attention, LoopAttention
from ostro.backends.jax.compiling import Compiler
from ostro.backends.jax.edit_inputs import WORD_BITS, EditInputs
from ostro.backends.jax.logprobs import logprobs
from ostro.backends.jax.mesh import AXIS, make_mesh
from ostro.backends.jax.pages import PagesShape
from ostro.backends.jax.placed import PlacedModel
from ostro.backends.jax.program import StepProgram, StepResult
from ostro.backends.jax.programs import on_mesh
from ostro.backends.jax.sampling import NUM_SETTINGS, DrawKind, Drawn, draw
from ostro.backends.jax.shapes import Sizes, StepShape
from ostro.backends.jax.states import Cache
from ostro.backends.jax.tpu_attention import TpuAttention
from ostro.backends.jax.weights import BY_COLUMNS, COPIED, load_weights, weight_specs
from ostro.models.architecture import Architecture
from ostro.models.cut import Cut, cut
from ostro.models.registry import describe
from ostro.weights.adapter import read_adapter

PLATFORMS = ("tpu", "cuda")
SIZES = Sizes(page_size=4, num_pages=16, max_batch_tokens=64, max_batch_seqs=8)


def step_program(
    described: Architecture, ranks: Cut, attention: Attention, shape: StepShape, mesh: Mesh | AbstractMesh
) -> Any:
    step = partial(StepProgram(described, ranks, attention).step, shape=shape)
    cache = Cache(attention.layout.specs(), None)
    specs, results = (weight_specs(described), cache, COPIED, COPIED), StepResult(cache, COPIED, BY_COLUMNS)
    return on_mesh(mesh, step, specs, results, donated=(1,))


def on(mesh: Mesh | AbstractMesh, arrays: Any, specs: Any) -> Any:
    """The arrays' shapes, divided over a mesh."""
    return jax.tree.map(
        lambda array, spec: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec)),
        arrays,
        specs,
    )


def pages_of(attention: Attention, shape: PagesShape, mesh: Mesh | AbstractMesh, dtype: npt.DTypeLike) -> Cache:
    """A cache without states."""
    pages = jax.eval_shape(partial(attention.layout.empty, shape, dtype))
    return Cache(on(mesh, pages, attention.layout.specs()), None)


@pytest.mark.cases(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_lower_for_tpu_and_cuda(family: str) -> None:
    config = FAMILIES[family]
    described = describe(config)
    assert isinstance(described, Architecture)
    ranks, mesh = cut(described, 8), make_mesh(8)
    weights = load_weights(described, ModelCheckpoint(savable_model(config), config), ranks, mesh, np.float32)
    attention = LoopAttention()
    pages = pages_of(attention, PagesShape(2, 16, 8, 4, described.shape.head_dim), mesh, np.float32)
    # Largest last. Their programs differ in numbers alone, as one family shows.
    shapes = SIZES.shapes(described.shape.max_seq_len)
    for shape in shapes if family == "llama" else shapes[-1:]:
        program = step_program(described, ranks, attention, shape, mesh)
        integers = [jax.ShapeDtypeStruct((count,), np.int32) for count in (8, shape.num_integers)]
        exported = export.export(program, platforms=PLATFORMS)(weights, pages, *integers)
        assert exported.platforms == PLATFORMS
        assert exported.nr_devices == 8
        assert "f64" not in exported.mlir_module()


@pytest.mark.full
def test_steps_with_adapters_lower_for_tpu_and_cuda(tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    model = savable_model(config)
    adapters = {"a": read_adapter(random_adapter(tmp_path / "a", model))}
    placed = PlacedModel.load(describe(config), ModelCheckpoint(model, config), tensor_parallel=8, adapters=adapters)
    compiler = Compiler(placed, SIZES)
    for shape in compiler.step_shapes:
        recipe = compiler.step(shape)
        program = on_mesh(placed.mesh, recipe.function, recipe.specs, recipe.results, donated=recipe.donated)
        exported = export.export(program, platforms=PLATFORMS)(*recipe.arguments)
        assert "f64" not in exported.mlir_module()


@pytest.mark.parametrize("name", some(["qwen3_5", "granitemoehybrid", "lfm2"], "qwen3_5"))
def test_steps_with_states_lower_for_tpu_and_cuda(name: str) -> None:
    config = DIVISIBLE_STATES[name]
    checkpoint = ModelCheckpoint(savable_model(config), config)
    placed = PlacedModel.load(describe(config), checkpoint, tensor_parallel=4)
    compiler = Compiler(placed, replace(SIZES, num_states=16))
    copies = [recipe for recipe in compiler.recipes() if recipe.key[0] == "copy states"]
    for recipe in (*map(compiler.step, compiler.shapes), *copies):
        program = on_mesh(placed.mesh, recipe.function, recipe.specs, recipe.results, donated=recipe.donated)
        exported = export.export(program, platforms=PLATFORMS)(*recipe.arguments)
        assert "f64" not in exported.mlir_module()


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_steps_with_the_kernel_lower_for_a_tpu(family: str) -> None:
    """With Gemma's windows and soft caps."""
    config = FAMILIES[family]
    described = describe(config)
    assert isinstance(described, Architecture)
    ranks, attention = cut(described, 8), TpuAttention()
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = AbstractMesh((1, 8), ("data", AXIS), axis_types=(AxisType.Auto,) * 2, abstract_device=device)
    checkpoint = ModelCheckpoint(savable_model(config), config)
    loaded = load_weights(described, checkpoint, ranks, make_mesh(8), jnp.bfloat16)
    weights = on(mesh, loaded, weight_specs(described))
    held = PagesShape(2, 16, 8 * ranks.kv_heads, 16, described.shape.head_dim)
    pages = pages_of(attention, held, mesh, jnp.bfloat16)
    for shape in SIZES.shapes(described.shape.max_seq_len, tile=attention.tile):
        program = step_program(described, ranks, attention, shape, mesh)
        integers = [jax.ShapeDtypeStruct((count,), np.int32) for count in (8, shape.num_integers)]
        exported = export.export(program, platforms=["tpu"])(weights, pages, *integers)
        assert "tpu_custom_call" in exported.mlir_module()


@pytest.mark.full
@pytest.mark.parametrize("kind", DrawKind)
def test_draws_lower_for_tpu_and_cuda_without_64_bit_numbers(kind: DrawKind) -> None:
    specs = [BY_COLUMNS, COPIED, COPIED]
    shapes = [((8, 1024), np.float32), ((8,), np.int32), ((NUM_SETTINGS, 8), np.int32)]
    if kind is DrawKind.EDITED:
        integers, floats = EditInputs.sizes(8)
        specs += [BY_COLUMNS, COPIED, COPIED]
        shapes += [((8, 1024 // WORD_BITS), np.uint32), ((integers,), np.int32), ((floats,), np.float32)]
    program = on_mesh(make_mesh(8), partial(draw, kind=kind), specs, Drawn(COPIED, COPIED))
    check_lowering(program, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes])


def test_log_probabilities_lower_for_tpu_and_cuda_without_64_bit_numbers() -> None:
    program = on_mesh(make_mesh(8), partial(logprobs, top=20), (BY_COLUMNS, COPIED, COPIED), COPIED)
    shapes = [((8, 1024), np.float32), ((8,), np.int32), ((2, 8), np.int32)]
    check_lowering(program, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes])


def check_lowering(program: Any, arguments: list[jax.ShapeDtypeStruct]) -> None:
    exported = export.export(program, platforms=PLATFORMS)(*arguments)
    assert exported.platforms == PLATFORMS
    assert not any(wide in exported.mlir_module() for wide in ("xf64", "xui64", "tensor<i64>", "tensor<f64>"))
