"""Compiles the kernels that steps will need, in parallel: sequentially, they would dominate startup, and compiled on
demand, they would delay the first request. If it is not known yet which matmuls are our own, measures that first.

Each is launched once on scratch tensors of its later shapes; Triton caches the result, also on disk. As a rule it is
there already: `precompiling` has the same launches compiled in other processes while weights are loaded. Kernels not
listed here are compiled on first use.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ostro.backends.cuda.attention import AttentionWorkspace
from ostro.backends.cuda.choices import Choices, Gpu, choose, conceivable, keep, known
from ostro.backends.cuda.fused import FusedDecoder, folds
from ostro.backends.cuda.layer_plan import (
    AttentionPlan,
    CpuMixturePlan,
    GpuMixturePlan,
    LayerPlan,
    MixturePlan,
    kinds,
    norm_weights,
)
from ostro.backends.cuda.measuring import DeviceClock, l2_cache_bytes, this_gpu
from ostro.backends.cuda.projections import (
    Fp8Linear,
    FusedMatmul,
    PackedLinear,
    large_matmul,
    matmul_of,
    own_tiling,
    small_matmul,
)
from ostro.backends.cuda.shared_prefixes import PrefixLimits
from ostro.kernels.gpu.decode_attention import (
    DecodeScratch,
    decode_attention,
    plan_decode,
    plan_sizes,
)
from ostro.kernels.gpu.dot_linear import arrival_counters
from ostro.kernels.gpu.experts import Ending, Shared, add_up, inner_rows, outer_rows
from ostro.kernels.gpu.fp8 import quantize_rows
from ostro.kernels.gpu.handover import hand_over
from ostro.kernels.gpu.logits import finished_logits
from ostro.kernels.gpu.mlp import activated
from ostro.kernels.gpu.norm import NormWeights, add_norm
from ostro.kernels.gpu.packed import MOST_FEW
from ostro.kernels.gpu.prefill_attention import prefill_attention
from ostro.kernels.gpu.prefix_attention import GROUP_ARRAYS
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Delta, Prologue
from ostro.kernels.gpu.rope_store import QKNormWeights, rope_store, rotation_table
from ostro.kernels.gpu.routing import Routed, by_expert, empty_tiles, route, tile_height
from ostro.kernels.gpu.sampling import SamplerTables, sample_tokens
from ostro.kernels.gpu.signatures import digest_sources
from ostro.kernels.gpu.single_experts import single_inner, single_outer
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.step_inputs import FIELDS, unpack
from ostro.kernels.gpu.tilings import Matmul, Tiling, binary_of
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.layers import Linear, Matrix
from ostro.torch_models.rope import Rotary

_THREADS = 16
# Kernels are tiled differently for a single token, a batch of them, and prompts.
_TOKENS = (1, 256, 2048)
# Each of these numbers of rows has its own small-batch matmul kernel.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# These row counts cover every height that tiles of experts can have.
_MIXED_ROWS = tuple(1 << power for power in range(1, 15))
# The sampler likewise has one kernel for few rows and one for many.
_SAMPLED = (1, 32)

Job: TypeAlias = Callable[[], object]
Jobs: TypeAlias = Iterator[Job]

_log = logging.getLogger(__name__)


def compile_kernels(decoder: FusedDecoder, attention: AttentionWorkspace, kernel_choices: str) -> None:
    """Decides which of the decoder's matmuls are our own, as `EngineConfig.kernel_choices` says, and compiles what its
    steps will need.
    """
    device = attention.scratch.arrived.device
    gpu, compiler = this_gpu(device), Compiler(decoder, attention)
    decoder.choices = _known(decoder, kernel_choices, gpu)
    unknown = _to_measure(decoder, decoder.choices, kernel_choices)
    if not unknown:
        compiler.compile(decoder.choices)
        return
    clock = _clock(decoder, cache_bytes=l2_cache_bytes(device))
    compiler.compile(decoder.choices, clock.trials(unknown, gpu))
    started = time.monotonic()
    measured = choose(unknown, gpu, clock)
    _log.info("measured kernels for %d matmuls in %.1f s", len(unknown), time.monotonic() - started)
    for each in unknown:
        _log.info("our own kernel computes %s for %s rows", each, measured.own_rows(each))
    keep(measured, gpu)
    decoder.choices |= measured
    compiler.compile_matmuls(decoder.choices)


def launches(decoder: FusedDecoder, attention: AttentionWorkspace, kernel_choices: str, gpu: Gpu) -> list[Job]:
    """What `compile_kernels` launches on this GPU, whatever it will choose."""
    compiler, choices = Compiler(decoder, attention), _known(decoder, kernel_choices, gpu)
    unknown = _to_measure(decoder, choices, kernel_choices)
    if not unknown:
        return compiler.launches(choices)
    found = compiler.launches(choices, _clock(decoder).trials(unknown, gpu))
    for each in conceivable(unknown, gpu):
        found += compiler.matmul_launches(choices | each)
    return found


def _known(decoder: FusedDecoder, kernel_choices: str, gpu: Gpu) -> Choices:
    return known(kernel_choices, gpu).of(decoder.matmuls)


def _to_measure(decoder: FusedDecoder, choices: Choices, kernel_choices: str) -> list[Matmul]:
    return [each for each in decoder.matmuls if each not in choices] if kernel_choices == "auto" else []


def _clock(decoder: FusedDecoder, cache_bytes: int = 0) -> DeviceClock:
    activation = decoder.layers[0].mlp.activation
    return DeviceClock(decoder.matmuls, activation, overlaps=decoder.overlaps, cache_bytes=cache_bytes)


class Compiler:
    """Compiles for layers whose matrices have the same shapes."""

    def __init__(self, decoder: FusedDecoder, attention: AttentionWorkspace) -> None:
        self._model, self._layers, self._scratch = decoder.model, decoder.layers, attention.scratch
        self._kv_dtype = attention.pages.memory.dtype
        self._overlaps, self._leads_from_attention = decoder.overlaps, decoder.leads_from_attention
        # One row of the residual stream.
        self._like = self._model.body.embed_tokens.weight[0]

    def compile(self, choices: Choices, trials: Iterable[Job] = ()) -> None:
        """All kernels that steps need with these choices, and what `trials` run."""
        self._run(self.launches(choices, trials))

    def launches(self, choices: Choices, trials: Iterable[Job] = ()) -> list[Job]:
        """The launches that `compile` runs."""
        model, layers, scratch, like = self._model, self._layers, self._scratch, self._like
        pages = like.new_zeros(
            2, 1, model.shape.num_kv_heads, scratch.page_size, model.shape.head_dim, dtype=self._kv_dtype
        )
        # The slowest to compile first.
        return [
            *_sampler(model, like),
            *_attention(model, layers, scratch, like, pages, pdl=self._overlaps, leads=self._leads_from_attention),
            *_matmuls(model, layers, like, self._overlaps, choices),
            *_mixtures(layers, like, self._overlaps),
            *trials,
            *_between(model, layers, like, pages, self._overlaps),
        ]

    def compile_matmuls(self, choices: Choices) -> None:
        """Compiles what other choices need in addition."""
        self._run(self.matmul_launches(choices))

    def matmul_launches(self, choices: Choices) -> list[Job]:
        """The launches that `compile_matmuls` runs."""
        return [*_matmuls(self._model, self._layers, self._like, self._overlaps, choices)]

    def _run(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        # The scratch is written on this stream and read on others.
        torch.cuda.synchronize()
        digest_sources()
        # First a quick one alone: otherwise all threads would compute at once what Triton finds out about itself.
        *others, quick = jobs
        _on_a_stream(quick)
        with ThreadPoolExecutor(_THREADS) as threads:
            for done in [threads.submit(_on_a_stream, job) for job in others]:
                done.result()
        torch.cuda.synchronize()
        # Here kernels ran concurrently, as they never do later, and may have left arrival counters in a wrong state.
        with torch.inference_mode():
            arrival_counters(self._like.device).zero_()
            self._scratch.arrived.zero_()


def _on_a_stream(job: Job) -> None:
    stream = torch.cuda.Stream()
    # Any CUDA call initialises the device context in a new thread. A kernel launch would too, but tensor descriptors
    # are created before it.
    stream.synchronize()
    with torch.cuda.stream(stream), torch.inference_mode():
        job()


def _attention(
    model: Decoder,
    layers: Sequence[LayerPlan],
    scratch: DecodeScratch,
    like: Tensor,
    pages: Tensor,
    *,
    pdl: bool,
    leads: bool,
) -> Jobs:
    shape = model.shape
    # The maximum number of rows for any of the concurrent plans below.
    rows, heads, dim = scratch.max_rows, shape.num_heads, shape.head_dim
    keys, values = pages
    groups, least = _integers(like, GROUP_ARRAYS, rows), PrefixLimits().rows
    tables = _integers(like, rows, -(-shape.max_seq_len // scratch.page_size))
    q = like.new_zeros(rows, (heads + 2 * shape.num_kv_heads) * dim)[:, : heads * dim].unflatten(1, (heads, dim))
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    attentions = _attentions(layers)
    specs, sinks = [attention.spec for attention in attentions], attentions[0].sinks if attentions else None
    for spec in {(spec.window is None, spec.softcap is None): spec for spec in specs}.values():
        yield partial(prefill_attention, q, keys, values, tables, _integers(like, 1, 4), out, spec, sinks=sinks)
        decode = partial(decode_attention, pdl=pdl, leads=leads)
        # Few rows have a kernel of their own.
        for number in sorted({1, rows}):
            yield partial(decode, q[:number], keys, values, tables, scratch, out[:number], spec, sinks)
        if spec.window is None and scratch.prefix is not None:
            yield partial(decode, q, keys, values, tables, scratch, out, spec, sinks, groups=groups)
    for window in {spec.window is None: spec.window for spec in specs}.values():
        for size in plan_sizes(scratch.max_rows):
            lens = _integers(like, min(size, scratch.max_rows))
            yield partial(plan_decode, lens, scratch, window)
            if window is None and scratch.prefix is not None and len(lens) >= least:
                yield partial(plan_decode, lens, scratch, groups=groups)
    yield partial(unpack, _integers(like, FIELDS, 1), _integers(like, 1))


def _attentions(layers: Sequence[LayerPlan]) -> list[AttentionPlan]:
    return [layer.attention for layer in layers if layer.attention is not None]


def _half(model: Decoder, attention: AttentionPlan) -> int | None:
    """Half the numbers of a head that are rotated: each with one of the other half."""
    if attention.rope is None:
        return None
    rope = [rope for rope in model.body.ropes if isinstance(rope, Rotary)][attention.rope]
    return len(rope.frequencies) // 2


def _sampler(model: Decoder, like: Tensor) -> Jobs:
    tables = SamplerTables(1, model.shape.vocab_size, like.device)
    # As `finished_logits` returns them.
    dtype = like.dtype if model.logit_softcap is None else torch.float32
    for rows in _SAMPLED:
        logits, nobody = like.new_zeros(rows, model.shape.vocab_size, dtype=dtype), _integers(like, rows).fill_(-1)
        errors = torch.zeros(rows, dtype=torch.int8, device=like.device)
        for truncated in (True, False):
            sample = partial(sample_tokens, logits, nobody, tables, _integers(like, rows), errors)
            yield partial(sample, truncated=truncated, penalties=False)


def _matmuls(model: Decoder, layers: Sequence[LayerPlan], like: Tensor, pdl: bool, choices: Choices) -> Jobs:
    """Launches of our own matmuls, each kernel once."""
    done: set[tuple[object, ...]] = set()
    for layer in _by_form(layers):
        yield from _layer_matmuls(model, layer, like, pdl, choices, done)


def _by_form(layers: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    """The first layer of each kind and with each form of weights: a file may mix forms freely."""
    found = {
        (type(layer.mixer), type(layer.mlp), *(_form(each.linear) for each in layer.matmuls)): layer
        for layer in reversed(layers)
    }
    return tuple(found.values())


def _form(matrix: Matrix) -> tuple[object, ...]:
    """What kernels are compiled for, besides shapes."""
    if isinstance(matrix, PackedLinear):
        packed = matrix.packed_weight
        return packed.bits, packed.group, packed.has_minimum
    return (matrix.weight.dtype,)


def _layer_matmuls(
    model: Decoder, layer: LayerPlan, like: Tensor, pdl: bool, choices: Choices, done: set[tuple[object, ...]]
) -> Jobs:
    """Launches of one layer's matmuls that are not `done` yet."""

    def chosen(matrix: Matrix, matmul: Matmul, rows: int, *, normed: bool = False) -> Tiling | None:
        """The tiling of our own kernel; None also if another matmul or a smaller number of rows has compiled it
        already. `normed` if a norm is part of it.
        """
        tiling = own_tiling(matrix, matmul, rows, choices)
        if tiling is None:
            return None
        bias = isinstance(matrix, Linear) and matrix.bias is not None
        key = (*binary_of(matmul, rows, tiling), _form(matrix), bias, normed)
        if key in done:
            return None
        done.add(key)
        return tiling

    (first, *beside), reads = layer.mixer.reads, layer.mlp.reads
    adds = [*layer.mixer.writes, *(each for each in layer.mlp.matmuls if each not in reads)]
    head = model.lm_head
    for rows in _ROWS:
        x, normed = like.new_zeros(rows, len(like)), folds(layer, first, rows, choices)
        if (tiling := chosen(first.linear, first.key, rows, normed=normed)) is not None:
            prologue = layer.attention_prologue if normed else NO_PROLOGUE
            yield partial(small_matmul, first, x, prologue, tiling=tiling, pdl=pdl)
            if normed and layer.mlp_post_norm is not None:
                # All layers but the first have a delta to add.
                prologue = _with_delta(prologue, x, layer.mlp_post_norm, layer)
                yield partial(small_matmul, first, x, prologue, tiling=tiling, pdl=pdl)
        for each in beside:
            if (tiling := chosen(each.linear, each.key, rows, normed=normed)) is not None:
                prologue = layer.attention_prologue if normed else NO_PROLOGUE
                yield partial(small_matmul, each, x, prologue, tiling=tiling, pdl=pdl)
        # All layers but the first then read what the norm's kernel has added up.
        apart = normed and _is_pending(adds[-1], rows, choices)
        if apart and (tiling := chosen(first.linear, first.key, rows)) is not None:
            yield partial(small_matmul, first, x, tiling=tiling, pdl=pdl)
        for each in reads:
            normed = folds(layer, each, rows, choices) and not _is_pending(layer.mixer.writes[-1], rows, choices)
            if (tiling := chosen(each.linear, each.key, rows, normed=normed)) is not None:
                prologue = layer.mlp_prologue if normed else NO_PROLOGUE
                # The first to read the stream adds to it.
                if normed and each is reads[0] and layer.attention_post_norm is not None:
                    prologue = _with_delta(prologue, x, layer.attention_post_norm, layer)
                yield partial(small_matmul, each, x, prologue, tiling=tiling, pdl=pdl)
        for each in adds:
            if (tiling := chosen(each.linear, each.key, rows)) is not None:
                read = like.new_zeros(rows, each.key.in_features)
                yield partial(
                    small_matmul, each, read, residual=x if each.epilogue.adds else None, tiling=tiling, pdl=pdl
                )
        if head is not None and (tiling := chosen(head, matmul_of(head), rows)) is not None:
            yield partial(small_linear, x, head.weight, tiling=tiling, pdl=pdl)


