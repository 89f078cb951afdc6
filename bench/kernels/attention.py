"""Attention kernels on the GPU: checked against their fp32 twin, then timed over a small sweep of their tunables.

python bench/kernels/attention.py [part of a shape's name ...]

Decode is timed by replays of a graph over caches that together do not fit in L2; TB/s counts each visible key and value
once a sequence, so a shared prefix can exceed the memory's bandwidth. `shared` is a prefix that each row reads for
itself, `grouped` one that rows read together. Prefill counts the products below the diagonal.
"""

import itertools
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ostro.kernels.gpu.decode_attention import (
    DecodeScratch,
    DecodeTuning,
    decode_attention,
    plan_decode,
    reference_attention,
)
from ostro.kernels.gpu.prefill_attention import (
    Chunk,
    PrefillTuning,
    prefill_attention,
    prefill_tiles,
    tokens_in_tile,
)
from ostro.kernels.gpu.prefix_attention import PrefixTuning, group_arrays
from ostro.models.architecture import AttentionSpec

Tuning = TypeVar("Tuning", DecodeTuning | PrefixTuning, PrefillTuning)

PAGE = 64
HEAD_DIM = 128
KV_HEADS = 8
SPEC = AttentionSpec(scale=HEAD_DIM**-0.5)
MODELS = {"0.6B": 16, "8B": 32}
SECONDS = 110.0
TOLERANCE = 1e-2
ROTATED_BYTES = 250e6


@dataclass(frozen=True)
class DecodeShape:
    """Lengths of one step; the first `shared` tokens of all rows lie in the same pages."""

    name: str
    lens: Sequence[int]
    shared: int = 0
    grouped: bool = False
    """Whether the rows read the shared tokens together."""


@dataclass(frozen=True)
class PrefillShape:
    """Equal prefill chunks, each after the same number of cached tokens."""

    name: str
    count: int
    start: int
    length: int


@dataclass(frozen=True)
class Timing:
    """One configuration's result: the rate in trillions a second."""

    microseconds: float
    rate: float
    config: str


@dataclass(frozen=True)
class Cache:
    """One layer's keys and values and the pages of each row."""

    keys: Tensor
    values: Tensor
    tables: Tensor


def mid_lengths() -> list[int]:
    draw = random.Random(0)
    return [draw.randint(100, 1600) for _ in range(131)]


DECODE_SHAPES = [
    DecodeShape("mid 131 x 100..1600", mid_lengths()),
    DecodeShape("256 x 1000", [1000] * 256),
    DecodeShape("8 x 256", [256] * 8),
    DecodeShape("1 x 384", [384]),
    DecodeShape("shared 256 x 1600", [1600] * 256, shared=1472),
    DecodeShape("grouped 256 x 1600", [1600] * 256, shared=1472, grouped=True),
    DecodeShape("shared 8 x 1000", [1000] * 8, shared=768),
    DecodeShape("grouped 8 x 1000", [1000] * 8, shared=768, grouped=True),
    DecodeShape("shared 32 x 400", [400] * 32, shared=256),
    DecodeShape("grouped 32 x 400", [400] * 32, shared=256, grouped=True),
]
PREFILL_SHAPES = [
    PrefillShape("prefill 64 x 2048", 64, 0, 2048),
    PrefillShape("prefill 8 x 512 after 1472", 8, 1472, 512),
]

BASE = DecodeTuning()
ONE_A_PART = 1000
# One change at a time from the base, then the pairs that might go together; the most promising first.
DECODE_TUNINGS = [
    BASE,
    replace(BASE, joins_in_place=False),
    replace(BASE, programs_per_sm=3),
    replace(BASE, programs_per_sm=ONE_A_PART),
    replace(BASE, buffers=3),
    replace(BASE, warps=2),
    replace(BASE, block=32),
    replace(BASE, block=32, buffers=4),
    replace(BASE, parts_per_sm=12),
    replace(BASE, parts_per_sm=48),
    replace(BASE, block=32, buffers=3, warps=2, programs_per_sm=ONE_A_PART),
    replace(BASE, block=128, warps=8, buffers=1),
    replace(BASE, buffers=1),
    replace(BASE, parts_per_sm=6, programs_per_sm=3),
]
PREFIX_TUNINGS = [
    PrefixTuning(),
    PrefixTuning(programs_per_sm=1),
    PrefixTuning(queries=128, warps=8, programs_per_sm=1),
    PrefixTuning(queries=128, warps=4, programs_per_sm=1),
    PrefixTuning(buffers=3, programs_per_sm=1),
    PrefixTuning(buffers=1),
    PrefixTuning(buffers=1, programs_per_sm=1),
    PrefixTuning(queries=32),
]
PREFILL_TUNINGS = [
    PrefillTuning(),
    PrefillTuning(rows=64, warps=4, buffers=1),
    PrefillTuning(blocks_a_step=2, buffers=1),
    PrefillTuning(rows=64, warps=4, buffers=2),
    PrefillTuning(descriptors=False),
    PrefillTuning(blocks_a_step=2, buffers=2),
    PrefillTuning(rows=64, warps=4, buffers=1, blocks_a_step=2),
    PrefillTuning(block=128, buffers=1, descriptors=False),
    PrefillTuning(rows=128, warps=4, buffers=1),
    PrefillTuning(buffers=1),
]


