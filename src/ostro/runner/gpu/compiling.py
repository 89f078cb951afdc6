"""Compiles the kernels that a first step needs, side by side: one after the other they would take most of the start.

Each is launched once on scratch of the shapes that it will see; Triton keeps what it compiles, on disk too. What is not
listed here is compiled when it is first needed.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from ostro.kernels.gpu.decode_attention import DecodeScratch, decode_attention, plan_decode
from ostro.kernels.gpu.mlp import gated
from ostro.kernels.gpu.norm import add_rms_norm
from ostro.kernels.gpu.prefill_attention import prefill_attention
from ostro.kernels.gpu.rope_store import rope_store, rotation_table
from ostro.kernels.gpu.sampling import SamplerTables, sample_tokens
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.step_inputs import FIELDS, unpack
from ostro.models.decoder import CausalLM, PreNormLayer
from ostro.models.layers import HeadNorm

_THREADS = 16
# A prompt's step and a single token's differ in how kernels are cut.
_ROWS = (1, 256)


def compile_kernels(model: CausalLM, layer: PreNormLayer, scratch: DecodeScratch, *, overlaps: bool) -> None:
    """For a model whose layers are like `layer`."""
    with ThreadPoolExecutor(_THREADS) as threads:
        for done in [threads.submit(_on_a_stream, job) for job in _jobs(model, layer, scratch, overlaps)]:
            done.result()
    torch.cuda.synchronize()


def _on_a_stream(job: Callable[[], object]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        job()


def _jobs(model: CausalLM, layer: PreNormLayer, scratch: DecodeScratch, pdl: bool) -> Iterator[Callable[[], object]]:
    shape, attention, mlp, spec = model.shape, layer.self_attn, layer.mlp, layer.self_attn.spec
    like = attention.qkv_proj.weight
    heads, kv_heads, dim, size = shape.num_heads, shape.num_kv_heads, shape.head_dim, scratch.page_size
    inner = mlp.down_proj.weight.shape[1]
    device = like.device
    keys, values = like.new_zeros(2, 1, kv_heads, size, dim)
    tables = torch.zeros(256, -(-shape.max_seq_len // size), dtype=torch.int32, device=device)
    frequencies = torch.zeros(dim // 2, device=device)
    norm = attention.qk_norm
    head_norm = (norm.weight, norm.eps) if isinstance(norm, HeadNorm) else None
    weight, eps = layer.input_layernorm.weight, layer.input_layernorm.eps

    # The slowest first.
    q = like.new_zeros(256, (heads + 2 * kv_heads) * dim)[:, : heads * dim].unflatten(1, (heads, dim))
    out = torch.zeros(q.shape, dtype=q.dtype, device=device)
    tiles = torch.zeros(1, 4, dtype=torch.int32, device=device)
    yield partial(prefill_attention, q, keys, values, tables, tiles, out, spec)
    yield partial(decode_attention, q[:1], keys, values, tables, scratch, out[:1], spec)
    logits = like.new_zeros(1, shape.vocab_size)
    tokens, errors = tiles[0], torch.zeros(4, dtype=torch.int8, device=device)
    sampler = SamplerTables(1, shape.vocab_size, device)
    nobody = torch.full((1,), -1, dtype=torch.int32, device=device)
    yield partial(sample_tokens, logits, nobody, sampler, tokens, errors, truncated=False, penalties=False)
    row, wide = like.new_zeros(1, shape.hidden_size), like.new_zeros(1, inner)
    attended = like.new_zeros(1, heads * dim)
    folded = (weight, eps)
    yield partial(small_linear, row, like, attention.qkv_proj.bias, norm=folded, pdl=pdl)
    yield partial(small_linear, attended, attention.o_proj.weight, attention.o_proj.bias, residual=row, pdl=pdl)
    gate_up = mlp.gate_up_proj
    yield partial(small_linear, row, gate_up.weight, gate_up.bias, norm=folded, activation="silu", pdl=pdl)
    yield partial(small_linear, wide, mlp.down_proj.weight, mlp.down_proj.bias, residual=row, pdl=pdl)
    if model.lm_head is not None:
        yield partial(small_linear, row, model.lm_head.weight, pdl=pdl)
    for rows in _ROWS:
        x = like.new_zeros(rows, shape.hidden_size)
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
        nowhere = torch.full((rows,), -1, dtype=torch.int64, device=device)
        table = torch.zeros(rows, 2, dim // 2, device=device)
        qkv = like.new_zeros(rows, (heads + 2 * kv_heads) * dim)
        yield partial(rope_store, qkv, table, nowhere, keys, values, norm=head_norm, pdl=pdl)
        yield partial(add_rms_norm, x, None, weight, eps, pdl=pdl)
        yield partial(add_rms_norm, x, x.clone(), weight, eps, pdl=pdl)
        yield partial(gated, like.new_zeros(rows, 2 * inner), "silu", pdl=pdl)
        yield partial(rotation_table, positions, frequencies)
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    yield partial(plan_decode, lens, scratch, spec.window)
    yield partial(unpack, torch.zeros(FIELDS, 1, dtype=torch.int32, device=device), lens)
