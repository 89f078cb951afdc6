from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostro.kernels.packed_linear import (
    GROUP,
    Int4Weight,
    Int8Weight,
    packed_linear,
    packed_linear_plain,
    packed_rows,
    quantize_int4,
    quantize_int8,
    widened,
)

QUANTIZE: Mapping[str, Callable[[Tensor], Int8Weight | Int4Weight]] = {"int8": quantize_int8, "int4": quantize_int4}


def packed(kind: str, out_features: int, in_features: int, seed: int = 0) -> Int8Weight | Int4Weight:
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))
    return QUANTIZE[kind](weight)


@pytest.mark.parametrize("kind", QUANTIZE)
@given(
    rows=st.integers(1, 40),
    out_features=st.integers(1, 130) | st.sampled_from([32, 64, 256]),
    groups=st.integers(1, 9),
    has_bias=st.booleans(),
)
def test_product_equals_the_plain_twin(kind: str, rows: int, out_features: int, groups: int, has_bias: bool) -> None:
    weight = packed(kind, out_features, groups * GROUP)
    x = torch.randn(rows, groups * GROUP)
    bias = torch.randn(out_features) if has_bias else None
    torch.testing.assert_close(
        packed_linear(x, weight, bias), packed_linear_plain(x, weight, bias), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("in_features", [1, 7, 33, 63])
def test_eight_bits_take_rows_of_any_length(in_features: int) -> None:
    weight = packed("int8", 5, in_features)
    x = torch.randn(3, in_features)
    torch.testing.assert_close(packed_linear(x, weight), packed_linear_plain(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", QUANTIZE)
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (50, 96), (700, 1024)])
@pytest.mark.parametrize("rows", [2, 4, 5, 17])
def test_row_does_not_depend_on_its_neighbours(kind: str, out_features: int, in_features: int, rows: int) -> None:
    """To the last bit: whatever the others hold, were it infinite."""
    weight = packed(kind, out_features, in_features)
    x = torch.randn(rows, in_features)
    found = packed_linear(x, weight)
    for other in (0.0, 1e30, float("inf"), float("nan")):
        changed = x.clone()
        changed[1:] = other
        assert torch.equal(packed_linear(changed, weight)[0], found[0])
    # Sums of a thousand products, in another order.
    torch.testing.assert_close(packed_linear(x[:1], weight)[0], found[0], rtol=1e-4, atol=1e-3)


@given(st.integers(0, 1000), st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
def test_eight_bits_are_within_half_a_step_of_each_row(seed: int, size: float) -> None:
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(seed)) * size
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((widened(quantize_int8(weight)) - weight).abs() <= step * 0.5001).all()


@given(st.integers(0, 1000), st.sampled_from([1e-2, 1.0, 1e3]))
def test_four_bits_are_within_a_step_of_each_group(seed: int, size: float) -> None:
    """Half a step, and what scale and minimum lose in 16 bits."""
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(seed)) * size
    groups = weight.view(len(weight), -1, GROUP)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    lost = (widened(quantize_int4(weight)) - weight).abs().view(groups.shape).amax(-1)
    assert (lost <= step * 0.55).all()


def test_weights_that_were_in_four_bits_stay_as_they_are() -> None:
    """A GGUF of type Q4_1 has the same groups, with scales and minima in 16 bits too."""
    scales, minima = torch.rand(8, 4, 1).half().float() + 0.5, torch.randn(8, 4, 1).half().float()
    scales = scales.half().float()
    whole = torch.randint(0, 16, (8, 4, GROUP)).float()
    whole[..., 0], whole[..., 1] = 0, 15
    weight = (whole * scales + minima).flatten(1)
    torch.testing.assert_close(widened(quantize_int4(weight)), weight, rtol=1e-6, atol=1e-6)


def test_rows_of_zeros_and_of_one_value_stay() -> None:
    for quantize in QUANTIZE.values():
        weight = torch.zeros(3, 64)
        weight[1] = 0.5
        assert torch.equal(widened(quantize(weight)), weight)


@pytest.mark.parametrize("kind", QUANTIZE)
def test_non_finite_values_are_not_hidden(kind: str) -> None:
    weight = torch.randn(4, 64)
    weight[2, 5] = float("nan")
    found = packed_linear(torch.randn(2, 64), QUANTIZE[kind](weight))
    assert found.isfinite().all(0).tolist() == [True, True, False, True]


def test_rows_of_an_embedding() -> None:
    weight = quantize_int8(torch.randn(20, 48))
    ids = torch.tensor([3, 3, 19, 0])
    assert torch.equal(packed_rows(weight, ids), F.embedding(ids, widened(weight)))
