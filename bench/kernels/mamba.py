"""Kernels for Mamba-2 and short convolutions, on a GPU: checked against formulas in float64, then timed.

    python bench/kernels/mamba.py [--only singles,chunks,convolutions] [--shapes nano,granite] [--quick]

Calls are CUDA graphs over so many layers' states that they do not fit the cache; times are µs per call, the median of
several replays. Shares are those of the memory's bandwidth, counting each state as read and written once.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from ostro.kernels.gpu.ssm import (
    BLOCKS,
    SCAN,
    BlockTiling,
    ScanTiling,
    SinglesTiling,
    SsmWeights,
    ssm_chunks,
    ssm_singles,
)
from ostro.kernels.gpu.state_conv import convolve_chunks, keep_inputs, short_chunks, short_singles
from ostro.kernels.gpu.state_rows import ChunkTables, KeptState, SingleRows, StateChunk, chunk_tables

GPU, BF16 = "cuda", torch.bfloat16
BANDWIDTH, CACHE, TAPS = 4.8e12, 128 << 20, 4
FAILURES = (TritonError, RuntimeError, AssertionError)


class Shape(NamedTuple):
    heads: int
    groups: int
    head_dim: int = 64
    state_size: int = 128

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.width + 2 * self.groups * self.state_size


SHAPES = {"nano": Shape(64, 8), "granite": Shape(64, 1), "granite 1B": Shape(48, 1), "tiny": Shape(6, 2, 12, 16)}
ROWS = (1, 8, 32, 64, 256)
CHUNKS = {"64": (64,), "2048": (2048,), "8192": (8192,), "4 x 2048": (2048,) * 4, "64 x 1": (1,) * 64}
SINGLE_TILINGS = [
    None,
    *(SinglesTiling(*each) for each in ((64, 1024), (64, 512), (32, 512), (16, 512), (16, 1024), (8, 1024), (8, 512))),
]
SCAN_TILINGS: list[ScanTiling | BlockTiling] = [
    ScanTiling(*each)
    for each in (
        (8, 16, 4, 1),
        (8, 16, 3, 1),
        (8, 16, 6, 1),
        (4, 32, 4, 1),
        (2, 64, 4, 1),
        (16, 8, 4, 1),
        (16, 16, 4, 1),
        (16, 16, 4, 2),
        (32, 16, 4, 4),
    )
]
BLOCK_TILINGS: list[ScanTiling | BlockTiling] = [
    BlockTiling(*each) for each in ((32, 8, 1), (32, 4, 1), (32, 8, 2), (64, 8, 1), (16, 4, 1), (16, 8, 1))
]


class Layer(NamedTuple):
    weights: SsmWeights
    inputs: Tensor
    state: KeptState
    out: Tensor


def layer(shape: Shape, rows: int, slots: int, dtype: torch.dtype = BF16) -> Layer:
    def drawn(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device=GPU).mul_(scale)

    heads, width, channels = shape.heads, shape.width, shape.channels
    weights = SsmWeights(
        drawn(TAPS, channels, scale=0.5),
        drawn(channels),
        drawn(heads),
        drawn(heads),
        drawn(heads),
        1 + drawn(width, scale=0.1),
        1e-5,
        shape.groups,
        False,
        shape.head_dim,
        shape.state_size,
        shape.groups,
    )
    matrices = drawn(slots, heads, shape.head_dim, shape.state_size)
    state = KeptState(drawn(slots, TAPS, channels).to(dtype), matrices)
    out = torch.full((rows, width), torch.nan, dtype=dtype, device=GPU)
    return Layer(weights, drawn(rows, width + channels + heads).to(dtype), state, out)


def copied(some: Layer) -> Layer:
    """With states of its own."""
    inputs, matrices = some.state
    assert matrices is not None
    return some._replace(state=KeptState(inputs.clone(), matrices.clone()), out=torch.full_like(some.out, torch.nan))


def plain(own: Layer, chunks: Sequence[StateChunk]) -> None:
    """What the kernels compute, in float64."""
    weights, (rings, matrices) = own.weights, own.state
    assert matrices is not None
    assert weights.bias is not None
    assert weights.norm is not None
    decay, step_bias, skip = (each.double() for each in (weights.decay, weights.step_bias, weights.skip))
    groups = weights.groups * weights.state_size
    for chunk in chunks:
        ring, s = rings[chunk.slot].clone(), matrices[chunk.slot].double()
        if chunk.position == 0:
            s.zero_()
        for row in range(chunk.rows):
            position = chunk.position + row
            z, mixed, t = own.inputs[chunk.first + row].split_with_sizes((weights.width, weights.channels, len(decay)))
            ring[position % TAPS] = mixed
            mixed = weights.bias.double()
            for back in range(min(TAPS, position + 1)):
                mixed = mixed + weights.taps[TAPS - 1 - back].double() * ring[(position - back) % TAPS].double()
            u, b, c = F.silu(mixed).split_with_sizes((weights.width, groups, groups))
            u = u.view(-1, weights.head_dim)
            b, c = (
                each.view(-1, weights.state_size).repeat_interleave(len(decay) // weights.groups, 0) for each in (b, c)
            )
            t = F.softplus(t.double() + step_bias)
            s = s * torch.exp(-decay.exp() * t)[:, None, None] + (t[:, None] * u)[:, :, None] * b[:, None]
            y = (s * c[:, None]).sum(-1) + skip[:, None] * u
            y = (y.flatten() * F.silu(z.double())).view(weights.norm_groups, -1)
            y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + weights.eps)).flatten() * weights.norm
            own.out[chunk.first + row] = y
            for after, slot in chunk.captures:
                if after == row + 1:
                    _keep(own, slot, ring, s, position)
        _keep(own, chunk.slot, ring, s, chunk.position + chunk.rows - 1)


def _keep(own: Layer, slot: int, ring: Tensor, s: Tensor, position: int) -> None:
    assert own.state.matrices is not None
    own.state.matrices[slot] = s
    for back in range(min(TAPS - 1, position + 1)):
        own.state.inputs[slot, (position - back) % TAPS] = ring[(position - back) % TAPS]


def singles(slots: Sequence[int], positions: Sequence[int], captured: Sequence[int]) -> SingleRows:
    return SingleRows(
        torch.tensor(slots, dtype=torch.int32, device=GPU),
        torch.tensor(positions, dtype=torch.int64, device=GPU),
        torch.tensor(captured, dtype=torch.int32, device=GPU),
    )


def on_device(chunks: Sequence[StateChunk]) -> ChunkTables:
    return ChunkTables(*(torch.from_numpy(own).to(GPU) for own in chunk_tables(chunks)))


def in_a_row(lengths: Sequence[int], position: int) -> list[StateChunk]:
    return [StateChunk(sum(lengths[:slot]), length, slot, position) for slot, length in enumerate(lengths)]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def compared(name: str, ours: Layer, theirs: Layer, slots: Sequence[int]) -> bool:
    assert ours.state.matrices is not None
    assert theirs.state.matrices is not None
    out, matrices = error(ours.out, theirs.out), error(ours.state.matrices[slots], theirs.state.matrices[slots])
    # A NaN is in no range.
    passed = 0 <= out < (5e-3 if ours.out.dtype == BF16 else 1e-4) and 0 <= matrices < 1e-4
    print(f"{name:52} out {out:.1e}, states {matrices:.1e}{'' if passed else '   FAILED'}", flush=True)
    return passed


def check_singles(name: str, shape: Shape, dtype: torch.dtype, tiling: SinglesTiling | None) -> bool:
    ours = layer(shape, 5, 8, dtype)
    theirs, rows = copied(ours), [(3, 0, -1), (0, 2, 7), (5, 9, -1), (1, 100, 2), (4, 1 << 33, -1)]
    chunks = [
        StateChunk(row, 1, slot, position, ((1, also),) if also >= 0 else ())
        for row, (slot, position, also) in enumerate(rows)
    ]
    plain(theirs, chunks)
    ssm_singles(ours.inputs, ours.weights, ours.state, singles(*zip(*rows, strict=True)), ours.out, tiling=tiling)
    inputs = torch.equal(next_inputs(ours, chunks), next_inputs(theirs, chunks))
    passed = compared(f"{name} singles {tiling and tuple(tiling)} {dtype}", ours, theirs, range(8))
    return passed and inputs


def next_inputs(own: Layer, chunks: Sequence[StateChunk]) -> Tensor:
    """The inputs that rows behind the chunks would read, of all slots that take a state."""
    found = []
    for chunk in chunks:
        for rows, slot in (*chunk.captures, (chunk.rows, chunk.slot)):
            end = chunk.position + rows
            found += [own.state.inputs[slot, before % TAPS] for before in range(max(0, end - TAPS + 1), end)]
    return torch.stack(found)


def check_chunks(name: str, shape: Shape, dtype: torch.dtype, tiling: ScanTiling | BlockTiling) -> bool:
    chunks = [
        StateChunk(0, 150, 0, 0, ((1, 5), (64, 6))),
        StateChunk(150, 1, 1, 3),
        StateChunk(151, 2, 2, 1, ((1, 7),)),
        StateChunk(153, 67, 3, 1000),
    ]
    ours = layer(shape, 220, 8, dtype)
    theirs = copied(ours)
    plain(theirs, chunks)
    advance(ours, on_device(chunks), tiling)
    inputs = torch.equal(next_inputs(ours, chunks), next_inputs(theirs, chunks))
    exact = isinstance(tiling, ScanTiling)
    label = f"{name} chunks {tuple(tiling)} {dtype}{' exact' if exact else ''}"
    passed = compared(label, ours, theirs, range(8)) and inputs
    return passed and (not exact or check_cuts(label, shape, dtype, tiling))


def check_cuts(label: str, shape: Shape, dtype: torch.dtype, tiling: ScanTiling | BlockTiling) -> bool:
    whole = layer(shape, 150, 8, dtype)
    once = copied(whole)
    advance(once, on_device([StateChunk(0, 150, 0, 0)]), tiling)
    for cuts in (tuple(range(1, 70)), (1, 2, 3, 64, 65), (75,)):
        cut = copied(whole)
        for first, end in pairwise((0, *cuts, 150)):
            part = cut._replace(inputs=cut.inputs[first:end], out=cut.out[first:end])
            advance(part, on_device([StateChunk(0, end - first, 0, first, ((1, 6),))]), tiling)
        assert cut.state.matrices is not None
        assert once.state.matrices is not None
        if not torch.equal(cut.out, once.out) or not torch.equal(cut.state.matrices[0], once.state.matrices[0]):
            print(f"{label}: cut at {cuts}, the bits are others   FAILED", flush=True)
            return False
    return True


def advance(some: Layer, tables: ChunkTables, tiling: ScanTiling | BlockTiling) -> None:
    """Exactly, if by a scan."""
    scan, blocks = (tiling, BLOCKS) if isinstance(tiling, ScanTiling) else (SCAN, tiling)
    exact = tiling is scan
    ssm_chunks(some.inputs, some.weights, some.state, tables, some.out, exact=exact, tiling=scan, blocks=blocks)


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


def tried(work: Callable[[], float]) -> float | None:
    try:
        return work()
    except FAILURES as failure:
        print(f"  {failure}".splitlines()[0], flush=True)
        return None


def time_singles(shape: Shape, rows: int, tilings: Sequence[SinglesTiling | None]) -> None:
    of_row = 4 * shape.width * shape.state_size
    copies = max(4, min(64, -(-2 * CACHE // (rows * of_row))))
    layers = [layer(shape, rows, rows) for _ in range(copies)]
    told = singles(range(rows), [1000] * rows, [-1] * rows)
    for tiling in tilings:

        def work(copy: int, tiling: SinglesTiling | None = tiling) -> None:
            own = layers[copy]
            ssm_singles(own.inputs, own.weights, own.state, told, own.out, pdl=True, tiling=tiling)

        taken = tried(lambda work=work: microseconds(work, copies))  # type: ignore[misc]
        if taken is not None:
            share = 2 * rows * of_row / BANDWIDTH / taken * 1e6
            print(f"  {rows:4} rows   {tiling and tuple(tiling)!s:16} {taken:8.2f} µs   {share:5.1%}", flush=True)


def time_chunks(shape: Shape, name: str, lengths: tuple[int, ...], tilings: Sequence[ScanTiling | BlockTiling]) -> None:
    tables, copies = on_device(in_a_row(lengths, 64)), 4
    layers = [layer(shape, sum(lengths), len(lengths)) for _ in range(copies)]
    for tiling in tilings:

        def work(copy: int, tiling: ScanTiling | BlockTiling = tiling) -> None:
            advance(layers[copy], tables, tiling)

        taken = tried(lambda work=work: microseconds(work, copies))  # type: ignore[misc]
        if taken is not None:
            label = f"{tuple(tiling)}{' exact' if isinstance(tiling, ScanTiling) else ''}"
            print(f"  {name:9} {label:22} {taken:9.1f} µs   {taken / max(lengths):6.3f} a token", flush=True)


def time_convolutions(shape: Shape) -> None:
    """Of a mixer's convolution alone, and of LFM2's."""
    for name, lengths in CHUNKS.items():
        tables, rows = on_device(in_a_row(lengths, 64)), sum(lengths)
        layers = [layer(shape, rows, len(lengths)) for _ in range(4)]

        def mixed(copy: int, layers: list[Layer] = layers) -> Tensor:
            own = layers[copy]
            return own.inputs[:, own.weights.width : own.weights.width + own.weights.channels]

        def convolve(copy: int, layers: list[Layer] = layers, tables: ChunkTables = tables) -> None:
            weights, state = layers[copy].weights, layers[copy].state
            convolve_chunks(mixed(copy, layers), weights.taps, weights.bias, state.inputs, tables, silu=True)

        def keep(copy: int, layers: list[Layer] = layers, tables: ChunkTables = tables) -> None:
            keep_inputs(mixed(copy, layers), layers[copy].state.inputs, tables)

        floor = rows * shape.channels * 6 / BANDWIDTH * 1e6
        print(f"  {name:9} convolve {microseconds(convolve, 4):8.1f} µs, floor {floor:.1f}, keep ", end="")
        print(f"{microseconds(keep, 4):6.1f}", flush=True)
    channels = 2048
    taps = torch.randn(3, channels, device=GPU)
    for rows in (1, 64, 2048):
        bcu = torch.randn(rows, 3 * channels, device=GPU).to(BF16)
        inputs = torch.randn(rows, 3, channels, device=GPU).to(BF16)
        told = singles(range(rows), [1000] * rows, [-1] * rows)
        table = on_device(in_a_row((rows,), 64))
        out, other = torch.empty(rows, channels, dtype=BF16, device=GPU), inputs.clone()
        alone = microseconds(
            lambda _, args=(bcu, taps, None, inputs, told, out): short_singles(*args),  # type: ignore[misc]
            16,
        )
        chunk = microseconds(
            lambda _, args=(bcu, taps, None, other, table, out): short_chunks(*args),  # type: ignore[misc]
            16,
        )
        print(f"  short, {rows:4} rows: alone {alone:6.2f} µs, one chunk {chunk:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="singles,chunks,convolutions")
    parser.add_argument("--shapes", default="nano,granite")
    parser.add_argument("--quick", action="store_true", help="only the tilings that are used")
    asked = parser.parse_args()
    parts, names = asked.only.split(","), asked.shapes.split(",")
    single_tilings = [None] if asked.quick else SINGLE_TILINGS
    used: list[ScanTiling | BlockTiling] = [SCAN, BLOCKS]
    chunk_tilings = used if asked.quick else SCAN_TILINGS + BLOCK_TILINGS
    torch.manual_seed(0)
    passed = True
    for name in ("tiny", *names):
        for dtype in (BF16, torch.float32):
            if "singles" in parts:
                for single in single_tilings:
                    passed &= check_singles(name, SHAPES[name], dtype, single)
            if "chunks" in parts:
                for chunk in used if name == "tiny" or dtype != BF16 else chunk_tilings:
                    passed &= check_chunks(name, SHAPES[name], dtype, chunk)
    for name in names:
        if "singles" in parts:
            print(f"{name}, single rows")
            for rows in ROWS:
                time_singles(SHAPES[name], rows, single_tilings)
        if "chunks" in parts:
            print(f"{name}, chunks")
            for length, lengths in CHUNKS.items():
                time_chunks(SHAPES[name], length, lengths, chunk_tilings)
    if "convolutions" in parts:
        print("convolutions")
        time_convolutions(SHAPES[names[0]])
    if not passed:
        sys.exit("not all results are right")


if __name__ == "__main__":
    main()
