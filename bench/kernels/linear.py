"""Everything between the attention calls, on a GPU: checked against float32 twins, then timed.

The weights pass of a decode step (all layers and the head, distinct weights, no attention) is one CUDA graph, timed as
cuBLAS with separate norms, as our kernels, and as our kernels launched ahead (pdl). For each batch size the tiling of
one matrix after the other is swept inside the whole step; the best are printed as a file of choices, to be shipped in
runner/gpu/shipped_choices.

python bench/kernels/linear.py [--seconds 60] [--models 0.6B,8B] [--batches 1,2,4,8,16] [--no-sweep]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.errors import TritonError

from ostro.backends.cuda.choices import Choices, shipped, written
from ostro.backends.cuda.measuring import this_gpu
from ostro.kernels.gpu import rope_store as rope
from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue
from ostro.kernels.gpu.mlp import activated, activated_plain
from ostro.kernels.gpu.norm import NormWeights, add_norm, add_norm_plain
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Prologue
from ostro.kernels.gpu.small_batch import small_linear, small_linear_plain
from ostro.kernels.gpu.tilings import (
    ROWS,
    DotTiling,
    EpilogueKind,
    Matmul,
    SliceTiling,
    Tiling,
    VectorTiling,
    block_rows,
    default_tiling,
)

FAILURES = (TritonError, RuntimeError, AssertionError, ValueError, TypeError, KeyError, IndexError, AttributeError)
BF16, GPU, EPS = torch.bfloat16, "cuda", 1e-6
BANDWIDTH = 4.3e12
PAGE = 64


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    head_norm: bool

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> (out, in)."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }

    def weight_bytes(self) -> int:
        sizes = {name: 2 * outs * ins for name, (outs, ins) in self.matrices().items()}
        return sizes["head"] + self.layers * sum(size for name, size in sizes.items() if name != "head")


SHAPES = {
    "0.6B": Shape("0.6B", 1024, 3072, 28, 16, 8, 128, 151936, head_norm=True),
    "4B": Shape("4B", 2560, 9728, 36, 32, 8, 128, 151936, head_norm=True),
    "8B": Shape("8B", 4096, 14336, 32, 32, 8, 128, 128256, head_norm=False),
}
NORMED = ("qkv", "gate_up", "head")
GATED, ADDED = Epilogue(activation="silu", gated=True), Epilogue(adds=True)
EPILOGUES: dict[str, EpilogueKind] = {
    "qkv": "plain",
    "o": "added",
    "gate_up": "gated",
    "down": "added",
    "head": "plain",
}


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=BF16).mul_(scale)


# Timing


class Deadline:
    def __init__(self, seconds: float) -> None:
        self.started, self.seconds = time.monotonic(), seconds

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, replays: int = 20) -> float:
    """Median of replays that follow one another without a gap on the host."""
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(float(a.elapsed_time(b)) for a, b in pairwise(marks))


def timed(work: Callable[[], object], replays: int = 20) -> float:
    return microseconds(captured(work), replays)


def error_of(ours: Tensor, plain: Tensor) -> float:
    return float((ours.double() - plain.double()).norm() / plain.double().norm())


def tried(what: str, work: Callable[[], float]) -> float | None:
    try:
        return work()
    except FAILURES as failure:
        print(f"FAILED {what}: {type(failure).__name__}: {str(failure).strip()[:300]}", flush=True)
        return None


# Checks


def checks() -> Iterator[tuple[str, Callable[[], float]]]:
    """Name and relative error, which must stay under 1e-2 in bfloat16."""
    tilings: dict[str, Tiling] = {
        "warp a row": VectorTiling(4, 256, 4),
        "along": VectorTiling(2, 1024, 4),
        "dot": DotTiling(64, 128, 4, stages=3),
        "held": DotTiling(64, 128, 4, stages=3, held=1),
        "split": DotTiling(64, 128, 4, stages=4, splits=4),
    }
    for pdl in (False, True):
        for rows in (1, 2, 5, 16, 100):
            for name, tiling in tilings.items():
                if rows > 4 and isinstance(tiling, VectorTiling):
                    continue
                yield f"matmul {name} rows={rows} pdl={pdl}", partial(residual_error, rows, tiling, pdl)
                if name != "split":
                    yield f"gated {name} rows={rows} pdl={pdl}", partial(gated_error, rows, tiling, pdl)
        for tokens in (1, 300, 5000):
            yield f"norm {tokens} pdl={pdl}", partial(norm_error, tokens, pdl)
            yield f"gated {tokens} pdl={pdl}", partial(silu_error, tokens, pdl)
            yield f"rope_store {tokens} pdl={pdl}", partial(rope_error, tokens, pdl)
    yield "rotation_table at 131071, against float64", table_error


def residual_error(rows: int, tiling: Tiling, pdl: bool) -> float:
    x, weight, stream = drawn(rows, 3072), drawn(1024, 3072, scale=0.02), drawn(rows, 1024)
    plain = small_linear_plain(x, weight, epilogue=ADDED, residual=stream.float())
    return error_of(small_linear(x, weight, epilogue=ADDED, residual=stream, tiling=tiling, pdl=pdl), plain)


def gated_error(rows: int, tiling: Tiling, pdl: bool) -> float:
    x, weight = drawn(rows, 1024), drawn(6144, 1024, scale=0.02)
    prologue = Prologue(NormWeights(drawn(1024), EPS)) if isinstance(tiling, VectorTiling) else NO_PROLOGUE
    ours = small_linear(x, weight, prologue, GATED, tiling=tiling, pdl=pdl)
    return error_of(ours, small_linear_plain(x, weight, prologue, GATED, out_dtype=torch.float32))


def norm_error(tokens: int, pdl: bool) -> float:
    x, delta, weight = drawn(tokens, 1024), drawn(tokens, 1024), drawn(1024)
    plain_stream = x.clone()
    plain = add_norm_plain(plain_stream, delta, NormWeights(weight, EPS))
    ours = add_norm(x, delta, NormWeights(weight, EPS), pdl=pdl)
    assert torch.equal(x, plain_stream), "the streams differ"
    return error_of(ours, plain)


def silu_error(tokens: int, pdl: bool) -> float:
    gate_up = drawn(tokens, 6144)
    return error_of(
        activated(gate_up, "silu", gated=True, pdl=pdl), activated_plain(gate_up.float(), "silu", gated=True)
    )


def rope_inputs(tokens: int, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, rope.QKNormWeights | None]:
    frequencies = 1e6 ** (-torch.arange(64, device=GPU, dtype=torch.float32) / 64)
    table = rope.rotation_table(torch.randint(0, 40000, (tokens,), device=GPU), frequencies)
    qkv = drawn(tokens, shape.matrices()["qkv"][0])
    pages = triton.cdiv(tokens, PAGE) + 1
    keys = drawn(pages, shape.kv_heads, PAGE, shape.head_dim)
    slots = torch.randperm(pages * PAGE, device=GPU)[:tokens]
    weight = drawn(shape.heads + shape.kv_heads, shape.head_dim)
    norm = rope.QKNormWeights(weight, EPS) if shape.head_norm else None
    return qkv, table, slots, keys, keys.clone(), norm


def rope_error(tokens: int, pdl: bool) -> float:
    qkv, table, slots, keys, values, norm = rope_inputs(tokens, SHAPES["0.6B"])
    slots[1::7] = -1
    plain = (qkv.clone(), keys.clone(), values.clone())
    rope.rope_store_plain(plain[0], table, slots, plain[1], plain[2], norm=norm)
    rope.rope_store(qkv, table, slots, keys, values, norm=norm, pdl=pdl)
    return max(error_of(a, b) for a, b in zip((qkv, keys, values), plain, strict=True))


def table_error() -> float:
    positions = torch.randint(100000, 131072, (500,), device=GPU)
    frequencies = 1e6 ** (-torch.arange(64, device=GPU, dtype=torch.float32) / 64)
    angles = (positions.float()[:, None] * frequencies).double()  # rounded as the model rounds them
    return error_of(rope.rotation_table(positions, frequencies), torch.stack((angles.cos(), angles.sin()), 1))


def run_checks() -> None:
    failed, worst = 0, 0.0
    for name, work in checks():
        error = tried(name, work)
        # Written so that NaN fails.
        if error is None or not error < 1e-2:
            failed += 1
            print(f"WRONG {name}: relative error {error}", flush=True)
        else:
            worst = max(worst, error)
    print(f"CHECKS failed: {failed}; worst relative error of the others {worst:.1e}", flush=True)


# The weights pass of a step


@dataclass
class Weights:
    shape: Shape
    layers: list[dict[str, Tensor]] = field(init=False)
    head: Tensor = field(init=False)
    norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.shape.matrices()
        self.layers = [
            {name: drawn(*size, scale=0.02) for name, size in sizes.items() if name != "head"}
            for _ in range(self.shape.layers)
        ]
        self.head = drawn(*sizes["head"], scale=0.02)
        self.norm = drawn(self.shape.hidden, scale=0.1).add_(1.0)


@dataclass
class Step:
    """One decode step without attention: the leading part of qkv stands for what attention would give."""

    weights: Weights
    rows: int

    def __post_init__(self) -> None:
        self.start = drawn(self.rows, self.weights.shape.hidden)
        self.stream = self.start.clone()
        self.rope = rope_inputs(self.rows, self.weights.shape)

    def cublas(self) -> Tensor:
        weights, queries = self.weights, self.weights.shape.heads * self.weights.shape.head_dim
        x, delta, norms = torch.mul(self.start, 1.0, out=self.stream), None, NormWeights(weights.norm, EPS)
        for layer in weights.layers:
            qkv = F.linear(add_norm(x, delta, norms), layer["qkv"])
            attended = F.linear(qkv[:, :queries], layer["o"])
            inner = activated(F.linear(add_norm(x, attended, norms), layer["gate_up"]), "silu", gated=True)
            delta = F.linear(inner, layer["down"])
        return F.linear(add_norm(x, delta, norms), weights.head).float()

    def ours(self, tilings: dict[str, Tiling], *, pdl: bool, with_rope: bool = False) -> Tensor:
        weights, queries = self.weights, self.weights.shape.heads * self.weights.shape.head_dim
        # For one row the norm is folded into the matmul; with more it would be done over for each tile of outputs.
        norm = NormWeights(weights.norm, EPS)
        prologue = Prologue(norm) if self.rows == 1 else NO_PROLOGUE

        def read(x: Tensor) -> Tensor:
            return x if self.rows == 1 else add_norm(x, None, norm, pdl=pdl)

        # A kernel, as the embedding is: a plain copy would not be one, and nothing can be launched ahead of it.
        x = torch.mul(self.start, 1.0, out=self.stream)
        _, table, slots, keys, values, head_norm = self.rope
        for layer in weights.layers:
            qkv = small_linear(read(x), layer["qkv"], prologue, tiling=tilings["qkv"], pdl=pdl)
            if with_rope:
                rope.rope_store(qkv, table, slots, keys, values, norm=head_norm, pdl=pdl)
            small_linear(qkv[:, :queries], layer["o"], epilogue=ADDED, residual=x, tiling=tilings["o"], pdl=pdl)
            inner = small_linear(read(x), layer["gate_up"], prologue, GATED, tiling=tilings["gate_up"], pdl=pdl)
            small_linear(inner, layer["down"], epilogue=ADDED, residual=x, tiling=tilings["down"], pdl=pdl)
        return small_linear(read(x), weights.head, prologue, out_dtype=torch.float32, tiling=tilings["head"], pdl=pdl)

    def one(self, name: str, tiling: Tiling, *, pdl: bool) -> None:
        """A single matmul, to compile it."""
        outs, ins = self.weights.shape.matrices()[name]
        weight = self.weights.head if name == "head" else self.weights.layers[0][name]
        is_normed, is_added = name in NORMED and self.rows == 1, EPILOGUES[name] == "added"
        small_linear(
            drawn(self.rows, ins),
            weight,
            Prologue(NormWeights(self.weights.norm, EPS)) if is_normed else NO_PROLOGUE,
            {"gated": GATED, "added": ADDED}.get(EPILOGUES[name], NO_EPILOGUE),
            residual=drawn(self.rows, outs) if is_added else None,
            out_dtype=torch.float32 if name == "head" else None,
            tiling=tiling,
            pdl=pdl,
        )


def candidates(name: str, rows: int, outs: int, ins: int) -> list[Tiling]:
    """Candidate tilings."""
    joins, copies = name not in ("gate_up", "head"), 2 if name == "gate_up" else 1
    if rows == 1:
        own = [(2, 256, 2), (4, 256, 4), (8, 256, 8), (4, 256, 2), (8, 256, 4), (2, 512, 2), (4, 512, 2)]
        along = [(1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (1, 2048, 8), (2, 2048, 8), (4, 2048, 8)]
        # At most 72 registers of weights a thread.
        return [VectorTiling(o, i, w) for o, i, w in own + along if i <= ins and copies * o * ins <= 72 * 64 * w]
    found: list[Tiling] = [VectorTiling(4, 256, 4), VectorTiling(2, 1024, 4)] if rows <= 4 and ins <= 4096 else []
    for o, i, w in ((64, 128, 4), (64, 64, 4), (128, 128, 4), (128, 64, 4), (128, 64, 8), (256, 64, 8)):
        if copies * o * block_rows(rows) > 128 * 32 * w:  # registers of sums a thread
            continue
        for splits in (1, 2, 4, 8) if joins else (1,):
            programs = triton.cdiv(outs // copies, o) * splits
            few_inputs = ins % (i * splits) or ins < 2 * i * splits
            if few_inputs or programs > 2000 or (programs < 64 and o > 64):
                continue
            for memory in (104, 208):
                stages = min(10, (memory << 10) // (2 * i * (o * copies + block_rows(rows))))
                for held in (0, 1, 2) if rows <= 16 and name != "head" else (0,):
                    if stages >= 2 and (memory == 104 or programs <= 132):
                        found.append(DotTiling(o, i, w, stages=stages, splits=splits, held=held))
    return list(dict.fromkeys(found))


def compile_all(jobs: Iterable[Callable[[], None]]) -> None:
    """Ignores failures: they recur and are reported where a tiling is timed."""

    def attempt(job: Callable[[], None]) -> None:
        try:
            job()
        except FAILURES:
            return

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(attempt, jobs))
    torch.cuda.synchronize()


def in_use(shape: Shape, rows: int) -> dict[str, Tiling]:
    choices = shipped(this_gpu(torch.device(GPU)), similar=True)
    return {
        name: choices.tiling(Matmul(*size, 16, EPILOGUES[name]), rows)
        or default_tiling(rows, *size, gated=name == "gate_up")
        for name, size in shape.matrices().items()
    }


def sweep(step: Step, deadline: Deadline) -> dict[str, Tiling]:
    """The best tiling of each matrix, found one matrix after the other inside the whole step, launched ahead."""
    shape, rows = step.weights.shape, step.rows
    best = in_use(shape, rows)
    choices = {name: candidates(name, rows, *size) for name, size in shape.matrices().items()}
    started = time.monotonic()
    compile_all(
        partial(step.one, name, tiling, pdl=True)
        for name in choices
        for tiling in choices[name]
        if deadline.left() > 20
    )
    print(f"  compiled in {time.monotonic() - started:.0f} s", flush=True)
    replays = 15 if shape.name == "0.6B" else 7
    fastest = tried("defaults", partial(timed, partial(step.ours, best, pdl=True), replays)) or 1e9
    for name, tilings in choices.items():
        for tiling in tilings:
            if deadline.left() < 0:
                return best
            trial = {**best, name: tiling}
            took = tried(f"{name} {tiling}", partial(timed, partial(step.ours, trial, pdl=True), replays))
            if took is not None:
                print(f"    {shape.name} rows={rows} {name:8} {told(tiling):60} {took:8.1f} µs", flush=True)
            if took is not None and took < fastest:
                best, fastest = trial, took
    return best


def told(tiling: Tiling) -> str:
    if isinstance(tiling, SliceTiling):
        return str(tiling)
    if isinstance(tiling, VectorTiling):
        return f"VectorTiling({tiling.outs}, {tiling.ins}, {tiling.warps})"
    text = f"DotTiling({tiling.outs}, {tiling.ins}, {tiling.warps}, stages={tiling.stages}"
    text += f", splits={tiling.splits}" if tiling.splits > 1 else ""
    return text + (f", held={tiling.held}" if tiling.held else "") + ")"


def time_step(weights: Weights, rows: int, deadline: Deadline | None) -> tuple[dict[Matmul, Tiling], str]:
    """The best tilings, and a line for the summary."""
    shape, step = weights.shape, Step(weights, rows)
    best = sweep(step, deadline) if deadline else in_use(shape, rows)
    cublas = captured(step.cublas)
    plain, ahead = captured(lambda: step.ours(best, pdl=False)), captured(lambda: step.ours(best, pdl=True))
    whole = captured(lambda: step.ours(best, pdl=True, with_rope=True))
    whole_plain = captured(lambda: step.ours(best, pdl=False, with_rope=True))
    took = [microseconds(graph) for graph in (cublas, plain, ahead, whole_plain, whole)]

    # A race would show as a difference: the same kernels in the same order must give the same numbers.
    reference, expected = step.ours(best, pdl=False), step.cublas()
    same = all(torch.equal(step.ours(best, pdl=True), reference) for _ in range(5))
    rate = shape.weight_bytes() / took[2] / 1e6
    summary = (
        f"RESULT {shape.name:5} rows={rows:2}  cuBLAS {took[0]:7.1f}  ours {took[1]:7.1f}  pdl {took[2]:7.1f} µs "
        f"({rate:.2f} TB/s, floor {shape.weight_bytes() / BANDWIDTH * 1e6:.0f})  with rope_store {took[3]:.1f} / pdl "
        f"{took[4]:.1f}  pdl same: {same}  off cuBLAS by {error_of(reference, expected):.1e}"
    )
    return {Matmul(*size, 16, EPILOGUES[name]): best[name] for name, size in shape.matrices().items()}, summary


# The kernels that stand alone


def time_small_kernels(shape: Shape) -> None:
    for tokens in (1, 256, 16384):
        repeats = 4 if tokens > 1000 else 20
        x, delta, weight = drawn(tokens, shape.hidden), drawn(tokens, shape.hidden), drawn(shape.hidden)
        gate_up = drawn(tokens, 2 * shape.inner)
        qkv, table, slots, keys, values, norm = rope_inputs(tokens, shape)
        moved = {"norm": 4 * x.nbytes, "gated": gate_up.nbytes * 3 // 2, "rope_store": 2 * qkv.nbytes + table.nbytes}
        rotate = partial(rope.rope_store, qkv, table, slots, keys, values, norm=norm)
        for pdl in (False, True):
            works: dict[str, Callable[[], object]] = {
                "norm": partial(add_norm, x, delta, NormWeights(weight, EPS), pdl=pdl),
                "gated": partial(activated, gate_up, "silu", gated=True, pdl=pdl),
                "rope_store": partial(rotate, pdl=pdl),
            }
            for name, work in works.items():
                took = tried(name, partial(repeated, work, repeats))
                if took is not None:
                    rate = f"{took:8.2f} µs {moved[name] / took / 1e3:7.0f} GB/s"
                    print(f"RESULT {shape.name} {name:10} {tokens:6} tokens pdl={pdl!s:5} {rate}", flush=True)
        usual = rope._tile
        for heads, warps in ((2, 1), (4, 1), (8, 2), (16, 4), (16, 8), (32, 4), (32, 8)):
            rope._tile = partial(fixed_tile, heads, warps)
            took = tried(f"rope_store {heads} {warps}", partial(repeated, rotate, repeats))
            if took is not None:
                print(f"    rope_store {shape.name} {tokens:6} tokens, heads={heads} warps={warps}: {took:8.2f} µs")
        rope._tile = usual


def fixed_tile(heads: int, warps: int, *_: int) -> tuple[int, int]:
    return heads, warps


def repeated(work: Callable[[], object], times: int) -> float:
    def works() -> None:
        for _ in range(times):
            work()

    return timed(works) / times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60, help="for the sweep of one model at one batch size")
    parser.add_argument("--models", default="0.6B,8B")
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-sweep", action="store_true", help="time the tilings in use")
    options = parser.parse_args()
    whole = Deadline(0)
    torch.manual_seed(time.time_ns())
    if not options.no_checks:
        run_checks()

    table: dict[Matmul, dict[int, Tiling | None]] = {}
    summaries: list[str] = []
    models = [SHAPES[name] for name in options.models.split(",")]
    for shape in models if "1" in options.batches.split(",") else []:
        time_small_kernels(shape)
    weights = {shape.name: Weights(shape) for shape in models}
    for rows in (int(batch) for batch in options.batches.split(",")):
        for shape in models:
            try:
                deadline = None if options.no_sweep else Deadline(options.seconds)
                found, summary = time_step(weights[shape.name], rows, deadline)
            except FAILURES as failure:
                print(f"FAILED {shape.name} rows={rows}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
                continue
            for matmul, tiling in found.items():
                table.setdefault(matmul, {})[min(most for most in ROWS if rows <= most)] = tiling
            summaries.append(summary)
            print(summary, flush=True)
    print("", written(Choices(table), this_gpu(torch.device(GPU))), *summaries, sep="\n")
    print(f"  {-whole.left():.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
