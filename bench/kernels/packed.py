"""Matmuls with packed weights of 4 or 8 bits on a GPU: checked against float32 twins, then timed against those with
bfloat16 weights.

Each matmul is a CUDA graph over copies of one matrix that together do not fit the cache. Default tilings come first,
others as long as there is time. Few rows have the epilogues that a model's layers have; many do without.

python bench/kernels/packed.py [--models 0.6B,8B] [--bits 4] [--group 128] [--seconds 80]
"""

import argparse
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from fp8 import BF16, CACHE, GPU, SHAPES, drawn, error_of, microseconds
from torch import Tensor
from triton.errors import TritonError

from ostro.kernels.gpu import packed
from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.packed_vector import PackedVectorTiling
from ostro.kernels.gpu.packed_words import Packed, pack_pairs
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Prologue
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.tilings import DotTiling, Tiling

ROWS = (1, 8, 16, 64, 128, 256)
MANY = (512, 2048)
# Sums of 4096 products in another order, and weights rounded to bfloat16.
CLOSE = 1e-2


def weights(outs: int, ins: int, bits: int, group: int) -> Packed:
    words = torch.randint(-(2**31), 2**31, (outs, ins * bits // 32), device=GPU, dtype=torch.int32)
    scales = torch.rand(outs, ins // group, device=GPU).mul_(0.02).add_(0.01) / (1 << bits)
    zeros = torch.randint(0, 1 << bits, scales.shape, device=GPU)
    return Packed(words, pack_pairs(scales.half(), zeros.half()), bits, group, False)


def others(rows: int, weight: Packed, chosen: Tiling) -> list[Tiling]:
    if isinstance(chosen, PackedVectorTiling):
        outs, turns = chosen.outs, chosen.turns
        shorter = replace(chosen, outs=max(1, outs // 2), turns=2 * turns)
        return [shorter, replace(chosen, outs=2 * outs, turns=max(1, turns // 2)), replace(chosen, turns=1)]
    assert isinstance(chosen, DotTiling)
    found: list[Tiling] = [
        DotTiling(64, width, chosen.warps, stages=stages, splits=splits)
        for splits in (chosen.splits, max(1, chosen.splits // 2))
        for width in (128, 256)
        for stages in (2, 3, 4)
    ]
    return [each for each in dict.fromkeys(found) if each != chosen]


class Matmul:
    """One of a model's matmuls, with the epilogue that it has there."""

    def __init__(self, name: str, outs: int, ins: int, gated: bool, bits: int, group: int) -> None:
        self.name, self.outs, self.ins, self.gated = name, outs, ins, gated
        copies = max(2, min(60, CACHE // (outs * ins * bits // 8)))
        self.small = [weights(outs, ins, bits, group) for _ in range(copies)]
        plain = packed.unpacked(self.small[0], BF16)
        self.plain = [plain.clone() for _ in range(max(2, copies * bits // 16))]
        self.nbytes = self.small[0].nbytes
        self.norm = NormWeights(drawn(ins).add_(1.0), 1e-5)

    def run(self, rows: int) -> None:
        x = drawn(rows, self.ins)
        before = microseconds(lambda copy: self.usual(x, copy), len(self.plain))
        chosen = packed.default_tiling(rows, self.small[0], gated=self.gated and rows == 1)
        self.tried(x, chosen, f"bf16 {before:7.1f} us, packed")

    def tried(self, x: Tensor, tiling: Tiling, what: str) -> float:
        rows = len(x)
        try:
            error = error_of(self.ours(x, 0, tiling), self.twin(x))
            took = microseconds(lambda copy: self.ours(x, copy, tiling), len(self.small))
        except (TritonError, RuntimeError, AssertionError) as failure:
            print(f"FAILED {self.name} {rows} rows {tiling}: {str(failure).strip()[:200]}", flush=True)
            return float("inf")
        print(
            f"{self.name:>8} {rows:>5} rows: {what} {took:7.1f} ({self.nbytes / took / 1e6:.2f} TB/s, "
            f"{2 * rows * self.outs * self.ins / took / 1e6:.0f} TFLOP/s), error {error:.1e}"
            f"{' WRONG' if not error < CLOSE else ''}  {tiling}",
            flush=True,
        )
        return took

    def _around(self, x: Tensor) -> tuple[Prologue, Epilogue]:
        """The kernel's epilogue in a model's layer."""
        if len(x) > 1:
            return NO_PROLOGUE, NO_EPILOGUE
        prologue = Prologue(self.norm) if self.name in ("qkv", "gate_up") else NO_PROLOGUE
        return prologue, Epilogue(activation="silu", gated=True) if self.gated else NO_EPILOGUE

    def ours(self, x: Tensor, copy: int, tiling: Tiling) -> Tensor:
        return packed.packed_small_linear(x, self.small[copy], *self._around(x), tiling=tiling, pdl=True)

    def twin(self, x: Tensor) -> Tensor:
        return packed.packed_small_linear_plain(x.float(), self.small[0], *self._around(x))

    def usual(self, x: Tensor, copy: int) -> Tensor:
        if len(x) <= 16:
            return small_linear(x, self.plain[copy], *self._around(x), pdl=True)
        return F.linear(x, self.plain[copy])

    def many(self, rows: int) -> None:
        x = drawn(rows, self.ins)
        before = microseconds(lambda copy: F.linear(x, self.plain[copy]), 2)
        took = microseconds(lambda copy: packed.packed_linear(x, self.small[copy]), 2)
        error = error_of(packed.packed_linear(x, self.small[0]), self.twin(x))
        wrong = " WRONG" if not error < CLOSE else ""
        print(
            f"{self.name:>8} {rows:>5} rows: bf16 {before:7.1f} us, widened first {took:7.1f}, {error:.1e}{wrong}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8B")
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--matmuls", nargs="+", default=["qkv", "o", "gate_up", "down"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=80.0, help="after which no further tiling is tried")
    options = parser.parse_args()
    torch.manual_seed(0)
    until = time.monotonic() + options.seconds
    matmuls = []
    for model in options.models.split(","):
        for name, outs, ins, gated in SHAPES[model]:
            if name not in options.matmuls:
                continue
            matmuls.append(Matmul(name, outs, ins, gated, options.bits, options.group))
            for rows in options.rows:
                matmuls[-1].run(rows)
            for rows in MANY:
                matmuls[-1].many(rows)
    for rows in options.rows:
        for each in matmuls:
            chosen = packed.default_tiling(rows, each.small[0], gated=each.gated and rows == 1)
            x = drawn(rows, each.ins)
            for tiling in others(rows, each.small[0], chosen):
                if time.monotonic() < until:
                    each.tried(x, tiling, "tried")


if __name__ == "__main__":
    main()
