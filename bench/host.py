"""What a decode step costs the host, without a device: the scheduler, the planning of a step for a GPU and the reading
of its results, in microseconds of CPU time.

    python bench/host.py                                # 8, 64 and 256 rows
    python bench/host.py 256 --profile                  # where the time goes
    python bench/host.py --against ../other/src         # two versions by turns, and their ratio

The GPU's runner runs on a CPU, with a model of one tiny layer whose work is left out as by `gpu.py --host`: every token
is 0. Rows begin together and end together; only the steps in which all of them decode are counted. Every figure is the
median of several processes, which take turns if there are two versions.
"""

import argparse
import cProfile
import gc
import json
import os
import pstats
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

# What is never run may not be compiled either.
os.environ.setdefault("TRITON_INTERPRET", "1")

PROMPT, OUTPUT, PAGE_SIZE = 100, 320, 64
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def engine(rows: int):  # type: ignore[no-untyped-def]
    import torch

    from ostro.backends.cuda.runner import GpuRunner
    from ostro.engine.core import EngineCore
    from ostro.torch_models.build import build_model

    torch.set_num_threads(1)
    model = build_model(MODEL, dtype=torch.float32, device=torch.device("cpu"), max_seq_len=4096)
    pages = rows * (2 + (PROMPT + OUTPUT) // PAGE_SIZE)
    core = EngineCore(
        GpuRunner(model, page_size=PAGE_SIZE, num_pages=pages, max_batch_tokens=1 << 15, max_batch_seqs=rows)
    )
    # As the engine's process does: what is loaded stays.
    gc.collect()
    gc.freeze()
    return core


def steady(core, rows: int, profile: cProfile.Profile | None = None) -> float:  # type: ignore[no-untyped-def]
    """Seconds of CPU time of one step in which all rows decode."""
    from ostro.engine.request import Request
    from ostro.sampling_params import SamplingParams

    core.scheduler.kv.clear_cache()
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.6, ignore_eos=True)
    for row in range(rows):
        prompt = tuple((7 * row + at) % 1000 + 1 for at in range(PROMPT))
        core.add(Request(id=row, prompt_ids=prompt, params=params, seed=row))
    tokens, steps, seconds = 0, 0, 0.0
    while core.has_work:
        is_steady = 8 * rows <= tokens < (OUTPUT - 8) * rows
        if is_steady and profile is not None:
            profile.enable()
        began = time.process_time()
        gains = core.step()
        took = time.process_time() - began
        if profile is not None:
            profile.disable()
        if is_steady:
            steps, seconds = steps + 1, seconds + took
        tokens += sum(len(gain.token_ids) for gain in gains)
    assert tokens == rows * OUTPUT, "some output has a wrong length"
    return seconds / steps


def measure(rows: int) -> float:
    from gpu import without_device_work

    core = engine(rows)
    with without_device_work(core):
        steady(core, rows)
        return min(steady(core, rows) for _ in range(3))


def show_profile(rows: int) -> None:
    from gpu import without_device_work

    core, profile = engine(rows), cProfile.Profile()
    with without_device_work(core):
        steady(core, rows)
        steady(core, rows, profile)
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def in_process(rows: int, source: Path | None) -> float:
    """Measured in a process of its own, with the package of another tree if one is given."""
    environment = os.environ if source is None else {**os.environ, "PYTHONPATH": str(source.resolve())}
    command = [sys.executable, __file__, str(rows), "--once"]
    found: float = json.loads(subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, default=[8, 64, 256])
    parser.add_argument("--against", type=Path, help="the src directory of another version")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--once", action="store_true", help="print the seconds of a step, measured in this process")
    options = parser.parse_args()
    for rows in options.rows:
        if options.once:
            print(json.dumps(measure(rows)))
            continue
        if options.profile:
            show_profile(rows)
            continue
        sources = [None] if options.against is None else [None, options.against]
        turns = [[in_process(rows, source) for source in sources] for _ in range(options.turns)]
        own, *others = (median(each) * 1e6 for each in zip(*turns, strict=True))
        line = f"{rows:4} rows {own:8.1f} µs a step {own / rows:6.2f} µs a row"
        for other in others:
            line += f"; against {other:8.1f} and {other / rows:6.2f}: {own / other:.2f} of it"
        print(line, flush=True)


if __name__ == "__main__":
    main()