def _is_pending(matmul: FusedMatmul, rows: int, choices: Choices) -> bool:
    """Whether what a matmul adds to the stream waits for the next norm's kernel, as the library cannot add it."""
    return matmul.epilogue.adds and matmul.tiling(rows, choices) is None


def _with_delta(prologue: Prologue, x: Tensor, norm: NormWeights, layer: LayerPlan) -> Prologue:
    return Prologue(prologue.norm, Delta(x.clone(), norm, layer.multiplier), x.clone())


def _between(model: Decoder, layers: Sequence[LayerPlan], like: Tensor, pages: Tensor, pdl: bool) -> Jobs:
    shape = model.shape
    keys, values = pages
    for mlp in filter(None, (layer.mlp.dense for layer in kinds(layers))):
        yield partial(activated, like.new_zeros(1, mlp.up.key.out_features), mlp.activation, gated=mlp.gated, pdl=pdl)
    matmuls = [each for layer in _by_form(layers) for each in layer.matmuls]
    # The inputs of 8-bit weights, if there are many rows.
    for width in {each.key.in_features for each in matmuls if isinstance(each.linear, Fp8Linear)}:
        yield partial(quantize_rows, like.new_zeros(1, width), pdl=pdl)
    # Packed weights without an epilogue, and with more rows than are multiplied packed.
    done = set()
    for each in matmuls:
        matrix = each.linear
        for rows in (*_ROWS, MOST_FEW + 1) if isinstance(matrix, PackedLinear) else ():
            key = matrix.shape, _form(matrix), matrix.bias is None, rows
            if each.tiling(rows, Choices()) is None and key not in done:
                done.add(key)
                yield partial(large_matmul, each, like.new_zeros(rows, each.key.in_features), pdl=pdl)
    # By how many numbers of a head are rotated together.
    norms: dict[int | None, QKNormWeights | None] = {}
    attentions = _attentions(layers)
    for attention in attentions:
        norms[_half(model, attention)] = attention.norm
    for tokens in _TOKENS:
        x = like.new_zeros(tokens, len(like))
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        qkv = like.new_zeros(tokens, width)
        positions = torch.zeros(tokens, dtype=torch.int64, device=like.device)
        nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=like.device)
        for half, norm in norms.items():
            table = None if half is None else x.new_zeros(tokens, 2, half, dtype=torch.float32)
            yield partial(rope_store, qkv, table, nowhere, keys, values, norm=norm, pdl=pdl)
            if half is not None:
                yield partial(rotation_table, positions, x.new_zeros(half, dtype=torch.float32))
        yield from _norms(layers[0], norm_weights(model.body.norm), x, pdl)
    if model.logit_scale != 1.0 or model.logit_softcap is not None:
        logits = like.new_zeros(1, shape.vocab_size)
        yield partial(finished_logits, logits, multiplier=model.logit_scale, softcap=model.logit_softcap)


