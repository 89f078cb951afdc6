"""How decode attention divides its work: the default tuning against the former one, and a sweep around both.

    python bench/kernels/decode_splits.py                       # all shapes, in less than three minutes
    python bench/kernels/decode_splits.py gemma-window          # shapes whose names begin so
    python bench/kernels/decode_splits.py --candidates          # a few tunings on every shape, long contexts included

The sweep is over parts per multiprocessor, keys in a block and, where programs process several parts each, one program
per part. Tunings that lead to the same work are timed once. Every tuning's result is
checked against the fp32 twin; then all are timed by turns, as replays of a graph over caches that together do not fit
in L2, and the least of five turns counts. TB/s counts the keys and values that a row sees.
"""

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from attention import mid_lengths
from torch import Tensor

from ostro.kernels.gpu.decode_attention import (
    DecodeScratch,
    DecodeTuning,
    decode_attention,
    plan_decode,
    reference_attention,
)
from ostro.kernels.gpu.signatures import digest_sources
from ostro.models.architecture import AttentionSpec

PAGE, TABLE_WIDTH = 64, 512
FORMER = DecodeTuning(parts_per_sm=12, resident=3)
ONE_A_PART = 1000
PARTS, BLOCKS, PROGRAMS = (1, 2, 3, 4, 6, 12, 24), (32, 64, 128), (None, ONE_A_PART)
SWEEP = [
    DecodeTuning(block=block, parts_per_sm=parts, programs_per_sm=programs)
    for parts, block, programs in itertools.product(PARTS, BLOCKS, PROGRAMS)
]
# What a default might be. A tuning that is good for some lengths and bad for others is none.
CANDIDATES = [
    DecodeTuning(block=block, parts_per_sm=parts) for block, parts in itertools.product((64, 32), (1, 2, 3, 4, 6, 12))
]
SECONDS = 165.0
TURNS = 5
TOLERANCE = 1e-2
ROTATED_BYTES = 250e6


@dataclass(frozen=True)
class Heads:
    """A layer's attention."""

    queries: int
    keys: int
    dim: int
    window: int | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(scale=self.dim**-0.5, window=self.window)

    @property
    def token_bytes(self) -> int:
        return 2 * 2 * self.keys * self.dim

    def seen(self, lens: Sequence[int]) -> int:
        """Keys that rows of these lengths see."""
        return sum(length if self.window is None else min(length, self.window) for length in lens)


MODELS = {
    "gemma-window": Heads(4, 1, 256, 512),
    "gemma-full": Heads(4, 1, 256),
    "0.6B": Heads(16, 8, 128),
    "8B": Heads(32, 8, 128),
    "1B": Heads(32, 8, 64),
    "olmo": Heads(16, 16, 128),
}
# The lengths in the middle of `single`, `batch8` and `nano`, and of a batch between.
LENGTHS = {"131 ragged": mid_lengths(), "32 x 500": [500] * 32, "8 x 256": [256] * 8, "1 x 384": [384]}


LONG_LENGTHS = {
    "1 x 4k": [4096],
    "1 x 32k": [32_000],
    "2 x 16k": [16_000] * 2,
    "8 x 4k": [4096] * 8,
    "16 x 300": [300] * 16,
    "1 x 32k, 31 x 300": [32_000, *[300] * 31],
    "64 x 2k": [2048] * 64,
    "256 x 700": [500 + 2 * row for row in range(256)],
}


@dataclass(frozen=True)
class Cache:
    keys: Tensor
    values: Tensor
    tables: Tensor


@dataclass
class Variant:
    """A tuning, its work list for some lengths, and its time."""

    tuning: DecodeTuning
    scratch: DecodeScratch
    programs: int
    parts: int
    microseconds: float = float("inf")

    @property
    def work(self) -> tuple[int, int, int]:
        return self.tuning.block, self.parts, min(self.programs, self.parts * self.scratch.tiles)

    def __str__(self) -> str:
        tuning = self.tuning
        each = ", one a part" if tuning.programs_per_sm else ""
        return f"parts {tuning.parts_per_sm} block {tuning.block}{each}: {self.parts} parts"


def a_cache(lens: Sequence[int], heads: Heads) -> Cache:
    pages = [-(-length // PAGE) for length in lens]
    order = torch.randperm(sum(pages), device="cuda").int()
    tables = torch.zeros(len(lens), TABLE_WIDTH, dtype=torch.int32, device="cuda")
    used = 0
    for row, number in enumerate(pages):
        tables[row, :number] = order[used : used + number]
        used += number
    shape = (used, heads.keys, PAGE, heads.dim)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Cache(keys, values, tables)


def variants(lens: Sequence[int], heads: Heads, tunings: Sequence[DecodeTuning]) -> list[Variant]:
    """One for each different list of work, the first of those that lead to it."""
    on_device = torch.tensor(lens, dtype=torch.int32, device="cuda")
    found: dict[tuple[int, int, int], Variant] = {}
    for tuning in tunings:
        scratch = DecodeScratch(
            len(lens), heads.queries, heads.keys, heads.dim, PAGE, torch.device("cuda"), windows=(heads.window,),
            tuning=tuning,
        )  # fmt: skip
        plan_decode(on_device, scratch, heads.window)
        variant = Variant(tuning, scratch, scratch.programs(len(lens), 2), int(scratch.counts[heads.window]))
        found.setdefault(variant.work, variant)
    return list(found.values())


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def replay_milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    graph.replay()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after))


