"""Kernels that advance recurrent states, on a GPU: checked against their plain twins in float64, then timed.

    python bench/kernels/recurrent.py [--only singles,chunks] [--shapes 0.8B,9B] [--quick]

Calls are CUDA graphs over so many layers' states that they do not fit the cache; times are µs per call, the median of
several replays. Shares are those of the memory's bandwidth, counting each state as read and written once. Of all
variants, the last table has each line's best.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.errors import TritonError

from ostro.kernels.gpu import delta
from ostro.kernels.gpu.delta import (
    BlockTiling,
    DeltaWeights,
    ScanTiling,
    SinglesTiling,
    delta_chunks,
    delta_plain,
    delta_singles,
)
from ostro.kernels.gpu.state_rows import ChunkTables, KeptState, SingleRows, StateChunk, chunk_tables

GPU, BF16 = "cuda", torch.bfloat16
BANDWIDTH, CACHE, TAPS = 4.8e12, 128 << 20, 4
T = TypeVar("T", bound=tuple[int | None, ...])
FAILURES = (TritonError, RuntimeError, AssertionError)


class Shape(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.values


SHAPES = {"0.8B": Shape(16, 16), "9B": Shape(16, 32), "27B": Shape(16, 48), "35B-A3B": Shape(16, 32)}
ROWS = (1, 8, 32, 64, 256)
CHUNKS = {"512": (512,), "2048": (2048,), "8192": (8192,), "4 x 2048": (2048,) * 4, "64 x 1": (1,) * 64}
SINGLES = [SinglesTiling(*each) for each in ((4, None), (8, None), (8, 128), (16, None))]
SCANS = [
    ScanTiling(*each)
    for each in (
        (32, 8, 4, 3),
        (32, 8, 4, 4),
        (32, 8, 4, 6),
        (32, 4, 4, 4),
        (32, 16, 4, 4),
        (32, 8, 8, 4),
        (16, 8, 4, 4),
        (16, 8, 2, 4),
        (16, 16, 4, 4),
        (16, 4, 2, 4),
        (8, 8, 2, 4),
        (64, 8, 8, 4),
    )
]
BLOCKS = [
    BlockTiling(*each)
    for each in ((64, 4, 4, 2), (64, 8, 4, 2), (64, 4, 4, 1), (64, 4, 4, 3), (32, 4, 4, 2), (128, 8, 8, 2))
]


class Layer(NamedTuple):
    weights: DeltaWeights
    mixed: Tensor
    gates: Tensor
    state: KeptState
    out: Tensor


def layer(shape: Shape, rows: int, slots: int, dtype: torch.dtype = BF16) -> Layer:
    def drawn(*size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device=GPU).mul_(scale).to(dtype)

    heads = shape.value_heads
    weights = DeltaWeights(
        drawn(TAPS, shape.channels, scale=0.5),
        None,
        drawn(heads),
        drawn(heads),
        1 + drawn(shape.value_dim, scale=0.1),
        1e-6,
        False,
    )
    row = drawn(rows, shape.channels + shape.values + 2 * heads, dtype=dtype)
    mixed, gates = row.split_with_sizes((shape.channels + shape.values, 2 * heads), 1)
    matrices = drawn(slots, heads, shape.key_dim, shape.value_dim, scale=0.1)
    state = KeptState(drawn(slots, TAPS, shape.channels, dtype=dtype), matrices)
    return Layer(weights, mixed, gates, state, torch.full((rows, shape.values), torch.nan, dtype=dtype, device=GPU))


def copied(some: Layer) -> Layer:
    """With states of its own."""
    inputs, matrices = some.state
    assert matrices is not None
    return some._replace(state=KeptState(inputs.clone(), matrices.clone()), out=torch.full_like(some.out, torch.nan))


def singles(some: Layer, slots: Sequence[int], positions: Sequence[int], captured: Sequence[int]) -> SingleRows:
    return SingleRows(
        torch.tensor(slots, dtype=torch.int32, device=GPU),
        torch.tensor(positions, dtype=torch.int64, device=GPU),
        torch.tensor(captured, dtype=torch.int32, device=GPU),
    )


def on_device(chunks: Sequence[StateChunk]) -> ChunkTables:
    return ChunkTables(*(torch.from_numpy(own).to(GPU) for own in chunk_tables(chunks)))


def in_a_row(lengths: Iterable[int], position: int = 0) -> list[StateChunk]:
    chunks: list[StateChunk] = []
    first = 0
    for slot, length in enumerate(lengths):
        chunks.append(StateChunk(first, length, slot, position))
        first += length
    return chunks


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def compared(name: str, ours: Layer, theirs: Layer, rounds: bool = False) -> bool:
    """Blocks also round their operands to the model's number format."""
    assert ours.state.matrices is not None
    assert theirs.state.matrices is not None
    out, matrices = error(ours.out, theirs.out), error(ours.state.matrices, theirs.state.matrices)
    inputs = torch.equal(ours.state.inputs, theirs.state.inputs)
    # A NaN is in no range.
    half = ours.out.dtype == BF16
    passed = (
        0 <= out < (5e-3 if half and not rounds else 1e-2 if half else 1e-4)
        and 0 <= matrices < (1e-2 if half and rounds else 1e-4)
        and inputs
    )
    print(f"{name:44} out {out:.1e}, states {matrices:.1e}, inputs {inputs}{'' if passed else '   FAILED'}", flush=True)
    return passed


