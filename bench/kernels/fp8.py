"""Matmuls with 8-bit weights on a GPU: checked against float32 twins, then timed against those with bfloat16 weights.

Each matmul is a CUDA graph over copies of one matrix that together do not fit the cache. For few rows, tilings are
tried; for many, the library's two ways to add up.

python bench/kernels/fp8.py [--models 0.6B,8B]
"""

import argparse
import statistics
from collections.abc import Callable
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from ostro.kernels.gpu import fp8
from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue
from ostro.kernels.gpu.mlp import activated
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.tilings import DotTiling, Tiling, VectorTiling

GPU, BF16 = "cuda", torch.bfloat16
CACHE = 256 << 20
# Name, outputs, inputs, whether gate and up: of Qwen3-0.6B and of Llama-3.1-8B.
SHAPES = {
    "0.6B": (
        ("qkv", 4096, 1024, False),
        ("o", 1024, 2048, False),
        ("gate_up", 6144, 1024, True),
        ("down", 1024, 3072, False),
    ),
    "8B": (
        ("qkv", 6144, 4096, False),
        ("o", 4096, 4096, False),
        ("gate_up", 28672, 4096, True),
        ("down", 4096, 14336, False),
    ),
}
FEW, MANY = (1, 2, 8, 16, 32, 64, 128, 256), (17, 64, 128, 256, 2048, 16384)


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=BF16).mul_(scale)


def microseconds(work: Callable[[int], object], copies: int) -> float:
    """A call's share of the median replay of a graph that calls once for each copy."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            work(copy)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]  # type: ignore[no-untyped-call]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return 1000 * statistics.median(float(a.elapsed_time(b)) for a, b in pairwise(marks)) / copies


def error_of(ours: Tensor, plain: Tensor) -> float:
    return float((ours.double() - plain.double()).norm() / plain.double().norm())


def candidates(rows: int, ins: int, *, gate: bool) -> list[Tiling]:
    if rows == 1:
        own = [VectorTiling(o, 512, w) for o, w in ((2, 2), (4, 4), (8, 4), (8, 8), (4, 2))]
        return [*own, *(VectorTiling(o, 512 * w, w) for o, w in ((1, 2), (1, 4), (2, 4), (1, 8)))]
    splits = (1,) if gate else (1, 2, 4, 8)
    if rows > fp8.MOST_UNROUNDED:
        cuts = [(64, 128, 4), (64, 128, 8), (128, 128, 8), (64, 256, 4)]
        block = (2 if gate else 1) * 64 + max(32, rows)
        fitting = [(o, i, w, s) for o, i, w in cuts for s in (3, 4, 6, 8) if s * i * (block + o - 64) <= 220 << 10]
        return [DotTiling(o, i, w, stages=s, splits=p) for (o, i, w, s), p in product(fitting, splits[:3])]
    cuts = [(32, 128, 4), (64, 128, 4), (64, 128, 6), (64, 256, 3), (128, 128, 3), (128, 128, 4)]
    return [DotTiling(o, i, 4, stages=s, splits=p) for (o, i, s), p in product(cuts, splits) if ins % (i * p) == 0]


def few(name: str, outs: int, ins: int, rows: int, *, gate: bool) -> None:
    epilogue = Epilogue(activation="silu", gated=True) if gate else NO_EPILOGUE
    copies = max(2, min(200, CACHE // (outs * ins)))
    plain = [drawn(outs, ins, scale=0.02) for _ in range(max(2, copies // 2))]
    small = [fp8.quantize_weight(drawn(outs, ins, scale=0.02)) for _ in range(copies)]
    x = drawn(rows, ins)
    before = microseconds(
        lambda copy: small_linear(x, plain[copy], epilogue=epilogue, pdl=True),
        len(plain),
    )
    found: list[tuple[float, Tiling]] = []
    worst = 0.0
    expected = fp8.fp8_small_linear_plain(x.float(), *small[0], epilogue=epilogue)
    chosen = fp8.default_tiling(rows, outs, ins, gated=gate)
    for tiling in dict.fromkeys([chosen, *candidates(rows, ins, gate=gate)]):

        def work(copy: int, tiling: Tiling = tiling) -> Tensor:
            return fp8.fp8_small_linear(x, *small[copy], epilogue=epilogue, tiling=tiling, pdl=True)

        try:
            worst = max(worst, error_of(work(0), expected))
            found.append((microseconds(work, copies), tiling))
        except (TritonError, RuntimeError) as failure:
            print(f"FAILED {name} {tiling}: {str(failure).strip()[:200]}", flush=True)
    best, tiling = min(found, key=lambda each: each[0])
    print(
        f"{name:>8} {rows:>6} rows: bf16 {before:7.1f} us, fp8 default {found[0][0]:7.1f}, best {best:7.1f} "
        f"({outs * ins / best / 1e6:.2f} TB/s), error {worst:.1e}{' WRONG' if not worst < 1e-2 else ''}  {tiling}",
        flush=True,
    )


def many(name: str, outs: int, ins: int, rows: int, *, gate: bool) -> None:
    copies = max(2, min(50, CACHE // (outs * ins))) if rows < 1024 else 2
    plain = [drawn(outs, ins, scale=0.02) for _ in range(copies)]
    small = [fp8.quantize_weight(each) for each in plain]
    x = drawn(rows, ins)

    def after(y: Tensor) -> Tensor:
        return activated(y, "silu", gated=True) if gate else y

    before = microseconds(lambda copy: after(F.linear(x, plain[copy])), copies)
    rounding = microseconds(lambda _: fp8.quantize_rows(x), copies)
    worst = error_of(fp8.fp8_linear(x, *small[0]), fp8.fp8_linear_plain(x.float(), *small[0]))
    times = []
    for fast in (False, True):
        fp8.FAST_ACCUMULATION = fast
        times.append(microseconds(lambda copy: after(fp8.fp8_linear(x, *small[copy])), copies))
    fast_error = error_of(fp8.fp8_linear(x, *small[0]), fp8.fp8_linear_plain(x.float(), *small[0]))
    fp8.FAST_ACCUMULATION = False
    print(
        f"{name:>8} {rows:>6} rows: bf16 {before:7.1f} us, fp8 {times[0]:7.1f} (of it rounding {rounding:.1f}), added "
        f"up fast {times[1]:7.1f}, errors {worst:.1e} and {fast_error:.1e}{' WRONG' if not worst < 1e-2 else ''}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8B,0.6B")
    args = parser.parse_args()
    torch.manual_seed(0)
    for model in args.models.split(","):
        print(model)
        for name, outs, ins, gate in SHAPES[model]:
            for rows in FEW:
                few(name, outs, ins, rows, gate=gate)
            for rows in MANY:
                many(name, outs, ins, rows, gate=gate)


if __name__ == "__main__":
    main()