def time_all(lens: Sequence[int], heads: Heads, tunings: Sequence[DecodeTuning]) -> list[Variant]:
    q = torch.randn(len(lens), heads.queries, heads.dim, device="cuda", dtype=torch.bfloat16)
    size = sum(-(-length // PAGE) * PAGE for length in lens) * heads.token_bytes
    caches = [a_cache(lens, heads) for _ in range(min(64, int(ROTATED_BYTES // size) + 2))]
    first = caches[0]
    twin = partial(reference_attention, spec=heads.spec)
    expected = torch.cat(
        [twin(q[i : i + 1], first.keys, first.values, first.tables[i], at - 1) for i, at in enumerate(lens)]
    )
    repeats = 4 if len(caches) < 16 else 1
    timed: list[tuple[Variant, torch.cuda.CUDAGraph]] = []
    for variant in variants(lens, heads, tunings):
        out = torch.full_like(q, float("nan"))

        def call(cache: Cache, out: Tensor = out, scratch: DecodeScratch = variant.scratch) -> Tensor:
            return decode_attention(q, cache.keys, cache.values, cache.tables, scratch, out, heads.spec)

        error = float((call(first).float() - expected).norm() / expected.norm())
        if not error < TOLERANCE:
            print(f"  {variant}: relative error {error:.2e}", flush=True)
            continue
        timed.append((variant, graph_of([partial(call, cache) for cache in caches] * repeats)))
    for _ in range(TURNS):
        for variant, graph in timed:
            spent = replay_milliseconds(graph) * 1e3 / (repeats * len(caches))
            variant.microseconds = min(variant.microseconds, spent)
    return [variant for variant, _ in timed]


def compile_all(jobs: Sequence[tuple[Sequence[int], Heads]]) -> None:
    """Each kernel once, by threads."""

    def run(lens: Sequence[int], heads: Heads, block: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.synchronize()
        with torch.cuda.stream(stream):
            (variant,) = variants(lens, heads, [replace(FORMER, block=block)])
            q = torch.zeros(len(lens), heads.queries, heads.dim, device="cuda", dtype=torch.bfloat16)
            cache = a_cache(lens, heads)
            decode_attention(q, cache.keys, cache.values, cache.tables, variant.scratch, q.clone(), heads.spec)

    digest_sources()
    # A binary depends on the heads, and a plan's also on whether there are few rows.
    once = {(heads, len(lens) > 32): lens for lens, heads in jobs}
    with ThreadPoolExecutor(16) as threads:
        every = [threads.submit(run, lens, heads, block) for (heads, _), lens in once.items() for block in BLOCKS]
        for done in every:
            done.result()
    torch.cuda.synchronize()


def shown(name: str, lens: Sequence[int], heads: Heads, timed: Sequence[Variant]) -> str:
    """Former, default, then the two best."""
    read = heads.seen(lens) * heads.token_bytes

    def rate(variant: Variant) -> str:
        return f"{variant.microseconds:7.1f} us {read / variant.microseconds / 1e6:5.2f} TB/s"

    former, now = (_of(timed, tuning, lens, heads) for tuning in (FORMER, DecodeTuning()))
    best = sorted(timed, key=lambda each: each.microseconds)[:2]
    gain = former.microseconds / now.microseconds
    return f"{name:24}{rate(former)} | {rate(now)} {gain:5.2f}x | " + " | ".join(
        f"{rate(each)} {former.microseconds / each.microseconds:5.2f}x ({each})" for each in best
    )


def _of(timed: Sequence[Variant], tuning: DecodeTuning, lens: Sequence[int], heads: Heads) -> Variant:
    """The variant that does the work of this tuning."""
    (wanted,) = variants(lens, heads, [tuning])
    return next(each for each in timed if each.work == wanted.work)


def compare(jobs: Mapping[str, tuple[Sequence[int], Heads]]) -> None:
    """How much faster than the former tuning each candidate is."""
    print(f"{'':24} " + " ".join(f"{f'{each.block}/{each.parts_per_sm}':>6}" for each in CANDIDATES))
    for name, (lens, heads) in jobs.items():
        timed = time_all(lens, heads, [FORMER, *CANDIDATES])
        former = _of(timed, FORMER, lens, heads).microseconds
        gains = [former / _of(timed, each, lens, heads).microseconds for each in CANDIDATES]
        print(f"{name:24} " + " ".join(f"{gain:6.2f}" for gain in gains) + f"  former {former:.1f} us", flush=True)
        torch.cuda.empty_cache()


def chosen(names: Sequence[str], lengths: Mapping[str, Sequence[int]]) -> Mapping[str, tuple[Sequence[int], Heads]]:
    pairs = itertools.product(MODELS.items(), lengths.items())
    every = {f"{model} {rows}": (lens, heads) for (model, heads), (rows, lens) in pairs}
    return {name: job for name, job in every.items() if not names or name.startswith(tuple(names))}


def main() -> None:
    started = time.perf_counter()
    torch.manual_seed(int(time.time()))
    names = [each for each in sys.argv[1:] if each != "--candidates"]
    compares = len(names) < len(sys.argv) - 1
    jobs = chosen(names, {**LENGTHS, **LONG_LENGTHS} if compares else LENGTHS)
    compile_all(list(jobs.values()))
    print(f"{torch.cuda.get_device_name()}, compiled after {time.perf_counter() - started:.0f} s", flush=True)
    if compares:
        compare(jobs)
        return
    print(f"{'':24}{'former':21} | {'default':28} | the two best of the sweep", flush=True)
    for name, (lens, heads) in jobs.items():
        tunings = [FORMER, DecodeTuning()]
        if time.perf_counter() - started < SECONDS:
            tunings += SWEEP
        print(shown(name, lens, heads, time_all(lens, heads, tunings)), flush=True)
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
