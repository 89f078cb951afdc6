"""The programs lower for TPUs and GPUs, which tests have none of: they use nothing that only CPUs have."""

from functools import partial

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax_models import FAMILIES
from native_models import ModelCheckpoint, savable_model

from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from ostro.runner.cut import cut
from ostro.runner.jax.attention import LoopAttention
from ostro.runner.jax.mesh import make_mesh
from ostro.runner.jax.pages import PAGES, Pages
from ostro.runner.jax.program import StepProgram, StepResult
from ostro.runner.jax.programs import on_mesh
from ostro.runner.jax.sampling import Drawn, draw
from ostro.runner.jax.shapes import Sizes
from ostro.runner.jax.weights import BY_COLUMNS, COPIED, load_weights, weight_specs

PLATFORMS = ("tpu", "cuda")
SIZES = Sizes(page_size=4, num_pages=16, max_batch_tokens=64, max_batch_seqs=8)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "olmo2"))]
)
def test_steps_lower_for_tpu_and_cuda(family: str) -> None:
    config = FAMILIES[family]
    described = describe(config)
    assert isinstance(described, Architecture)
    ranks, mesh = cut(described, 8), make_mesh(8)
    weights = load_weights(described, ModelCheckpoint(savable_model(config), config), ranks, mesh, np.float32)
    whole = (2, 16, 8, 4, described.shape.head_dim)
    pages = Pages(*(jax.ShapeDtypeStruct(whole, np.float32, sharding=NamedSharding(mesh, spec)) for spec in PAGES))
    results = StepResult(PAGES, COPIED, BY_COLUMNS)
    for shape in SIZES.shapes(described.shape.max_seq_len):
        step = partial(StepProgram(described, ranks, LoopAttention()).step, shape=shape)
        specs = (weight_specs(described), PAGES, COPIED, COPIED)
        program = on_mesh(mesh, step, specs, results, donated=(1,))
        integers = [jax.ShapeDtypeStruct((count,), np.int32) for count in (8, shape.num_integers)]
        exported = export.export(program, platforms=PLATFORMS)(weights, pages, *integers)
        assert exported.platforms == PLATFORMS
        assert exported.nr_devices == 8
        assert "f64" not in exported.mlir_module()


@pytest.mark.parametrize("truncates", [False, True])
def test_draws_lower_for_tpu_and_cuda_without_64_bit_numbers(truncates: bool) -> None:
    specs, results = (BY_COLUMNS, COPIED, COPIED, COPIED), Drawn(COPIED, COPIED, COPIED)
    program = on_mesh(make_mesh(8), partial(draw, truncates=truncates), specs, results)
    shapes = [((8, 1024), np.float32), ((8,), np.int32), ((4, 8), np.int32), ((3, 8), np.float32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    exported = export.export(program, platforms=PLATFORMS)(*arguments)
    assert exported.platforms == PLATFORMS
    assert not any(wide in exported.mlir_module() for wide in ("xf64", "xui64", "tensor<i64>", "tensor<f64>"))