def _norms(first: LayerPlan, last: NormWeights, x: Tensor, pdl: bool) -> Jobs:
    """Each variant of what happens between two matmuls: nothing to add, or something, which may be normed first."""
    added = [
        (first.attention_post_norm, first.mlp_norm),
        (first.mlp_post_norm, first.attention_norm),
        (first.mlp_post_norm, last),
    ]
    if first.parallel:
        # Attention's result and the MLP's, which are added up before.
        yield partial(add_norm, x, x.clone(), None, pdl=pdl)
    for norm in {norm and norm.kind: norm for _, norm in added}.values():
        yield partial(add_norm, x, None, norm, pdl=pdl)
    for after, norm in {(after and after.kind, norm and norm.kind): (after, norm) for after, norm in added}.values():
        yield partial(add_norm, x, x.clone(), norm, delta_norm=after, multiplier=first.multiplier, pdl=pdl)


def _mixtures(layers: Sequence[LayerPlan], like: Tensor, pdl: bool) -> Jobs:
    """Launches of the kernels of mixtures of experts. `like` is a row of the residual stream."""
    for layer in kinds(layers):
        if isinstance(layer.mlp, GpuMixturePlan):
            yield from _mixture(layer.mlp, layer, like, pdl)
        elif isinstance(layer.mlp, CpuMixturePlan):
            yield from _cpu_mixture(layer.mlp, layer, like, pdl)


