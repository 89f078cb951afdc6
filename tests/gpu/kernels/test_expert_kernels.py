"""The kernels of mixtures of experts against torch's own modules."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_device import DEVICE

from ostro.kernels.gpu.experts import Ending, Matrices, Shared, add_up, inner_rows, outer_rows
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.routing import Routed, RowTiles, by_expert, most_tiles, route, tile_height
from ostro.kernels.gpu.single_experts import single_inner, single_outer
from ostro.models import architecture as arch
from ostro.torch_models import experts as plain

ACTIVATION: arch.Activation = "gelu_tanh"


def described(
    count: int,
    hidden: int,
    inner: int,
    chosen: int,
    *,
    normalized: bool = True,
    activation: arch.Activation = ACTIVATION,
    bias: str | None = None,
) -> arch.Experts:
    gate_up = arch.Part("gate.{}", inner), arch.Part("up.{}", inner)
    return arch.Experts(
        router=arch.Projection(hidden, (arch.Part("router", count),)),
        up=arch.ExpertMatrices(count, hidden, gate_up, bias=bias),
        down=arch.ExpertMatrices(count, inner, (arch.Part("down.{}", hidden),), bias=bias),
        activation=activation,
        chosen=chosen,
        normalized=normalized,
    )


def module(mixture: arch.Experts, device: torch.device, dtype: torch.dtype = torch.float32) -> plain.Experts:
    torch.manual_seed(0)
    made = plain.Experts(mixture)
    for parameter in made.parameters():
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    return made.to(device, dtype)


def weights(of: plain.ExpertMatrices) -> Matrices:
    return Matrices(of.weight, of.bias)


def mixed(
    experts: plain.Experts,
    x: Tensor,
    logits: Tensor,
    ending: Ending,
    *,
    activation: str = ACTIVATION,
    height: int | None = None,
) -> Tensor:
    """The kernels for any number of rows."""
    count, chosen = experts.count, experts.chosen
    routed = route(logits, count, chosen, normalized=experts.normalized)
    rows = by_expert(routed.experts, count, height or tile_height(len(x) * chosen, count))
    inner = inner_rows(x, weights(experts.up), rows, chosen, activation)
    return add_up(outer_rows(inner, weights(experts.down), rows), routed, ending)


def single(
    experts: plain.Experts,
    x: Tensor,
    logits: Tensor,
    ending: Ending,
    norm: NormWeights | None = None,
    *,
    activation: str = ACTIVATION,
) -> Tensor:
    inner = single_inner(x, logits, weights(experts.up), experts.chosen, activation, norm=norm)
    return single_outer(inner, logits, weights(experts.down), normalized=experts.normalized, ending=ending)


def tiles_of(rows: RowTiles) -> list[list[int]]:
    number = int(rows.tiles[0])
    assert number <= rows.most
    return rows.tiles[1 : 1 + 3 * number].view(-1, 3).tolist()


def check_tiles(chosen: Tensor, count: int, height: int) -> None:
    """Every slot once, sorted as a stable sort does, and every expert's slots in as few tiles as they fit into."""
    found = by_expert(chosen, count, height)
    in_order, order = chosen.flatten().long().sort(stable=True)
    assert found.slots.tolist() == order.tolist()
    expected = []
    for expert in range(count):
        places = (in_order == expert).nonzero().flatten().tolist()
        expected += [[expert, start, places[-1] + 1] for start in places[::height]]
    assert tiles_of(found) == expected


# ---- who goes where

# Few values, so that many logits are equal.
LOGITS = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 2.0, 1e30])


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 5), st.sampled_from([1, 3, 8, 40]), st.booleans(), st.booleans())
def test_rows_choose_as_torch_does_and_of_equal_logits_the_first(
    data: st.DataObject, rows: int, count: int, normalized: bool, half: bool
) -> None:
    chosen = data.draw(st.integers(1, min(count, 8)))
    size = rows * count
    values = data.draw(st.lists(LOGITS, min_size=size, max_size=size))
    # Some experts can be chosen: otherwise no weight is a number.
    logits = torch.tensor(values, device=DEVICE).view(rows, count)
    logits[:, -1] = 0.25
    logits = logits.clamp(max=100.0).half() if half else logits
    experts, weights = plain.route(logits, chosen, normalized=normalized)
    found = route(logits, count, chosen, normalized=normalized)
    assert found.experts.tolist() == experts.tolist()
    torch.testing.assert_close(found.weights, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [60, 128, 200, 512])
