"""Whether a whole decode step in one kernel can be faster than a graph of kernels: what its parts cost.

    python bench/kernels/hops.py                  # needs nvcc and a Hopper GPU; half a minute

A persistent step passes its rows from one multiprocessor to another at every matmul. Measured are such a hop, alone and
with outputs that several blocks share; the stream of weights through shared memory that goes on meanwhile; and what a
graph's kernel boundary costs instead. docs/gpu.md has the figures.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import torch

ROUNDS, UNIT = 1000, 16 << 10
SOURCE = Path(__file__).with_suffix(".cu")


def build(directory: Path) -> ctypes.CDLL:
    library = directory / "hops.so"
    arguments = ("-std=c++17", "-O3", "-arch=sm_90a", "-shared", "-Xcompiler", "-fPIC", "-o", str(library))
    subprocess.run(["nvcc", *arguments, str(SOURCE)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in ("time_hops", "time_ring", "time_boundaries"):
        getattr(loaded, name).restype = ctypes.c_float
    return loaded


def spread(clocks: Sequence[int], mean: float) -> tuple[float, float]:
    """Median and 99th percentile of the rounds, in µs, given the mean: the clock's rate is not asked for."""
    cycles = [after - before for before, after in pairwise(clocks)]
    rate = sum(cycles) / len(cycles) / mean
    return median(cycles) / rate, quantiles(cycles, n=100)[98] / rate


def main() -> None:
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    with tempfile.TemporaryDirectory() as directory:
        library = build(Path(directory))
        print(f"{torch.cuda.get_device_name(0)}, {blocks} blocks", flush=True)
        for producers, joiners, apart in ((blocks, 1, 0), (blocks, 1, 1), (32, 1, 0), (blocks, 2, 0), (blocks, 4, 0)):
            for sleep in (0, 20, 40):
                clocks = (ctypes.c_longlong * ROUNDS)()
                mean = library.time_hops(blocks, ROUNDS, producers, joiners, sleep, apart, clocks)
                middle, worst = spread(list(clocks), mean)
                where = "a cell each" if apart else "one cell"
                print(
                    f"hop: {producers:3} producers, {joiners} share outputs, {where:<11}, sleep {sleep:2} ns: "
                    f"{mean:5.2f} µs (median {middle:5.2f}, p99 {worst:5.2f})",
                    flush=True,
                )
        units = 1024
        for every in (0, 2, 4, 8, 16):
            for joiners in (1, 2):
                if every == 0 and joiners > 1:
                    continue
                taken = library.time_ring(blocks, units, every, joiners, 20)
                print(
                    f"ring: a hop every {every * UNIT >> 10 or '∞':>3} KB, {joiners} share outputs: "
                    f"{units * blocks * UNIT / taken / 1e6:4.2f} TB/s, {taken / units * max(every, 1):6.2f} µs a hop",
                    flush=True,
                )
        for programmatic in (0, 1):
            taken = library.time_boundaries(blocks, 200, programmatic)
            print(f"kernel boundary, {'overlapped' if programmatic else 'plain':<10}: {taken:5.2f} µs", flush=True)


if __name__ == "__main__":
    main()