def check_singles(name: str, shape: Shape, dtype: torch.dtype, tiling: SinglesTiling) -> bool:
    ours = layer(shape, 5, 8, dtype)
    theirs, rows = copied(ours), [(3, 0, -1), (0, 2, 7), (5, 9, -1), (1, 100, 2), (4, 1 << 33, -1)]
    chunks = [
        StateChunk(row, 1, slot, position, ((1, also),) if also >= 0 else ())
        for row, (slot, position, also) in enumerate(rows)
    ]
    delta_plain(theirs.mixed, theirs.gates, theirs.weights, theirs.state, chunks, theirs.out, torch.float64)
    told = singles(ours, *zip(*rows, strict=True))
    delta_singles(ours.mixed, ours.gates, ours.weights, ours.state, told, ours.out, tiling=tiling)
    return compared(f"{name} singles {tuple(tiling)} {dtype}", ours, theirs)


def check_chunks(name: str, shape: Shape, dtype: torch.dtype, tiling: ScanTiling | BlockTiling) -> bool:
    chunks = [
        StateChunk(0, 150, 0, 0, ((1, 5), (64, 6))),
        StateChunk(150, 1, 1, 3),
        StateChunk(151, 2, 2, 1, ((1, 7),)),
        StateChunk(153, 67, 3, 1000),
    ]
    ours = layer(shape, 220, 8, dtype)
    theirs = copied(ours)
    delta_plain(theirs.mixed, theirs.gates, theirs.weights, theirs.state, chunks, theirs.out, torch.float64)
    advance(ours, on_device(chunks), tiling)
    if isinstance(tiling, BlockTiling):
        return compared(f"{name} blocks {tuple(tiling)} {dtype}", ours, theirs, rounds=True)
    passed = compared(f"{name} chunks {tuple(tiling)} {dtype}", ours, theirs)
    return passed and check_cuts(name, shape, dtype, tiling)


def check_cuts(name: str, shape: Shape, dtype: torch.dtype, tiling: ScanTiling) -> bool:
    whole = layer(shape, 150, 8, dtype)
    for cuts in ((1, 2, 3, 64, 65), (75,)):
        cut = copied(whole)
        for first, end in pairwise((0, *cuts, 150)):
            advance(cut, on_device([StateChunk(first, end - first, 0, first, ((1, 6),))]), tiling)
        once = copied(whole)
        advance(once, on_device([StateChunk(0, 150, 0, 0)]), tiling)
        assert cut.state.matrices is not None
        assert once.state.matrices is not None
        if not torch.equal(cut.out, once.out) or not torch.equal(cut.state.matrices[0], once.state.matrices[0]):
            print(f"{name} chunks {tuple(tiling)} {dtype}: cut at {cuts}, the bits are others   FAILED", flush=True)
            return False
    return True


def advance(some: Layer, tables: ChunkTables, tiling: ScanTiling | BlockTiling) -> None:
    own = (some.mixed, some.gates, some.weights, some.state, tables, some.out)
    if isinstance(tiling, BlockTiling):
        delta_chunks(*own, exact=False, pdl=True, blocks=tiling)
    else:
        delta_chunks(*own, exact=True, pdl=True, tiling=tiling)


