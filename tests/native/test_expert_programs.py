"""Programs of experts alone, whose rows come with their experts and weights: what runs beside a model on a GPU."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from divided_experts import packed_experts
from every_family import config_of
from native_models import needs_library, savable_model
from tiny_models import LLAMA

from ostro.backends.native.expert_steps import ExpertLowering
from ostro.kernels.cpu.library import instruction_sets
from ostro.kernels.cpu.packed_file import PackedFile
from ostro.kernels.cpu.program import Program
from ostro.models.architecture import Architecture
from ostro.models.expert_layers import with_cpu_experts
from ostro.models.registry import describe
from ostro.torch_models.experts import Experts

pytestmark = needs_library

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64] | Floats

HIDDEN, ROWS, LAYERS = 64, 24, 2
SIZES = {**LLAMA, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
CONFIGS = {
    "plain": config_of("qwen3_moe", SIZES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32),
    # Biases, clamped activations.
    "biased": config_of("gpt_oss", SIZES, num_local_experts=6, intermediate_size=64),
}
CHOSEN = {"plain": 3, "biased": 2}


@pytest.fixture(scope="module", params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def mixtures(name: str) -> list[Experts]:
    model = savable_model(CONFIGS[name])
    return [module for module in model.modules() if isinstance(module, Experts)]


def packed(name: str, path: Path, *, bits: int = 0, layers: int = LAYERS) -> PackedFile:
    described = describe(CONFIGS[name])
    assert isinstance(described, Architecture)
    _, experts = with_cpu_experts(described, layers)
    return packed_experts(experts, CONFIGS[name], path, bits=bits)


def made(weights: PackedFile, threads: int = 2) -> Program:
    isa = instruction_sets()[0]
    return Program(weights, isa=isa, num_pages=0, max_tokens=ROWS, max_asked=1, threads=threads)


def given_rows(name: str, count: int = ROWS) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
    rng, chosen = np.random.default_rng(5), CHOSEN[name]
    x = rng.standard_normal((count, HIDDEN)).astype(np.float32)
    # One of them much larger than the rest, as in real activations.
    x[:, 7] *= 40
    experts = np.stack([rng.permutation(mixtures(name)[0].count)[:chosen] for _ in range(count)])
    weights = rng.random((count, chosen)).astype(np.float32)
    return x, experts, weights


def run(program: Program, layer: int, x: Floats, experts: Numbers, weights: Floats) -> Floats:
    given, rows, chosen = program.buffer(ExpertLowering.GIVEN), len(x), experts.shape[1]
    given[:rows, :HIDDEN] = x
    given[:rows, HIDDEN : HIDDEN + chosen] = experts
    given[:rows, HIDDEN + chosen : HIDDEN + 2 * chosen] = weights
    first = layer * ExpertLowering.STEPS
    program.rowwise_run(first, first + ExpertLowering.STEPS, rows)()
    return program.buffer(ExpertLowering.SUMS)[:rows, :HIDDEN].copy()


def meant(module: Experts, x: Floats, experts: npt.NDArray[np.int64], weights: Floats) -> Floats:
    """By torch's modules, row by row and expert by expert."""
    sums = []
    for row, chosen, shares in zip(torch.from_numpy(x), experts, weights, strict=True):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, share in zip(chosen, shares, strict=True):
            up, down = (each.weight[expert].double() for each in (module.up, module.down))
            inner = up @ row.double()
            if module.up.bias is not None:
                inner += module.up.bias[expert]
            out = down @ module.act(inner)
            total += float(share) * (out if module.down.bias is None else out + module.down.bias[expert])
        sums.append(total)
    return torch.stack(sums).float().numpy()


