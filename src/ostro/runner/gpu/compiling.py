"""Compiles the kernels that steps will need, in parallel: sequentially, they would dominate startup, and compiled on
demand, they would delay the first request.

Each is launched once on scratch tensors of its later shapes; Triton caches the result, also on disk. Kernels not listed
here are compiled on first use.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from ostro.kernels.gpu.decode_attention import DecodeScratch, decode_attention, plan_decode
from ostro.kernels.gpu.dot_linear import arrival_counters
from ostro.kernels.gpu.mlp import gated
from ostro.kernels.gpu.norm import add_rms_norm
from ostro.kernels.gpu.prefill_attention import prefill_attention
from ostro.kernels.gpu.rope_store import rope_store, rotation_table
from ostro.kernels.gpu.sampling import SamplerTables, sample_tokens
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.step_inputs import FIELDS, unpack
from ostro.runner.gpu.layers import FusedLayer
from ostro.runner.gpu.projections import small_product
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.layers import HeadNorm, Linear

_THREADS = 16
# Kernels are tiled differently for a single token, a batch of them, and prompts.
_TOKENS = (1, 256, 2048, 4096)
# Each of these numbers of rows has its own small-batch matmul kernel.
_ROWS = (1, 2, 4, 16, 32, 64, 128)
# The sampler likewise has one kernel for few rows and one for many.
_SAMPLED = (1, 32)

Jobs = Iterator[Callable[[], object]]


def compile_kernels(
    model: Decoder,
    layer: FusedLayer,
    scratch: DecodeScratch,
    *,
    overlaps: bool,
    attends_ahead: bool,
    few: int,
) -> None:
    """For a model whose layers are like `layer`, using our own matmuls for up to `few` rows."""
    like = layer.attention_norm.weight
    # The slowest to compile first.
    jobs = [
        *_attention(model, layer, scratch, like, attends_ahead),
        *_sampler(model, like),
        *_products(model, layer, like, overlaps, few),
        *_between(model, layer, scratch, like, overlaps),
    ]
    # The scratch is written on this stream and read on others.
    torch.cuda.synchronize()
    with ThreadPoolExecutor(_THREADS) as threads:
        for done in [threads.submit(_on_a_stream, job) for job in jobs]:
            done.result()
    torch.cuda.synchronize()
    # Running concurrently, as they never do later, kernels may have left arrival counters in a wrong state.
    with torch.inference_mode():
        arrival_counters(like.device).zero_()
        scratch.arrived.zero_()


def _on_a_stream(job: Callable[[], object]) -> None:
    stream = torch.cuda.Stream()
    # Any CUDA call initialises the device context in a new thread. A kernel launch would too, but tensor descriptors
    # are created before it.
    stream.synchronize()
    with torch.cuda.stream(stream), torch.inference_mode():
        job()


def _attention(model: Decoder, layer: FusedLayer, scratch: DecodeScratch, like: Tensor, pdl: bool) -> Jobs:
    shape, spec = model.shape, layer.attention.spec
    # The maximum number of rows for any of the concurrent plans below.
    rows, heads, dim = scratch.max_rows, shape.num_heads, shape.head_dim
    keys, values = like.new_zeros(2, 1, shape.num_kv_heads, scratch.page_size, dim)
    tables = _integers(like, rows, -(-shape.max_seq_len // scratch.page_size))
    q = like.new_zeros(rows, (heads + 2 * shape.num_kv_heads) * dim)[:, : heads * dim].unflatten(1, (heads, dim))
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    yield partial(prefill_attention, q, keys, values, tables, _integers(like, 1, 4), out, spec)
    yield partial(decode_attention, q, keys, values, tables, scratch, out, spec, pdl=pdl)
    rows = 1
    while rows <= scratch.max_rows:
        yield partial(plan_decode, _integers(like, rows), scratch, spec.window)
        rows *= 2
    yield partial(unpack, _integers(like, FIELDS, 1), _integers(like, 1))


def _sampler(model: Decoder, like: Tensor) -> Jobs:
    tables = SamplerTables(1, model.shape.vocab_size, like.device)
    for rows in _SAMPLED:
        logits, nobody = like.new_zeros(rows, model.shape.vocab_size), _integers(like, rows) - 1
        errors = torch.zeros(rows, dtype=torch.int8, device=like.device)
        for truncated in (True, False):
            sample = partial(sample_tokens, logits, nobody, tables, _integers(like, rows), errors)
            yield partial(sample, truncated=truncated, penalties=False)


def _products(model: Decoder, layer: FusedLayer, like: Tensor, pdl: bool, few: int) -> Jobs:
    attention, mlp, norm = layer.attention, layer.mlp, layer.attention_norm
    for rows in (most for most in _ROWS if most <= few):
        folded = (norm.weight, norm.eps) if rows == 1 else None
        x = like.new_zeros(rows, len(like))
        attended, inner = (like.new_zeros(rows, each.weight.shape[1]) for each in (attention.o_proj, mlp.down_proj))
        yield partial(small_product, attention.qkv_proj, x, norm=folded, pdl=pdl)
        yield partial(small_product, attention.o_proj, attended, residual=_residual(attention.o_proj, x), pdl=pdl)
        yield partial(small_product, mlp.gate_up_proj, x, norm=folded, activation=layer.activation, pdl=pdl)
        yield partial(small_product, mlp.down_proj, inner, residual=_residual(mlp.down_proj, x), pdl=pdl)
        if model.lm_head is not None:
            yield partial(small_linear, x, model.lm_head.weight, pdl=pdl)


def _residual(layer: Linear, x: Tensor) -> Tensor | None:
    """What the kernel adds to: nothing if the ranks' results are summed up first."""
    return x if layer.reduce is None else None


def _between(model: Decoder, layer: FusedLayer, scratch: DecodeScratch, like: Tensor, pdl: bool) -> Jobs:
    shape, norm, head_norm = model.shape, layer.attention_norm, layer.attention.qk_norm
    half = shape.head_dim // 2
    keys, values = like.new_zeros(2, 1, shape.num_kv_heads, scratch.page_size, shape.head_dim)
    scale = (head_norm.weight, head_norm.eps) if isinstance(head_norm, HeadNorm) else None
    yield partial(gated, like.new_zeros(1, 2 * layer.mlp.down_proj.weight.shape[1]), layer.activation, pdl=pdl)
    for tokens in _TOKENS:
        x = like.new_zeros(tokens, len(like))
        qkv = like.new_zeros(tokens, layer.attention.qkv_proj.weight.shape[0])
        positions = torch.zeros(tokens, dtype=torch.int64, device=like.device)
        frequencies, table = x.new_zeros(half, dtype=torch.float32), x.new_zeros(tokens, 2, half, dtype=torch.float32)
        yield partial(rope_store, qkv, table, positions - 1, keys, values, norm=scale, pdl=pdl)
        yield partial(add_rms_norm, x, None, norm.weight, norm.eps, pdl=pdl)
        yield partial(add_rms_norm, x, x.clone(), norm.weight, norm.eps, pdl=pdl)
        yield partial(rotation_table, positions, frequencies)


def _integers(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=like.device)
