from typing import Literal

import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.rope_store import (
    QKNormWeights,
    rope_store,
    rope_store_plain,
    rotation_table,
    rotation_table_plain,
)
from ostro.models.architecture import ModelShape, Norm, QKNorm
from ostro.models.config import ConfigReader
from ostro.models.rope_settings import rope_settings
from ostro.torch_models.layers import HeadNorm, WidthNorm
from ostro.torch_models.rope import Rotary

PAGE, PAGES = 16, 40


def frequencies_of(half: int, device: torch.device) -> Tensor:
    return 10000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)


def slots_for(tokens: int, device: torch.device) -> Tensor:
    """Distinct slots in no order, with padding among them."""
    slots = torch.randperm(PAGES * PAGE)[:tokens]
    slots[1::3] = -1
    return slots.to(device)


@pytest.mark.cases(4)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (4, 2, 128, 128),
        (16, 8, 64, 64),
        (3, 1, 80, 32),
        (2, 2, 96, 96),
        (6, 3, 256, 64),
        (3, 1, 64, None),
        (2, 2, 25, None),
    ],
)
@pytest.mark.parametrize("over", ["head", "width", None])
def test_heads_and_cache_equal_the_plain_twin(
    device: torch.device,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int | None,
    over: Literal["head", "width"] | None,
) -> None:
    torch.manual_seed(0)
    positions = torch.randint(0, 5000, (tokens,), device=device)
    table = (
        None if rotary_dim is None else rotation_table_plain(positions, frequencies_of(rotary_dim // 2, device), 1.2)
    )
    slots = slots_for(tokens, device)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device)
    keys = torch.full((PAGES, kv_heads, PAGE, head_dim), float("nan"), device=device)
    values = keys.clone()
    weight = torch.randn(heads + kv_heads, head_dim, device=device)
    norm = None if over is None else QKNormWeights(weight, 1e-6, over)
    for rotate_keys in (False,) if over == "width" else (False, True):
        ours, plain = (qkv.clone(), keys.clone(), values.clone()), (qkv.clone(), keys.clone(), values.clone())
        q = rope_store(ours[0], table, slots, ours[1], ours[2], norm=norm, rotate_keys_in_place=rotate_keys)
        plain_q = rope_store_plain(
            plain[0], table, slots, plain[1], plain[2], norm=norm, rotate_keys_in_place=rotate_keys
        )
        assert q.shape == (tokens, heads, head_dim)
        torch.testing.assert_close(q, plain_q, rtol=1e-5, atol=1e-5)
        if over == "width":
            assert torch.equal(ours[0], qkv), "programs that are late must find the queries as they were"
            plain = (qkv, *plain[1:])
        for mine, theirs in zip(ours, plain, strict=True):  # slots that nothing was written to still hold NaN
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("tokens", [70, pytest.param(1030, marks=pytest.mark.gpu)])
def test_many_tokens_take_larger_programs_to_the_same_end(device: torch.device, tokens: int) -> None:
    torch.manual_seed(0)
    table = rotation_table_plain(torch.arange(tokens, device=device), frequencies_of(8, device))
    qkv = torch.randn(tokens, 6 * 16, device=device, dtype=torch.float16)
    keys = torch.zeros(80, 1, PAGE, 16, device=device, dtype=torch.float16)
    slots = torch.randperm(80 * PAGE)[:tokens].to(device)
    ours, plain = (qkv.clone(), keys.clone(), keys.clone()), (qkv.clone(), keys.clone(), keys.clone())
    rope_store(ours[0], table, slots, ours[1], ours[2])
    rope_store_plain(plain[0], table, slots, plain[1], plain[2])
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tokens", [1, 300])
def test_rotation_table_equals_the_plain_twin(device: torch.device, tokens: int) -> None:
    torch.manual_seed(0)
    positions = torch.randint(0, 131072, (tokens,), device=device)
    frequencies = frequencies_of(40, device)
    table = rotation_table(positions, frequencies, 1.1)
    torch.testing.assert_close(table, rotation_table_plain(positions, frequencies, 1.1), rtol=1e-5, atol=1e-5)


def test_queries_and_keys_agree_with_the_model(device: torch.device) -> None:
    torch.manual_seed(0)
    config = ConfigReader({"rope_theta": 1e6, "max_position_embeddings": 4096})
    rotary = Rotary(rope_settings(config), head_dim=32, max_seq_len=4096).to(device)
    shape = ModelShape(
        vocab_size=8, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, max_seq_len=4096
    )
    norms = QKNorm(Norm("q", 32, 1e-6), Norm("k", 32, 1e-6), over="head")
    head_norm = HeadNorm(norms, shape).to(device)
    head_norm.weight.data.normal_()
    positions = torch.tensor([0, 7, 4000], device=device)
    qkv = torch.randn(3, 8 * 32, device=device)
    expected = rotary(positions, torch.float32)(head_norm(qkv.view(3, 8, 32)[:, :6]))
    keys = torch.zeros(1, 2, PAGE, 32, device=device)
    table = rotation_table(positions, rotary.frequencies[16:], rotary.attention_factor)
    slots = torch.tensor([4, 0, 9], device=device)
    q = rope_store(qkv, table, slots, keys, torch.zeros_like(keys), norm=QKNormWeights(head_norm.weight.data, 1e-6))
    torch.testing.assert_close(q, expected[:, :4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(keys[0][:, slots].transpose(0, 1), expected[:, 4:], rtol=1e-4, atol=1e-4)


def test_norms_over_the_width_agree_with_the_model(device: torch.device) -> None:
    torch.manual_seed(0)
    norms = QKNorm(Norm("q", 4 * 16, 1e-6), Norm("k", 2 * 16, 1e-6), over="width")
    width_norm = WidthNorm(norms).to(device)
    for parameter in width_norm.parameters():
        parameter.data.normal_()
    qkv = torch.randn(3, 8 * 16, device=device)
    expected = width_norm(qkv.view(3, 8, 16)[:, :6])
    keys = torch.zeros(1, 2, PAGE, 16, device=device)
    slots = torch.tensor([4, 0, 9], device=device)
    weight = torch.cat((width_norm.q_weight, width_norm.k_weight)).data
    q = rope_store(qkv, None, slots, keys, torch.zeros_like(keys), norm=QKNormWeights(weight, 1e-6, "width"))
    torch.testing.assert_close(q, expected[:, :4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(keys[0][:, slots].transpose(0, 1), expected[:, 4:], rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("over", ["head", "width"])
def test_invariant_heads_have_the_same_bits_among_many_tokens(
    device: torch.device, over: Literal["head", "width"]
) -> None:
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = 1100 if device.type == "cuda" else 70, 6, 2, 32
    positions, slots = torch.randint(0, 4096, (tokens,), device=device), torch.arange(tokens, device=device)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device)
    norm = QKNormWeights(torch.randn(heads + kv_heads, dim, device=device), 1e-6, over)
    outcomes = []
    for first, last in ((0, tokens), (3, 4), (20, 60)):
        keys = torch.zeros(-(-tokens // PAGE), kv_heads, PAGE, dim, device=device)
        table = rotation_table(positions[first:last], frequencies_of(dim // 2, device), 1.1, invariant=True)
        q = rope_store(qkv[first:last].clone(), table, slots[first:last], keys, keys.clone(), norm=norm, invariant=True)
        outcomes.append((q, keys.transpose(1, 2).flatten(0, 1)[first:last]))
    (all_q, all_keys), *parts = outcomes
    for (q, keys), (first, last) in zip(parts, ((3, 4), (20, 60)), strict=True):
        assert torch.equal(q, all_q[first:last])
        assert torch.equal(keys, all_keys[first:last])