def microseconds(work: Callable[[int], object], copies: int) -> float:
    """A call's share of the median replay of a graph that calls once for each copy."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            work(copy)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]  # type: ignore[no-untyped-call]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))) * 1000 / copies


def time_singles(shape: Shape, rows: int, tilings: Sequence[SinglesTiling]) -> dict[str, float]:
    of_row = 4 * shape.values * shape.key_dim
    copies = max(4, min(64, -(-2 * CACHE // (rows * of_row))))
    layers = [layer(shape, rows, rows) for _ in range(copies)]
    told = singles(layers[0], range(rows), [1000] * rows, [-1] * rows)

    def timed(tiling: SinglesTiling) -> float:
        def work(copy: int) -> None:
            own = layers[copy]
            delta_singles(own.mixed, own.gates, own.weights, own.state, told, own.out, tiling=tiling, pdl=True)

        return microseconds(work, copies)

    found = variants(tilings, timed)
    for name, time in found.items():
        share = 2 * rows * of_row / BANDWIDTH / time * 1e6
        print(f"  {rows:4} rows   {name:24} {time:8.2f} µs   {share:5.1%}", flush=True)
    return found


def time_chunks(
    shape: Shape, name: str, lengths: tuple[int, ...], tilings: Sequence[ScanTiling | BlockTiling]
) -> dict[str, float]:
    tables, copies = on_device(in_a_row(lengths, 64)), 4
    layers = [layer(shape, sum(lengths), len(lengths)) for _ in range(copies)]

    def timed(tiling: ScanTiling | BlockTiling) -> float:
        return microseconds(lambda copy: advance(layers[copy], tables, tiling), copies)

    found = variants(tilings, timed)
    for variant, time in found.items():
        print(f"  {name:9} {variant:24} {time:9.1f} µs   {time / max(lengths):6.3f} a token of one prompt", flush=True)
    return found


def variants(tilings: Sequence[T], timed: Callable[[T], float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for tiling in tilings:
        try:
            found[str(tuple(tiling))] = timed(tiling)
        except FAILURES as failure:
            print(f"  {tuple(tiling)}: {failure}".splitlines()[0], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="singles,chunks")
    parser.add_argument("--shapes", default="0.8B,9B")
    parser.add_argument("--quick", action="store_true", help="only the tilings that are used")
    asked = parser.parse_args()
    parts, shapes = asked.only.split(","), {name: SHAPES[name] for name in asked.shapes.split(",")}
    single_tilings = [delta.SINGLES] if asked.quick else SINGLES
    scan_tilings = [delta.SCAN] if asked.quick else SCANS
    block_tilings = [delta.BLOCKS] if asked.quick else BLOCKS
    torch.manual_seed(0)
    passed = True
    tiny = Shape(2, 6, 12, 20)
    for name, shape in ({"tiny": tiny} | shapes).items():
        for dtype in (BF16, torch.float32):
            if "singles" in parts:
                for single in single_tilings:
                    passed &= check_singles(name, shape, dtype, single)
            if "chunks" in parts:
                tilings = scan_tilings if dtype == BF16 and shape is not tiny else [delta.SCAN]
                for scan in tilings:
                    passed &= check_chunks(name, shape, dtype, scan)
                passed &= check_chunks(name, shape, dtype, delta.BLOCKS)
    best = []
    for name, shape in shapes.items():
        if "singles" in parts:
            print(f"{name}, single rows")
            for rows in ROWS:
                best.append((f"{name}, {rows} rows", time_singles(shape, rows, single_tilings)))
        if "chunks" in parts:
            kinds: dict[str, Sequence[ScanTiling | BlockTiling]] = {"exact": scan_tilings, "blocks": block_tilings}
            for kind, chunk_tilings in kinds.items():
                print(f"{name}, chunks, {kind}")
                for length, lengths in CHUNKS.items():
                    found = time_chunks(shape, length, lengths, chunk_tilings)
                    best.append((f"{name}, {length} {kind}", found))
    print("\nbest")
    for line, found in best:
        if found:
            fastest = min(found, key=lambda variant: found[variant])
            print(f"  {line:24} {fastest:24} {found[fastest]:9.2f} µs")
    if not passed:
        sys.exit("not all results are right")


if __name__ == "__main__":
    main()
