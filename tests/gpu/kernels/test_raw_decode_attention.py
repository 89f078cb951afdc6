"""Decode attention that norms, rotates and stores by itself, against `rope_store` with `decode_attention` after it."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode_attention import a_case
from torch import Tensor
from triton_device import DEVICE

from ostro.kernels.gpu.decode_attention import (
    DecodeScratch,
    DecodeTuning,
    decode_attention,
    plan_decode,
    raw_decode_attention,
)
from ostro.kernels.gpu.rope_store import QKNormWeights, rope_store, rotation_table_plain
from ostro.models.architecture import AttentionSpec


@dataclass(frozen=True)
class Heads:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int | None = 16
    is_normed: bool = False


@dataclass(frozen=True)
class Outcome:
    out: Tensor
    keys: Tensor
    values: Tensor


def both(
    lens: list[int],
    heads: Heads,
    *,
    window: int | None = None,
    softcap: float | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    tuning: DecodeTuning | None = None,
    largest: float = 1.0,
) -> tuple[Outcome, Outcome]:
    """What one kernel makes of some rows, and what two do. Rows without keys are padding. The slots of new tokens hold
    NaNs, as all unused ones do.
    """
    torch.manual_seed(0)
    case = a_case(
        lens, DEVICE, heads=heads.heads, kv_heads=heads.kv_heads, head_dim=heads.head_dim, page_size=page_size,
        dtype=dtype,
    )  # fmt: skip
    qkv = torch.randn(len(lens), (heads.heads + 2 * heads.kv_heads) * heads.head_dim).to(DEVICE, dtype) * largest
    slots = torch.full((len(lens),), -1, device=DEVICE)
    keys, values = case.keys.to(kv_dtype or dtype).clone(), case.values.to(kv_dtype or dtype).clone()
    for row, length in enumerate(lens):
        if length:
            page, offset = int(case.tables[row, (length - 1) // page_size]), (length - 1) % page_size
            slots[row] = page * page_size + offset
            for cache in (keys, values):
                cache[page, :, offset] = torch.full_like(cache[page, :, offset], float("nan"))
    half = None if heads.rotary_dim is None else heads.rotary_dim // 2
    frequencies = torch.rand(half or 1, device=DEVICE)
    table = None if half is None else rotation_table_plain(case.lens.long(), frequencies, 1.1)
    weight = torch.randn(heads.heads + heads.kv_heads, heads.head_dim).to(DEVICE, dtype)
    norm = QKNormWeights(weight, 1e-6) if heads.is_normed else None
    spec = AttentionSpec(scale=heads.head_dim**-0.5, window=window, softcap=softcap)
    scratch = DecodeScratch(
        len(lens), heads.heads, heads.kv_heads, heads.head_dim, page_size, DEVICE, windows=(window,), tuning=tuning
    )
    plan_decode(case.lens, scratch, window)

    def outcome(*, raw: bool) -> Outcome:
        ours, k, v = qkv.clone(), keys.clone(), values.clone()
        out = torch.full((len(lens), heads.heads, heads.head_dim), float("nan")).to(DEVICE, dtype)
        if raw:
            raw_decode_attention(ours, table, slots, k, v, case.tables, scratch, out, spec, norm=norm, lens=case.lens)
            assert torch.equal(ours, qkv)
        else:
            q = rope_store(ours, table, slots, k, v, norm=norm)
            decode_attention(q, k, v, case.tables, scratch, out, spec)
        assert not scratch.arrived.any()
        return Outcome(out.float(), k.float(), v.float())

    return outcome(raw=True), outcome(raw=False)


def assert_same(found: tuple[Outcome, Outcome], *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Only sums may be taken in another order: those of a norm, and those of attention."""
    one, two = found
    torch.testing.assert_close(one.out, two.out, rtol=rtol, atol=atol)
    torch.testing.assert_close(one.keys, two.keys, rtol=rtol, atol=atol, equal_nan=True)
    torch.testing.assert_close(one.values, two.values, rtol=0, atol=0, equal_nan=True)


@st.composite
def some_heads(draw: st.DrawFn) -> Heads:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 2, 3, 7, 16, 17, 20]))
    head_dim = draw(st.sampled_from([16, 24, 32, 40]))
    rotary_dim = draw(st.none() | st.integers(1, head_dim // 2).map(lambda half: 2 * half))
    return Heads(kv_heads * group, kv_heads, head_dim, rotary_dim, draw(st.booleans()))


@settings(max_examples=40 if DEVICE.type == "cuda" else 12, deadline=None)
@given(
    lens=st.lists(st.sampled_from([0, 1, 2, 16, 17, 63, 64, 65, 66, 128, 129, 300]), min_size=1, max_size=4),
    heads=some_heads(),
    window=st.none() | st.sampled_from([1, 2, 16, 64, 65, 100]),
    softcap=st.none() | st.just(2.0),
    page_size=st.sampled_from([16, 48, 64, 128]),
)
def test_one_kernel_does_what_two_do(
    lens: list[int], heads: Heads, window: int | None, softcap: float | None, page_size: int
) -> None:
    assert_same(both(lens, heads, window=window, softcap=softcap, page_size=page_size))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_wide_heads_are_normed_and_rotated_alike(head_dim: int) -> None:
    assert_same(both([70, 1], Heads(head_dim=head_dim, rotary_dim=head_dim // 2, is_normed=True)))


@pytest.mark.parametrize("window", [None, 1, 65, 200])
@pytest.mark.parametrize("length", [0, 1, 64, 65, 600])
def test_a_single_row_needs_no_list(length: int, window: int | None) -> None:
    assert_same(both([length], Heads(heads=2, kv_heads=1, is_normed=True), window=window))


@pytest.mark.parametrize("rotary_dim", [16, 8, None])
def test_keys_that_are_not_normed_are_stored_to_the_same_bits(rotary_dim: int | None) -> None:
    one, two = both([5, 64, 65, 0], Heads(rotary_dim=rotary_dim))
    assert torch.equal(one.keys.nan_to_num(), two.keys.nan_to_num())
    assert torch.equal(one.values.nan_to_num(), two.values.nan_to_num())


def test_a_first_token_is_given_its_own_value() -> None:
    one, two = both([1, 1], Heads(is_normed=True))
    assert torch.equal(one.out, two.out)


def test_eight_bit_pages_hold_and_give_the_same_rounded_numbers() -> None:
    """Large ones saturate."""
    found = both(
        [70, 1, 0, 17],
        Heads(head_dim=32, rotary_dim=32, is_normed=True),
        dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
        largest=300.0,
    )
    assert found[0].values.nan_to_num().abs().max() == 448
    assert torch.equal(found[0].keys.nan_to_num(), found[1].keys.nan_to_num())
    assert_same(found, rtol=1e-2, atol=1e-2)


def test_half_precision_rounds_queries_and_keys_alike() -> None:
    found = both([70, 1, 0, 17], Heads(head_dim=64, rotary_dim=64), dtype=torch.float16)
    assert torch.equal(found[0].keys.nan_to_num(), found[1].keys.nan_to_num())
    assert_same(found, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("tuning", [DecodeTuning(programs_per_sm=1), DecodeTuning(joins_in_place=False)])
def test_any_tuning_serves(tuning: DecodeTuning) -> None:
    assert_same(both([600, 90, 0, 1], Heads(is_normed=True), page_size=64, tuning=tuning))
