"""The slice kernel for 2 to 16 rows against the kernels it may replace, on a GPU: checked, then timed by turns.

    python bench/kernels/slice.py [--models 0.6B,1B] [--rows 8,4,2,16] [--seconds 280] [--file FILE]

For each model and number of rows, a graph of 8 layers with weights of their own: norm, qkv, o, norm, gate and up, down,
without attention (o reads part of qkv's result), launched ahead as in a decode step. One matrix after the other, each
tiling is timed inside that chain: `old` are the tilings that a start would try or that are shipped, `new` the slice
kernel's, which norm their inputs themselves unless they say "norm apart", and for up to 4 rows the vector kernel's.
Then the best of both by turns. Times are µs per layer, the least of several. Imports nothing but torch, Triton and the
kernels.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.runtime import driver

from ostro.kernels.gpu.dot_linear import arrival_counters
from ostro.kernels.gpu.epilogue import Epilogue
from ostro.kernels.gpu.norm import NormWeights, add_norm
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Delta, Prologue
from ostro.kernels.gpu.signatures import digest_sources
from ostro.kernels.gpu.small_batch import small_linear, small_linear_plain
from ostro.kernels.gpu.tilings import (
    ROWS,
    DotTiling,
    EpilogueKind,
    Matmul,
    Multiprocessors,
    SliceTiling,
    Tiling,
    VectorTiling,
    candidates,
    slice_tilings,
)

FAILURES = (TritonError, RuntimeError, AssertionError, ValueError, TypeError, KeyError, IndexError, AttributeError)
BF16, GPU, EPS = torch.bfloat16, "cuda", 1e-6
LAYERS, ROUNDS, REPLAYS = 8, 5, 4
BANDWIDTH = 4.3e12
LEAST_GAIN = 0.995
SHIPPED = Path(__file__).parents[2] / "src/ostro/backends/cuda/shipped_choices/nvidia-h200.json"


class Way(NamedTuple):
    """How one matrix is multiplied."""

    tiling: Tiling
    folds: bool
    """Whether the kernel norms its inputs itself."""

    def __str__(self) -> str:
        numbers = [getattr(self.tiling, name) for name in self.tiling.__slots__ if name != "folds"]
        kind = type(self.tiling).__name__.removesuffix("Tiling").lower()
        return f"{kind}({','.join(map(str, numbers))}){'' if self.folds else ' norm apart'}"


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    qkv: int
    attended: int
    activation: str = "silu"
    before: bool = True
    """Whether there are norms before attention and MLP."""
    after: bool = False
    """Whether there are norms after them."""

    def matmuls(self) -> dict[str, Matmul]:
        added: EpilogueKind = "plain" if self.after else "added"
        return {
            "qkv": Matmul(self.qkv, self.hidden, 16),
            "o": Matmul(self.hidden, self.attended, 16, added),
            "gate_up": Matmul(2 * self.inner, self.hidden, 16, "gated"),
            "down": Matmul(self.hidden, self.inner, 16, added),
        }

    @property
    def floor(self) -> float:
        return 1e6 * sum(each.weight_bytes for each in self.matmuls().values()) / BANDWIDTH


SHAPES = {
    "0.6B": Shape(1024, 3072, 4096, 2048),
    "1B": Shape(2048, 8192, 3072, 2048),
    "4B": Shape(2560, 9728, 6144, 4096),
    "8B": Shape(4096, 14336, 6144, 4096),
    "Gemma-3-1B": Shape(1152, 6912, 1536, 1024, "gelu_tanh", after=True),
    "OLMo-2-1B": Shape(2048, 8192, 6144, 2048, before=False, after=True),
}
KINDS: dict[str, type[Tiling]] = {"vector": VectorTiling, "dot": DotTiling, "slice": SliceTiling}
READS = ("qkv", "gate_up")
"""Matrices whose inputs are normed."""


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=BF16).mul_(scale)


def epilogue_of(matmul: Matmul, shape: Shape) -> Epilogue:
    gated = matmul.is_gated
    return Epilogue(activation=shape.activation if gated else None, gated=gated, adds=matmul.epilogue == "added")


class Layer(NamedTuple):
    weights: Mapping[str, Tensor]
    ways: Mapping[str, Way]
    pdl: bool


class Chain:
    """A model's layers without attention. `ways` say how each matrix is multiplied."""

    def __init__(self, shape: Shape, rows: int) -> None:
        self.shape, self.rows = shape, rows
        self.weights = [
            {
                name: drawn(each.out_features, each.in_features, scale=each.in_features**-0.5)
                for name, each in shape.matmuls().items()
            }
            for _ in range(LAYERS)
        ]
        self.epilogues = {name: epilogue_of(each, shape) for name, each in shape.matmuls().items()}
        self.norm = NormWeights(drawn(shape.hidden).abs_() + 0.5, EPS)
        self.first = drawn(rows, shape.hidden)

    def __call__(self, ways: Mapping[str, Way], *, pdl: bool = True) -> Tensor:
        stream, delta = self.first.clone(), None
        for weights in self.weights:
            layer = Layer(weights, ways, pdl)
            stream, qkv = self._read(layer, "qkv", stream, delta)
            delta = self._add(layer, "o", qkv[:, : self.shape.attended], stream)
            stream, inner = self._read(layer, "gate_up", stream, delta)
            delta = self._add(layer, "down", inner, stream)
        return stream

    def _read(self, layer: Layer, name: str, stream: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream with the delta added, and its product."""
        (tiling, folds), weight, pdl = layer.ways[name], layer.weights[name], layer.pdl
        norm, epilogue = self.norm if self.shape.before else None, self.epilogues[name]
        if not folds:
            read = add_norm(stream, delta, norm, delta_norm=None if delta is None else self.norm, pdl=pdl)
            return stream, small_linear(read, weight, epilogue=epilogue, tiling=tiling, pdl=pdl)
        if delta is None:
            return stream, small_linear(stream, weight, Prologue(norm), epilogue, tiling=tiling, pdl=pdl)
        after = torch.empty_like(stream)
        prologue = Prologue(norm, Delta(delta, self.norm, 1.0), after)
        return after, small_linear(stream, weight, prologue, epilogue, tiling=tiling, pdl=pdl)

    def _add(self, layer: Layer, name: str, x: Tensor, stream: Tensor) -> Tensor | None:
        """Adds a product to the stream, or returns it to be normed first."""
        tiling, after = layer.ways[name].tiling, self.shape.after
        residual = None if after else stream
        epilogue, pdl = self.epilogues[name], layer.pdl
        y = small_linear(x, layer.weights[name], epilogue=epilogue, residual=residual, tiling=tiling, pdl=pdl)
        return y if after else None


# ---- what is tried


def this_device() -> Multiprocessors:
    memory = int(driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])
    return Multiprocessors(torch.cuda.get_device_properties(0).multi_processor_count, memory - (7 << 10))


def shipped(matmul: Matmul, rows: int) -> Tiling | None:
    for each in json.loads(SHIPPED.read_text(encoding="utf-8"))["products"]:
        if Matmul(each["out_features"], each["in_features"], each["bits"], each["epilogue"]) == matmul:
            found = next((each["rows"][str(most)] for most in ROWS if rows <= most and str(most) in each["rows"]), None)
            if isinstance(found, dict):
                return KINDS[found.pop("kernel")](**found)
    return None


def old_ways(matmul: Matmul, rows: int) -> list[Way]:
    tiling = shipped(matmul, rows)
    tilings = candidates(matmul, 16, this_device(), 3)
    return [Way(each, False) for each in ([tiling] if tiling else tilings)]


def new_ways(name: str, matmul: Matmul, rows: int, shape: Shape) -> list[Way]:
    reads = name in READS
    found = [Way(each, reads) for each in slice_tilings(matmul)]
    if rows <= 4 and not (reads and shape.after) and matmul.in_features <= 4096:
        vectors = (VectorTiling(4, 256, 4), VectorTiling(8, 256, 8), VectorTiling(2, 1024, 4), VectorTiling(4, 1024, 8))
        found += [Way(each, reads) for each in vectors]
    return found


# ---- checks


def worst_error(name: str, matmul: Matmul, rows: int, shape: Shape) -> float:
    """The largest relative error of all tilings, against float32."""
    weight = drawn(matmul.out_features, matmul.in_features, scale=matmul.in_features**-0.5)
    x, stream = drawn(rows, matmul.in_features), drawn(rows, matmul.outs)
    norm = NormWeights(drawn(matmul.in_features), EPS)
    epilogue = epilogue_of(matmul, shape)
    adds = epilogue.adds
    worst = 0.0
    for tiling, folds in new_ways(name, matmul, rows, shape):
        delta = Delta(drawn(rows, matmul.in_features), norm, 1.0) if folds and shape.after else None
        before = norm if folds and shape.before else None
        ours, plain = (
            Prologue(before, delta, None if delta is None else torch.full_like(x, torch.nan)) for _ in range(2)
        )
        y = small_linear(x, weight, ours, epilogue, residual=stream.clone() if adds else None, tiling=tiling, pdl=True)
        wide = small_linear_plain(
            x, weight, plain, epilogue, residual=stream.float() if adds else None, out_dtype=torch.float32
        )
        error = error_of(y, wide)
        if ours.stream is not None and plain.stream is not None:
            error = max(error, error_of(ours.stream, plain.stream))
        if not error < 1e-2:
            print(f"WRONG {name} {matmul} rows={rows} {tiling} folds={folds}: {error:.1e}", flush=True)
        worst = max(worst, error) if error == error else float("inf")
    return worst


def error_of(ours: Tensor, plain: Tensor) -> float:
    return float((ours.double() - plain.double()).norm() / plain.double().norm())


def check(models: Iterable[str], rows: Iterable[int]) -> None:
    for model in models:
        shape = SHAPES[model]
        errors = {
            (name, number): worst_error(name, matmul, number, shape)
            for name, matmul in shape.matmuls().items()
            for number in rows
        }
        told = ", ".join(f"{name} {number} rows {error:.1e}" for (name, number), error in errors.items())
        print(f"CHECK {model}: {told}", flush=True)


# ---- timing


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    try:
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
    except FAILURES as failure:
        print(f"FAILED {type(failure).__name__}: {str(failure).strip()[:200]}", flush=True)
        return None
    return graph


def least(graphs: Sequence[torch.cuda.CUDAGraph | None], rounds: int = ROUNDS) -> list[float]:
    """µs per layer of each, by turns; infinite for what could not be captured."""
    times = [float("inf")] * len(graphs)
    for _ in range(rounds):
        for order, graph in enumerate(graphs):
            if graph is None:
                continue
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            graph.replay()
            marks[0].record()
            for _ in range(REPLAYS):
                graph.replay()
            marks[1].record()
            marks[1].synchronize()
            took = 1000 * float(marks[0].elapsed_time(marks[1])) / (REPLAYS * LAYERS)
            times[order] = min(times[order], took)
    return times


def best_of(chain: Chain, ways: dict[str, Way], name: str, tried: Sequence[Way]) -> list[float]:
    trials = [{**ways, name: each} for each in tried]
    return least([captured(partial(chain, each)) for each in trials], rounds=3)


def search(chain: Chain, model: str, deadline: Deadline) -> tuple[dict[str, Way], dict[str, Way]]:
    """The best ways without and with the new kernels, one matrix after the other."""
    matmuls = chain.shape.matmuls()
    old = {name: old_ways(each, chain.rows)[0] for name, each in matmuls.items()}
    for name, matmul in matmuls.items():
        if len(tried := old_ways(matmul, chain.rows)) > 1:
            times = best_of(chain, old, name, tried)
            old[name] = tried[times.index(min(times))]
    best = dict(old)
    for name, matmul in matmuls.items():
        if deadline.left() < 10:
            break
        tried = [best[name], *new_ways(name, matmul, chain.rows, chain.shape)]
        times = best_of(chain, best, name, tried)
        fastest = tried[times.index(min(times))]
        if name in READS and fastest.folds:
            tried.append(fastest._replace(folds=False))
            times += best_of(chain, best, name, tried[-1:])
        told = "  ".join(f"{each} {took:.2f}" for each, took in zip(tried, times, strict=True))
        print(f"  {model} rows={chain.rows} {name:7} old {told}", flush=True)
        if min(times) < LEAST_GAIN * times[0]:
            best[name] = tried[times.index(min(times))]
    return old, best


def compile_all(jobs: Iterable[Callable[[], object]]) -> None:
    """Ignores failures: they recur where a tiling is timed."""

    def attempt(job: Callable[[], object]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Initialises the device context in a new thread: tensor descriptors are created before the first launch.
        stream.synchronize()
        try:
            with torch.cuda.stream(stream):
                job()
        except FAILURES:
            return

    digest_sources()
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(attempt, jobs))
    torch.cuda.synchronize()
    # Kernels ran concurrently here, and may have left the counters in a wrong state.
    arrival_counters(torch.device(GPU)).zero_()


def launches(models: Iterable[str], rows: int) -> Iterator[Callable[[], object]]:
    """One launch of everything that will be timed."""
    for model in models:
        shape = SHAPES[model]
        norm = NormWeights(drawn(shape.hidden), EPS)
        for name, matmul in shape.matmuls().items():
            weight, x = drawn(matmul.out_features, matmul.in_features), drawn(rows, matmul.in_features)
            epilogue = epilogue_of(matmul, shape)
            residual = drawn(rows, matmul.outs) if epilogue.adds else None
            for tiling, folds in {*old_ways(matmul, rows), *new_ways(name, matmul, rows, shape)}:
                prologues = [NO_PROLOGUE]
                if folds:
                    before = norm if shape.before else None
                    prologues = [Prologue(before)]
                    if shape.after:
                        prologues.append(Prologue(before, Delta(x, norm, 1.0), torch.empty_like(x)))
                for prologue in prologues:
                    yield partial(
                        small_linear, x, weight, prologue, epilogue, residual=residual, tiling=tiling, pdl=True
                    )


def measure(model: str, rows: int, deadline: Deadline) -> tuple[str, dict[Matmul, Way]]:
    shape = SHAPES[model]
    chain = Chain(shape, rows)
    old, new = search(chain, model, deadline)
    graphs = [captured(partial(chain, old)), captured(partial(chain, new))]
    before, after = least(graphs)
    alone = chain(new, pdl=False)
    same = all(torch.equal(chain(new), alone) for _ in range(5))
    error = error_of(chain(new), chain(old))
    chosen = "; ".join(f"{name} {way}" for name, way in new.items() if way != old[name])
    summary = (
        f"RESULT {model:10} rows={rows:2} old {before:7.2f} new {after:7.2f} µs a layer ({before / after:.3f}x, floor "
        f"{shape.floor:.1f}); pdl same bits {same}; off old by {error:.1e}; {chosen or 'nothing new'}"
    )
    print(summary, flush=True)
    return summary, {matmul: new[name] for name, matmul in shape.matmuls().items()}


def as_file(found: Mapping[Matmul, Mapping[int, Way]], onto: Iterable[Path]) -> str:
    """A file for `--kernel-choices`: other choices, with those of up to 16 rows replaced by the best ones."""
    products: dict[Matmul, dict[str, object]] = {}
    for path in onto:
        for each in json.loads(path.read_text(encoding="utf-8"))["products"]:
            matmul = Matmul(each["out_features"], each["in_features"], each["bits"], each["epilogue"])
            products.setdefault(matmul, {}).update(each["rows"])
    for matmul, ways in found.items():
        chosen = {str(rows): as_json(way) for rows, way in ways.items() if rows in ROWS}
        products[matmul] = {**products.get(matmul, {}), **chosen}
    lines = [
        json.dumps({**{name: getattr(matmul, name) for name in matmul.__slots__}, "rows": rows})
        for matmul, rows in products.items()
    ]
    device = torch.cuda.get_device_properties(0)
    head = {"gpu": device.name, "capability": f"{device.major}.{device.minor}"}
    head_text = json.dumps({**head, "multiprocessors": device.multi_processor_count})[:-1]
    return f'{head_text}, "products": [\n' + ",\n".join(lines) + "\n]}\n"


def as_json(way: Way) -> dict[str, object]:
    kernel = next(name for name, kind in KINDS.items() if type(way.tiling) is kind)
    numbers = {name: getattr(way.tiling, name) for name in way.tiling.__slots__}
    return {"kernel": kernel, **numbers, **({"folds": way.folds} if kernel == "slice" else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--rows", default="8,4,2,16", help="in this order, until the time is up")
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--file", type=Path, help="where the best are written, for --kernel-choices")
    parser.add_argument("--onto", type=Path, nargs="*", default=[SHIPPED], help="files with choices for the rest")
    parser.add_argument("--no-checks", action="store_true")
    options = parser.parse_args()
    models, deadline = options.models.split(","), Deadline(options.seconds)
    summaries: list[str] = []
    found: dict[Matmul, dict[int, Way]] = {}
    torch.manual_seed(time.time_ns())
    for rows in map(int, options.rows.split(",")):
        started = time.monotonic()
        compile_all(launches(models, rows))
        print(f"# rows={rows}: compiled in {time.monotonic() - started:.0f} s", flush=True)
        if not options.no_checks:
            check(models, [rows])
        for model in models:
            if deadline.left() < 15:
                print(f"# out of time before {model} rows={rows}", flush=True)
                continue
            summary, best = measure(model, rows, deadline)
            torch.cuda.empty_cache()
            summaries.append(summary)
            for matmul, way in best.items():
                found.setdefault(matmul, {})[rows] = way
            if options.file is not None:
                options.file.write_text(as_file(found, options.onto), encoding="utf-8")
    print("", *summaries, f"# {options.seconds - deadline.left():.0f} s in all", sep="\n", flush=True)


if __name__ == "__main__":
    main()