def test_many_experts_are_ranked(count: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    # Beside a gate's logit, which is no expert's.
    logits = torch.randn(3, count + 1, device=device).mul_(8).round_().to(dtype)
    logits[:, count] = 100.0
    experts, weights = plain.route(logits[:, :count], 8, normalized=False)
    found = route(logits, count, 8, normalized=False)
    assert found.experts.tolist() == experts.tolist()
    torch.testing.assert_close(found.weights, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_non_finite_logits_choose_some_experts_and_show_in_the_weights(
    dtype: torch.dtype, device: torch.device
) -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0, -math.nan, 2.0]], device=device, dtype=dtype)
    with np.errstate(all="ignore"):
        experts, weights = route(logits, 5, 3, normalized=True)
    assert experts.tolist() == [[1, 3, 4]]
    assert weights.isnan().all()


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 70), st.sampled_from([(4, 2), (6, 6), (33, 5)]), st.sampled_from([16, 32]), st.integers(0, 99))
@example(rows=40, sizes=(4, 2), height=16, seed=-1)
def test_slots_are_sorted_by_expert_and_cut_into_tiles(
    rows: int, sizes: tuple[int, int], height: int, seed: int
) -> None:
    count, chosen = sizes
    if seed < 0:
        # All rows go through the same experts, and nobody through the others.
        experts = torch.arange(chosen).expand(rows, chosen)
    else:
        torch.manual_seed(seed)
        experts = torch.randn(rows, count).argsort(1)[:, :chosen]
    check_tiles(experts.to(DEVICE, torch.int32).contiguous(), count, height)


@pytest.mark.parametrize("rows", [2100, 12000])
def test_slots_of_prompts_are_sorted(rows: int, device: torch.device) -> None:
    torch.manual_seed(0)
    check_tiles(torch.randint(0, 5, (rows, 3), dtype=torch.int32, device=device), 5, 128)


