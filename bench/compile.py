"""How long it takes to compile what a model's first step needs on a GPU: one by one, by threads, and by processes.
Needs no GPU: kernels are compiled for an H200, wherever this runs.

    python bench/compile.py --config bench/configs/qwen3-0.6b.json
    python bench/compile.py --config bench/configs/llama-3.2-1b.json --kernel-choices auto
    python bench/compile.py --config bench/configs/qwen3-0.6b.json --list      # the binaries, with the time of each
    python bench/compile.py --archive --config bench/configs/qwen3-0.6b.json bench/configs/llama-3.1-8b.json

`--archive` writes what models need with default settings to where a start looks for it, see
`backends/cuda/shipped_binaries.py`.

Each way starts with an empty cache. Seconds are those of the wall, then those of all CPUs together; imports, which pass
while torch is imported in the process that loads the model, are told apart. With N processes a start takes about the
CPU seconds of one by one, divided by N, and no less than the slowest binary.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ostro.backends.cuda.choices import Gpu
from ostro.backends.cuda.precompile_process import compile_all, signatures
from ostro.backends.cuda.precompiling import Request, mark
from ostro.backends.cuda.shipped_binaries import archive_path, pack
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.kernels.gpu.signatures import build, build_driver, kernel_name, warm_up
from ostro.kernels.gpu.tilings import Multiprocessors
from ostro.system.machine import num_cpus

H200 = Gpu("NVIDIA H200", "9.0", Multiprocessors(132, 220 << 10))
ARCHIVE = "archive"
# The defaults, and those of bench/gpu.py.
SHIPPED = (EngineConfig(), EngineConfig(serving=True), EngineConfig(max_seq_len=4096))


def by_processes(wanted: Sequence[str], number: int) -> None:
    done = compile_all(wanted, number)
    assert not done.failed, done.failed


def by_threads(wanted: Sequence[str], number: int) -> None:
    warm_up(wanted)
    with ThreadPoolExecutor(number) as threads:
        for done in [threads.submit(build, each) for each in wanted]:
            done.result()


def one_by_one(wanted: Sequence[str], number: int) -> None:
    warm_up(wanted)
    taken = []
    for each in wanted:
        before = cpu_seconds()
        build(each)
        taken.append((cpu_seconds() - before, each))
    slowest, _ = max(taken)
    total = sum(seconds for seconds, _ in taken)
    print(f"slowest {slowest:.2f} CPU s; with 15 processes about {max(slowest, total / 15):.1f} s", flush=True)
    if number:
        for seconds, each in sorted(taken, reverse=True):
            print(f"{seconds:6.2f} CPU s  {kernel_name(each).rpartition('.')[2]} {json.loads(each)['constant_vals']}")


WAYS: dict[str, Callable[[Sequence[str], int], None]] = {
    "one by one": one_by_one,
    "threads": by_threads,
    "processes": by_processes,
}


def cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(way: str, options: argparse.Namespace) -> None:
    """In a process of its own, with an empty cache."""
    config = json.loads(options.config[0].read_text(encoding="utf-8"))
    settings = EngineConfig(
        max_seq_len=4096, kernel_choices=options.kernel_choices, quantize=options.quantize, kv_dtype=options.kv_dtype
    )
    import ostro.backends.cuda.runner  # noqa: F401  its imports are no part of what follows

    imports = time.perf_counter() - float(os.environ["BEGAN"])
    began = time.perf_counter()
    wanted = signatures(Request(config, DEVICE_KINDS["cuda"].resolve(settings), H200))
    listed = time.perf_counter() - began
    began, used = time.perf_counter(), cpu_seconds()
    number = int(options.list) if way == "one by one" else options.number
    WAYS[way](wanted, number)
    seconds, used = time.perf_counter() - began, cpu_seconds() - used
    print(
        f"{way:10} {len(wanted)} kernels: {seconds:6.1f} s, {used:6.1f} CPU s"
        f" (imports {imports:.1f} s, listing {listed:.2f} s)",
        flush=True,
    )
    if way == "processes":
        counts = Counter(kernel_name(each).rpartition(".")[2] for each in wanted)
        print(", ".join(f"{name} {count}" for name, count in counts.most_common()))


def write_archive(configs: Sequence[Path], number: int) -> None:
    """In a process of its own, with an empty cache."""
    build_driver()
    wanted: dict[str, None] = {}
    marks = []
    for path in configs:
        config = json.loads(path.read_text(encoding="utf-8"))
        for settings in SHIPPED:
            wanted |= dict.fromkeys(signatures(Request(config, DEVICE_KINDS["cuda"].resolve(settings), H200)))
            marks.append(mark(config, settings))
    began = time.perf_counter()
    by_processes(list(wanted), number)
    archive = archive_path()
    assert archive is not None
    entries = pack(Path(os.environ["TRITON_CACHE_DIR"]), archive, {H200.name: marks})
    print(
        f"{len(wanted)} kernels compiled in {time.perf_counter() - began:.1f} s: {entries} entries,"
        f" {archive.stat().st_size / 1e6:.1f} MB in {archive.name}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, nargs="+", required=True, help="a config.json that names the shape")
    parser.add_argument("--number", type=int, default=num_cpus(), help="of threads, and of processes")
    parser.add_argument("--kernel-choices", default="off", metavar="auto|off|FILE")
    parser.add_argument("--quantize", choices=["none", "fp8"], default="none")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--archive", action="store_true", help="of all configs, to be shipped")
    parser.add_argument("--list", action="store_true", help="the time of each binary, compiled one by one")
    parser.add_argument("--way", choices=[*WAYS, ARCHIVE], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == ARCHIVE:
        write_archive(options.config, options.number)
        return
    if options.way is not None:
        measure(options.way, options)
        return
    for way in [ARCHIVE] if options.archive else ["one by one"] if options.list else WAYS:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TRITON_CACHE_DIR": cache, "OSTRO_CACHE": cache, "OMP_NUM_THREADS": "1"}
            environment["BEGAN"] = str(time.perf_counter())
            subprocess.run([sys.executable, *sys.argv, "--way", way], check=True, env=environment)


if __name__ == "__main__":
    main()
