"""How fast the JAX runner is on one GPU, and how soon it is ready: workloads of `workloads.py`, weights random.

    python bench/gpu_jax.py nano single --config bench/configs/qwen3-0.6b.json

A checkpoint is written, then loaded by two processes, one after the other: the first has an empty cache, the second
finds the first one's compiled programs. Each says how long it took to its first token; the second runs each workload
three times, the first of which is not counted.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu import measure, run
from random_model import write_weights
from workloads import WORKLOADS, Work


def engine(directory: Path, options: argparse.Namespace):  # type: ignore[no-untyped-def]
    from ostro.backends.loading import load_runner
    from ostro.config import EngineConfig
    from ostro.engine.core import EngineCore
    from ostro.weights import open_checkpoint

    settings = EngineConfig(
        device="cuda",
        backend="jax",
        max_seq_len=options.max_seq_len,
        max_batch_tokens=options.max_batch_tokens,
        max_batch_seqs=options.max_batch_seqs,
    )
    core = EngineCore(load_runner(open_checkpoint(str(directory)), settings))
    gc.collect()
    gc.freeze()
    return core


def loaded(directory: Path, options: argparse.Namespace) -> None:
    """Runs in a process of its own."""
    core = engine(directory, options)
    run(core, [Work(list(range(128)), 2)])
    print(f"start to first token: {time.time() - options.began:.1f} s", flush=True)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name in options.workloads:
        row = measure(core, config, name)
        figures = ", ".join(f"{each:.0f}" for each in row.tokens_per_second)
        print(f"{name:8} {figures} tok/s, {row.steps} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS])
    parser.add_argument("--config", type=Path, required=True, help="a config.json that names the shape")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--max-batch-seqs", type=int)
    parser.add_argument("--loaded", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loaded is not None:
        loaded(options.loaded, options)
        return
    with tempfile.TemporaryDirectory() as directory:
        write_weights(json.loads(options.config.read_text(encoding="utf-8")), Path(directory))
        environment = {**os.environ, "OSTRO_CACHE": f"{directory}/cache"}
        given = [value for value in sys.argv[1:] if value not in WORKLOADS]
        for number, workloads in enumerate([[], options.workloads]):
            print(["cold", "warm"][number], flush=True)
            command = [sys.executable, __file__, *workloads, *given, "--loaded", directory, "--began", str(time.time())]
            subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