@pytest.mark.parametrize(("slots", "experts"), [(2, 4), (8, 128), (64, 128), (2048, 128), (6, 2), (1000, 8)])
def test_tiles_are_never_more_than_expected(slots: int, experts: int, device: torch.device) -> None:
    height = tile_height(slots, experts)
    bound = most_tiles(slots, experts, height)
    # The worst: as many experts as can have one slot, and the rest of the slots with one of them.
    alone = min(slots, experts) - 1
    assert alone + -(-(slots - alone) // height) <= bound


# ---- what they multiply by


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("rows", "count", "hidden", "inner", "chosen"),
    [(2, 4, 32, 8, 2), (5, 6, 36, 20, 6), (9, 3, 200, 136, 2), (40, 6, 16, 24, 2), (150, 2, 16, 8, 1)],
)
def test_a_mixture_equals_the_plain_twin(
    rows: int, count: int, hidden: int, inner: int, chosen: int, device: torch.device
) -> None:
    experts = module(described(count, hidden, inner, chosen, normalized=rows % 2 == 0), device)
    x = torch.randn(rows, hidden, device=device)
    torch.testing.assert_close(mixed(experts, x, experts.router(x), Ending()), experts(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alone", [True, False])
def test_all_rows_may_go_through_one_expert_and_none_through_the_others(alone: bool, device: torch.device) -> None:
    experts = module(described(5, 32, 16, 1), device)
    x = torch.randn(1 if alone else 37, 32, device=device)
    logits = torch.zeros(len(x), 5, device=device)
    logits[:, 3] = 1.0
    ours = single(experts, x, logits, Ending()) if alone else mixed(experts, x, logits, Ending())
    torch.testing.assert_close(ours, experts.mixed(x, logits), rtol=1e-4, atol=1e-4)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("count", "hidden", "inner", "chosen"),
    # An odd number of chosen experts, and of parts that a row is read in.
    [(4, 32, 8, 2), (6, 36, 24, 6), (40, 64, 48, 3), (5, 600, 20, 3)],
)
@pytest.mark.parametrize("normed", [True, False])
def test_a_single_row_equals_the_plain_twin(
    count: int, hidden: int, inner: int, chosen: int, normed: bool, device: torch.device
) -> None:
    experts = module(described(count, hidden, inner, chosen, normalized=chosen != 3), device)
    x, weight = torch.randn(1, hidden, device=device), torch.rand(hidden, device=device)
    read = torch.nn.functional.rms_norm(x, (hidden,), weight, 1e-5) if normed else x
    ours = single(experts, x, experts.router(read), Ending(), NormWeights(weight, 1e-5) if normed else None)
    torch.testing.assert_close(ours, experts(read), rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(("hidden", "inner"), [(600, 20), (20, 600)])
def test_weights_that_do_not_fit_in_registers_are_read_some_at_a_time(
    hidden: int, inner: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = module(described(5, hidden, inner, 3), device)
    x = torch.randn(1, hidden, device=device)
    monkeypatch.setattr("ostro.kernels.gpu.single_experts._HELD", 16)
    monkeypatch.setattr("ostro.kernels.gpu.single_experts._HELD_AHEAD", 0)
    torch.testing.assert_close(single(experts, x, experts.router(x), Ending()), experts(x), rtol=1e-4, atol=1e-4)


def test_wide_rows_are_read_by_all_warps_of_a_program(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]], device=device)
    x, up = torch.randn(1, 3300, device=device), torch.randn(3, 12, 3300, device=device) / 60
    gate, beside = (up[[1, 2]] @ x[0]).chunk(2, 1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * beside
    torch.testing.assert_close(single_inner(x, logits, Matrices(up), 2, "gelu_tanh"), expected, rtol=1e-4, atol=1e-4)
    inner, down = torch.randn(2, 3300, device=device), torch.randn(3, 6, 3300, device=device) / 60
    expected = (torch.softmax(logits[0, [1, 2]], 0)[:, None] * (down[[1, 2]] @ inner[:, :, None])[:, :, 0]).sum(0)
    ours = single_outer(inner, logits, Matrices(down), normalized=True, ending=Ending())
    torch.testing.assert_close(ours[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("gated", [True, False])
def test_shared_rows_are_added_and_all_goes_to_the_residual(rows: int, gated: bool, device: torch.device) -> None:
    experts = module(described(6, 32, 16, 3), device)
    x, beside, residual = (torch.randn(rows, 32, device=device) for _ in range(3))
    # The gate's logit follows those of the experts.
    logits = torch.cat((experts.router(x), torch.randn(rows, 1, device=device)), 1)
    shared = beside * torch.sigmoid(logits[:, 6:]) if gated else beside
    expected = residual + 0.5 * (experts.mixed(x, logits[:, :6]) + shared)
    ending = Ending(Shared(beside, logits[:, 6] if gated else None), residual, 0.5)
    ours = single(experts, x, logits, ending) if rows == 1 else mixed(experts, x, logits, ending)
    assert ours is residual
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 7])
def test_biases_and_clamped_gates_are_those_of_the_twin(rows: int, device: torch.device) -> None:
    experts = module(described(6, 32, 24, 3, activation="clamped_silu", bias=".bias"), device)
    # So large that some are clamped, on either side.
    x = 8 * torch.randn(rows, 32, device=device)
    logits, run = experts.router(x), single if rows == 1 else mixed
    ours = run(experts, x, logits, Ending(), activation="clamped_silu")
    torch.testing.assert_close(ours, experts(x), rtol=1e-4, atol=1e-3)


def test_with_a_fixed_height_of_tiles_no_other_row_changes_a_bit(device: torch.device) -> None:
    experts = module(described(4, 64, 32, 2), device)
    x = torch.randn(30, 64, device=device)
    logits = experts.router(x)
    together = mixed(experts, x, logits, Ending(), height=64)
    for part in (slice(0, 1), slice(7, 19)):
        apart = mixed(experts, x[part].contiguous(), logits[part].contiguous(), Ending(), height=64)
        assert torch.equal(apart, together[part])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 64, 256, 600, 2000])
@pytest.mark.parametrize(("count", "hidden", "inner", "chosen"), [(128, 2048, 768, 8), (8, 1024, 3584, 2)])
def test_16_bit_mixtures_of_real_sizes_are_near_the_twin(
    rows: int, count: int, hidden: int, inner: int, chosen: int, device: torch.device
) -> None:
    experts = module(described(count, hidden, inner, chosen), device, torch.bfloat16)
    x = torch.randn(rows, hidden, device=device).bfloat16()
    logits = experts.router(x)
    ours = single(experts, x, logits, Ending()) if rows == 1 else mixed(experts, x, logits, Ending())
    expected = experts.mixed(x, logits).float()
    assert (ours.float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_sums_of_16_bits_are_rounded_once(device: torch.device) -> None:
    torch.manual_seed(0)
    outer = torch.randn(4 * 3, 40, device=device).half()
    routed = Routed(torch.zeros(4, 3, dtype=torch.int32, device=device), torch.rand(4, 3, device=device))
    expected = (outer.float().view(4, 3, 40) * routed.weights[:, :, None]).sum(1)
    torch.testing.assert_close(add_up(outer, routed, Ending()).float(), expected, rtol=1e-3, atol=1e-3)