def test_each_layer_adds_up_the_experts_that_are_named(name: str, tmp_path: Path) -> None:
    program, rows = made(packed(name, tmp_path / "experts.ostro")), given_rows(name)
    # Layers share their buffers: each runs after the other.
    for layer in [0, 1, 0]:
        found = run(program, layer, *rows)
        np.testing.assert_allclose(found, meant(mixtures(name)[layer], *rows), rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_row_has_the_same_bits_alone_and_in_a_batch_with_any_number_of_threads(
    name: str, bits: int, tmp_path: Path
) -> None:
    weights, (x, experts, shares) = packed(name, tmp_path / "experts.ostro", bits=bits), given_rows(name)
    together = run(made(weights, threads=1), 1, x, experts, shares)
    assert np.isfinite(together).all()
    program = made(weights, threads=3)
    assert np.array_equal(run(program, 1, x, experts, shares), together)
    for row in (0, 5, ROWS - 1):
        alone = run(program, 1, x[row : row + 1], experts[row : row + 1], shares[row : row + 1])
        assert np.array_equal(alone[0], together[row])
    few = run(program, 1, x[3:7], experts[3:7], shares[3:7])
    assert np.array_equal(few, together[3:7])


@pytest.mark.full
@pytest.mark.parametrize("bits", [0, 4])
def test_rows_that_only_pad_add_nothing_and_change_no_other(name: str, bits: int, tmp_path: Path) -> None:
    program, (x, experts, shares) = made(packed(name, tmp_path / "e.ostro", bits=bits)), given_rows(name)
    expected = run(program, 0, x, experts, shares)
    for padding in ([0, 4, 5, ROWS - 1], range(1, ROWS), range(ROWS)):
        named, held = experts.copy(), x.copy()
        named[list(padding)] = -1
        # What pads may hold anything.
        held[list(padding)] = np.nan
        found = run(program, 0, held, named, shares)
        others = [row for row in range(ROWS) if row not in padding]
        assert np.array_equal(found[others], expected[others])
        assert not found[list(padding)].any()


@pytest.mark.cases(2)
@pytest.mark.parametrize("wrong", [-2.0, 6.5e9, float("nan"), float("inf"), 8.0])
def test_what_is_no_experts_number_makes_its_row_nan_and_nothing_is_read_for_it(wrong: float, tmp_path: Path) -> None:
    program, (x, experts, shares) = made(packed("plain", tmp_path / "e.ostro")), given_rows("plain")
    expected = run(program, 0, x, experts, shares)
    named = experts.astype(np.float32)
    named[4, 1] = wrong
    found = run(program, 0, x, named, shares)
    assert np.isnan(found[4]).all()
    assert np.array_equal(np.delete(found, 4, 0), np.delete(expected, 4, 0))


@pytest.mark.parametrize(
    ("first", "last", "rows", "why"),
    [
        (0, 4, 0, "the number of rows is 0"),
        (0, 4, ROWS + 1, f"the number of rows is {ROWS + 1}"),
        (-1, 4, 1, "the first step is -1"),
        (5, 4, 1, "the last step is 4"),
        (4, 9, 1, "the last step is 9, not from 4 to 8"),
    ],
)
def test_runs_beyond_a_program_are_refused(first: int, last: int, rows: int, why: str, tmp_path: Path) -> None:
    program = made(packed("plain", tmp_path / "e.ostro"))
    with pytest.raises(AssertionError, match=why):
        program.rowwise_run(first, last, rows)


def test_only_the_named_layers_are_packed(tmp_path: Path) -> None:
    one, both = (packed("plain", tmp_path / f"{layers}.ostro", layers=layers) for layers in (1, 2))
    assert len(one.matrices) == 2
    assert len(both.matrices) == 4
    rows = given_rows("plain")
    assert np.array_equal(run(made(one), 0, *rows), run(made(both), 0, *rows))


def test_a_model_without_its_experts_lacks_their_tensors_alone() -> None:
    described = describe(CONFIGS["plain"])
    assert isinstance(described, Architecture)
    whole = {tensor.name for tensor in described.tensors()}
    device, experts = with_cpu_experts(described, 1)
    assert {tensor.name for tensor in device.tensors()} | {tensor.name for tensor in experts.tensors()} == whole
    assert device.expert_names == described.expert_names