def _ending(mixture: MixturePlan, layer: LayerPlan, x: Tensor, logits: Tensor) -> Ending:
    gate = logits[:, mixture.count] if mixture.gates_shared else None
    shared = None if mixture.shared is None else Shared(x, gate)
    return Ending(shared, x.clone(), layer.multiplier) if layer.mlp_post_norm is None else Ending(shared)


def _cpu_mixture(mixture: CpuMixturePlan, layer: LayerPlan, like: Tensor, pdl: bool) -> Jobs:
    chosen, x = mixture.chosen, like.new_zeros(1, len(like))
    logits = like.new_zeros(1, mixture.router.key.out_features)
    yield partial(route, logits, mixture.count, chosen, normalized=mixture.normalized, pdl=pdl)
    routed = Routed(_integers(like, 1, chosen), like.new_zeros(1, chosen, dtype=torch.float32))
    sums, slots = x.float(), torch.zeros(1, dtype=torch.int64, device=like.device)
    yield partial(hand_over, x, routed, slots, sums.new_zeros(1, len(like) + 2 * chosen))
    yield partial(add_up, sums, None, _ending(mixture, layer, x, logits), dtype=like.dtype)


def _mixture(mixture: GpuMixturePlan, layer: LayerPlan, like: Tensor, pdl: bool) -> Jobs:
    count, chosen, inner = mixture.count, mixture.chosen, mixture.down.weight.shape[2]
    x, logits = like.new_zeros(1, len(like)), like.new_zeros(1, mixture.router.key.out_features)
    ending = _ending(mixture, layer, x, logits)
    norm = layer.mlp_norm if layer.folds else None
    yield partial(single_inner, x, logits, mixture.up, chosen, mixture.activation, norm=norm, pdl=pdl)
    rows = like.new_zeros(chosen, inner)
    yield partial(single_outer, rows, logits, mixture.down, normalized=mixture.normalized, ending=ending, pdl=pdl)
    yield partial(route, logits, count, chosen, normalized=mixture.normalized, pdl=pdl)
    routed = Routed(_integers(like, 1, chosen), like.new_zeros(1, chosen, dtype=torch.float32))
    yield partial(add_up, like.new_zeros(chosen, len(like)), routed, ending, pdl=pdl)
    heights = {tile_height(rows * chosen, count): rows for rows in reversed(_MIXED_ROWS)}
    for height, number in heights.items():
        # A list without tiles, so that nothing is multiplied.
        tiles = empty_tiles(like.device, number * chosen, count, height)
        x = like.new_zeros(number, len(like))
        yield partial(inner_rows, x, mixture.up, tiles, chosen, mixture.activation, pdl=pdl)
        yield partial(outer_rows, like.new_zeros(number * chosen, inner), mixture.down, tiles, pdl=pdl)
    for number in _MIXED_ROWS:
        yield partial(by_expert, _integers(like, number, chosen), count, tile_height(number * chosen, count), pdl=pdl)


def _integers(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=like.device)