def a_cache(lens: Sequence[int], shared: int = 0) -> Cache:
    common = shared // PAGE
    own = [-(-length // PAGE) - common for length in lens]
    order = torch.randperm(common + sum(own), device="cuda").int()
    tables = torch.zeros(len(lens), common + max(own), dtype=torch.int32, device="cuda")
    tables[:, :common] = order[:common]
    used = common
    for row, pages in enumerate(own):
        tables[row, common : common + pages] = order[used : used + pages]
        used += pages
    shape = (used, KV_HEADS, PAGE, HEAD_DIM)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Cache(keys, values, tables)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def checked(error: float) -> None:
    if not error < TOLERANCE:
        raise AssertionError(f"relative error {error:.2e}")


def replay_microseconds(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Median time of one call in a graph of `repeats` rounds of all of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    times: list[float] = []
    for _ in range(9):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / (repeats * len(calls)))
    return statistics.median(times)


def bench_decode(shape: DecodeShape, heads: int, deadline: float) -> list[Timing]:
    rows = len(shape.lens)
    lens = torch.tensor(shape.lens, dtype=torch.int32, device="cuda")
    q = torch.randn(rows, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    first = a_cache(shape.lens, shape.shared)
    size = 2 * first.keys.numel() * first.keys.element_size()
    caches = [first, *(a_cache(shape.lens, shape.shared) for _ in range(min(63, int(ROTATED_BYTES // size) + 1)))]
    expected = torch.cat(
        [
            reference_attention(q[i : i + 1], first.keys, first.values, first.tables[i], length - 1, SPEC)
            for i, length in enumerate(shape.lens)
        ]
    )
    read = sum(shape.lens) * KV_HEADS * HEAD_DIM * 2 * 2

    groups = torch.from_numpy(group_arrays([(range(rows), shape.shared)], rows, BASE.block)).cuda()

    def timed(tuning: DecodeTuning | PrefixTuning) -> Timing:
        together = groups if isinstance(tuning, PrefixTuning) else None
        tunings = {"prefix_tuning": tuning} if isinstance(tuning, PrefixTuning) else {"tuning": tuning}
        scratch = DecodeScratch(rows, heads, KV_HEADS, HEAD_DIM, PAGE, torch.device("cuda"), **tunings)
        plan_decode(lens, scratch, None, together)
        out = torch.full_like(q, float("nan"))

        def call(cache: Cache) -> Callable[[], object]:
            arguments = (q, cache.keys, cache.values, cache.tables, scratch, out, SPEC)
            return lambda: decode_attention(*arguments, groups=together)

        for _ in range(3):  # a race shows as an error that comes and goes
            out.fill_(float("nan"))
            call(first)()
            checked(relative_error(out, expected))
        spent = replay_microseconds([call(cache) for cache in caches], 4 if len(caches) < 16 else 1)
        out.fill_(float("nan"))
        call(first)()
        checked(relative_error(out, expected))
        return Timing(spent, read / spent / 1e6, str(tuning).removeprefix("DecodeTuning"))

    tunings: Sequence[DecodeTuning | PrefixTuning] = PREFIX_TUNINGS if shape.grouped else DECODE_TUNINGS
    return swept(tunings, timed, deadline)


def time_plan(rows: int) -> None:
    lens = torch.full((rows,), 1000, dtype=torch.int32, device="cuda")
    scratch = DecodeScratch(rows, 16, KV_HEADS, HEAD_DIM, PAGE, torch.device("cuda"))
    plan_decode(lens, scratch)
    spent = replay_microseconds([lambda: plan_decode(lens, scratch)], 50)
    print(f"plan of {rows} rows: {spent:.1f} us a step, {int(scratch.counts[None])} parts", flush=True)


def bench_prefill(shape: PrefillShape, heads: int, deadline: float) -> list[Timing]:
    chunks = [Chunk(i, i * shape.length, shape.start, shape.length) for i in range(shape.count)]
    cache = a_cache([shape.start + shape.length] * shape.count)
    q = torch.randn(shape.count * shape.length, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    pairs = shape.count * (shape.start * shape.length + shape.length * (shape.length + 1) / 2)
    operations = 4 * heads * HEAD_DIM * pairs
    expected = torch.empty_like(q)
    for chunk in chunks:
        span = slice(chunk.offset, chunk.offset + chunk.length)
        expected[span] = reference_attention(
            q[span], cache.keys, cache.values, cache.tables[chunk.row], chunk.start, SPEC
        ).bfloat16()

    def timed(tuning: PrefillTuning) -> Timing:
        listed = prefill_tiles(chunks, tokens_in_tile(heads, KV_HEADS, tuning))
        tiles = torch.tensor(listed, dtype=torch.int32, device="cuda")
        out = torch.full_like(q, float("nan"))

        def call() -> Tensor:
            return prefill_attention(q, cache.keys, cache.values, cache.tables, tiles, out, SPEC, tuning)

        call()
        checked(relative_error(out, expected.float()))
        spent = replay_microseconds([call], 3)
        return Timing(spent, operations / spent / 1e6, str(tuning).removeprefix("PrefillTuning"))

    found = swept(PREFILL_TUNINGS, timed, deadline)
    if not shape.start:
        found += library_attention(q, shape, operations)
    return found


def library_attention(q: Tensor, shape: PrefillShape, operations: float) -> list[Timing]:
    """torch's own kernel, over keys that lie in one piece."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return []
    k, v = (torch.randn(q.shape[0], KV_HEADS, HEAD_DIM, device="cuda", dtype=q.dtype) for _ in range(2))
    group = q.shape[1] // KV_HEADS
    ends = torch.arange(shape.count + 1, dtype=torch.int32, device="cuda") * shape.length
    wide = (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    # The signature differs between versions of torch; the first that works is timed.
    for named, own, options in (
        ("grouped", (k, v), {"window_size": (-1, 0), "enable_gqa": True}),
        ("grouped", (k, v), {"is_causal": True}),
        ("repeated", wide, {"window_size": (-1, 0)}),
        ("repeated", wide, {"is_causal": True}),
    ):
        call = partial(varlen_attn, q, *own, ends, ends, shape.length, shape.length, **options)
        try:
            call()
            spent = replay_microseconds([call], 3)
        except Exception as failure:  # noqa: BLE001
            print(f"  varlen_attn, keys {named}: {(str(failure).splitlines() or [''])[0][:100]}", flush=True)
        else:
            return [Timing(spent, operations / spent / 1e6, f" torch varlen_attn, keys {named}")]
    return []


def swept(tunings: Sequence[Tuning], timed: Callable[[Tuning], Timing], deadline: float) -> list[Timing]:
    """Times as many as there is time for."""
    found: list[Timing] = []
    for tuning in tunings:
        if found and time.perf_counter() > deadline:
            print(f"  out of time before {tuning}", flush=True)
            break
        try:
            found.append(timed(tuning))
        except Exception as failure:  # noqa: BLE001 - one configuration may not fit this device
            print(f"  {tuning}: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:160]}", flush=True)
    return found


def main() -> None:
    torch.manual_seed(int(time.time()))
    started = time.perf_counter()
    wanted = sys.argv[1:]
    shapes: list[DecodeShape | PrefillShape] = [*DECODE_SHAPES, *PREFILL_SHAPES]
    jobs = [
        (f"{shape.name} {model}", heads, shape)
        for (model, heads), shape in itertools.product(MODELS.items(), shapes)
        if not wanted or any(part in f"{shape.name} {model}" for part in wanted)
    ]
    print(torch.cuda.get_device_name(), flush=True)
    for rows in (1, 256):
        time_plan(rows)
    for index, (name, heads, shape) in enumerate(jobs):
        now = time.perf_counter()
        # An equal share of what is left, so that what one shape saves the next may spend.
        deadline = now + (started + SECONDS - now) / (len(jobs) - index)
        try:
            if isinstance(shape, DecodeShape):
                unit, found = "TB/s", bench_decode(shape, heads, deadline)
            else:
                unit, found = "TFLOP/s", bench_prefill(shape, heads, deadline)
        except Exception:  # noqa: BLE001 - the other shapes are still worth their numbers
            print(f"{name}: failed\n{traceback.format_exc(limit=3)}", flush=True)
            continue
        torch.cuda.empty_cache()
        best = sorted(found, key=lambda timing: timing.microseconds)
        shown = best[:4] + [timing for timing in best[4:] if "torch" in timing.config]
        for timing in shown:
            print(f"{name}: {timing.microseconds:.1f} us {timing.rate:.2f} {unit}{timing.config}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
