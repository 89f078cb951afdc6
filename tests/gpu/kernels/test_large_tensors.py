"""Tensors of more than 2³¹ elements: offsets are 64-bit numbers wherever a row, a page or a matrix is multiplied by its
size. With 32 bits they wrap, and a kernel reads or writes another request's memory.

Pools of pages and rows of logits are tried in the interpreter, too, in memory of which the few pages in use are real.
Weights have to lie in one piece, and are too much for it.
"""

import mmap

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from ostro.kernels.gpu.decode_attention import DecodeScratch, decode_attention, plan_decode, reference_attention
from ostro.kernels.gpu.logits import finished_logits, finished_logits_plain
from ostro.kernels.gpu.packed import unpacked
from ostro.kernels.gpu.packed_words import Packed, pack_codes, pack_pairs, widened
from ostro.kernels.gpu.rope_store import rope_store, rope_store_plain
from ostro.kernels.gpu.sampling import SamplerTables, SlotSettings, sample_tokens
from ostro.kernels.gpu.small_batch import small_linear, small_linear_plain
from ostro.kernels.gpu.token_masks import ban_plain, ban_tokens
from ostro.models.architecture import AttentionSpec

MOST = 2**31
# Linux's MAP_NORESERVE: more than the machine has may be asked for.
_NO_RESERVE = 0x4000
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """On a CPU, memory that becomes real as it is written, behind as much again as a wrapped offset may go back."""
    if DEVICE.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    count = 1
    for size in shape:
        count *= size
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, (MOST + count) * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"this system does not promise memory that it does not have: {error}")
    return torch.frombuffer(memory, dtype=dtype, offset=MOST * dtype.itemsize, count=count).view(shape)


PAGE, KV_HEADS, HEAD_DIM = 64, 2, 32


@pytest.mark.full
def test_last_pages_of_a_large_pool_are_written_and_read() -> None:
    pages = MOST // (KV_HEADS * PAGE * HEAD_DIM) + 4
    keys, values = (zeros(pages, KV_HEADS, PAGE, HEAD_DIM, dtype=torch.float16) for _ in range(2))
    own_keys, own_values = (keys.new_zeros(4, KV_HEADS, PAGE, HEAD_DIM, device=DEVICE) for _ in range(2))
    torch.manual_seed(0)
    qkv = torch.randn(2 * PAGE, 3 * KV_HEADS * HEAD_DIM, device=DEVICE).half()
    slots = torch.arange(2 * PAGE, device=DEVICE)
    rope_store(qkv.clone(), None, slots + (pages - 4) * PAGE, keys, values)
    rope_store_plain(qkv.clone(), None, slots, own_keys, own_values)
    assert torch.equal(keys[-4:], own_keys)
    assert torch.equal(values[-4:], own_values)

    query = torch.randn(1, KV_HEADS, HEAD_DIM, device=DEVICE).half()
    lens = torch.tensor([100], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[pages - 4, pages - 3]], dtype=torch.int32, device=DEVICE)
    spec = AttentionSpec(scale=0.2)
    scratch = DecodeScratch(1, KV_HEADS, KV_HEADS, HEAD_DIM, PAGE, DEVICE)
    plan_decode(lens, scratch)
    found = decode_attention(query, keys, values, table, scratch, torch.empty_like(query), spec)
    expected = reference_attention(query, own_keys, own_values, torch.arange(2, device=DEVICE), 99, spec)
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_last_rows_of_many_logits_are_masked_and_drawn_from() -> None:
    """Rows lie far apart, as those of a wide vocabulary do."""
    vocab, stride = 200, 1 << 26
    rows = MOST // stride + 2
    logits = zeros(rows, stride)[:, :vocab]
    torch.manual_seed(0)
    noise = torch.randn(rows, vocab, device=DEVICE)
    logits.copy_(noise)
    words = torch.randint(-(2**31), 2**31 - 1, (rows, vocab // 32 + 1), dtype=torch.int32, device=DEVICE)
    masks = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    ban_tokens(logits, words, masks)
    ban_plain(noise, words, masks)
    assert torch.equal(logits, noise)
    tables = SamplerTables(rows, vocab, DEVICE)
    tables.admit([SlotSettings(slot=slot, seed=slot, temperature=0.0) for slot in range(rows)])
    tokens, errors = (torch.empty(rows, dtype=kind, device=DEVICE) for kind in (torch.int64, torch.int8))
    sample_tokens(logits, masks, tables, tokens, errors, truncated=False, penalties=False)
    assert torch.equal(tokens, noise.argmax(1))
    assert not errors.any()


WIDTH = 1 << 15
OUTS = MOST // WIDTH + 64


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_last_rows_of_a_large_weight_are_multiplied(rows: int) -> None:
    weight = torch.zeros(OUTS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    weight[-64:].normal_()
    x = torch.randn(rows, WIDTH, device=DEVICE).bfloat16()
    found = small_linear(x, weight)[:, -64:]
    expected = small_linear_plain(x, weight[-64:])
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (8, 32)])
def test_last_rows_of_a_large_packed_weight_are_unpacked(bits: int, group: int) -> None:
    codes = torch.randint(0, 1 << bits, (64, WIDTH), dtype=torch.uint8)
    scales, seconds = torch.rand(64, WIDTH // group).half(), torch.randint(0, 1 << bits, (64, WIDTH // group)).half()
    last = Packed(pack_codes(codes, bits, group).to(DEVICE), pack_pairs(scales, seconds).to(DEVICE), bits, group, False)
    words, pairs = (torch.zeros(OUTS, part.shape[1], dtype=part.dtype, device=DEVICE) for part in last[:2])
    words[-64:], pairs[-64:] = last.words, last.pairs
    found = unpacked(Packed(words, pairs, bits, group, False), torch.float16)
    torch.testing.assert_close(found[-64:], widened(last).half(), rtol=1e-2, atol=1e-2)
    assert not found[:-64].any()


@pytest.mark.gpu
@needs_gpu
def test_last_logits_of_many_are_finished() -> None:
    logits = torch.zeros(MOST // (1 << 18) + 2, 1 << 18, dtype=torch.bfloat16, device=DEVICE)
    logits[-1].normal_()
    expected = finished_logits_plain(logits[-1:], multiplier=0.5)
    assert torch.equal(finished_logits(logits, multiplier=0.5)[-1:], expected)
