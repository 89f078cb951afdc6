"""How fast the engine is on one GPU: the workloads of `workloads.py` on a model of a named shape, weights random.

    python bench/gpu.py nano single batch8 --config bench/configs/qwen3-0.6b.json
    python bench/gpu.py all --config bench/configs/llama-3.1-8b.json --save
    python bench/gpu.py cold-start --config bench/configs/qwen3-0.6b.json
    python bench/gpu.py nano --config bench/configs/qwen3-0.6b.json --profile      # kernels and host phases

Each workload runs once to warm up, which compiles kernels and captures graphs, and then twice for the record; every
output's length is checked. The cache of prefixes is emptied before each run. Temperature is 0.6, as nano-vllm has it.

The floor is what the memory and the matrix units would take at best: the weights read once a step, all keys and values
of the running sequences read once a step, and the prompts' arithmetic; all at measured rates.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from workloads import WORKLOADS, Work

RESULTS = Path(__file__).parent / "results" / "h200"
# Measured on an H200: device-to-device copies, and products of large bfloat16 matrices.
BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 780e12


@dataclass(frozen=True, slots=True)
class Row:
    workload: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: list[float]
    tokens_per_second: list[float]
    floor_seconds: float
    share_of_floor: list[float]
    steps: int


def engine(config: dict[str, object], options: argparse.Namespace):  # type: ignore[no-untyped-def]
    import torch

    from ostro.config import EngineConfig
    from ostro.engine.core import EngineCore
    from ostro.runner.devices import pick_dtype
    from ostro.runner.load import make_runner
    from ostro.torch_models.build import build_model

    device = torch.device("cuda")
    model = build_model(config, dtype=pick_dtype("auto", device), device=device, max_seq_len=options.max_seq_len)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.02)
    settings = EngineConfig(
        max_batch_tokens=options.max_batch_tokens,
        max_batch_seqs=options.max_batch_seqs,
        page_size=options.page_size,
        cuda_graphs=not options.no_cuda_graphs,
        deterministic=options.deterministic,
        quantize=options.quantize,
        kv_dtype=options.kv_dtype,
    )
    core = EngineCore(make_runner(model, settings))
    # As the engine's process does: what is loaded stays.
    gc.collect()
    gc.freeze()
    return core


def run(core, work: list[Work]) -> tuple[float, int]:  # type: ignore[no-untyped-def]
    """Seconds and steps."""
    from ostro.engine.request import Request
    from ostro.sampling_params import SamplingParams

    core.scheduler.kv.clear_cache()
    before = core.scheduler.counters.steps
    counts: Counter[int] = Counter()
    began = time.perf_counter()
    for id, each in enumerate(work):
        params = SamplingParams(max_tokens=each.output, temperature=0.6, ignore_eos=True)
        core.add(Request(id=id, prompt_ids=tuple(each.prompt), params=params, seed=id))
    while core.has_work:
        for gain in core.step():
            counts[gain.request_id] += len(gain.token_ids)
    seconds = time.perf_counter() - began
    assert [counts[id] for id in range(len(work))] == [each.output for each in work], "some output has a wrong length"
    return seconds, core.scheduler.counters.steps - before


def floor(config: dict[str, object], work: list[Work]) -> float:
    """Seconds at best, all requests running at once."""
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, layers = size["hidden_size"], size["num_hidden_layers"]
    queries, keys = (size[f"num_{kind}_heads"] * size["head_dim"] for kind in ("attention", "key_value"))
    per_layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * size["intermediate_size"]
    head = hidden * size["vocab_size"]
    steps = max(each.output for each in work)
    prompt_tokens = sum(len(each.prompt) for each in work)
    # Of equal beginnings one is computed, and read once a step.
    first = work[0].prompt
    shared = min(
        next((at for at, (a, b) in enumerate(zip(first, each.prompt, strict=False)) if a != b), len(first))
        for each in work
    )
    decoded_keys = sum(sum(range(len(each.prompt) + 1, len(each.prompt) + each.output)) for each in work)
    if len(work) > 1:
        prompt_tokens -= shared * (len(work) - 1)
        decoded_keys -= shared * (sum(each.output - 1 for each in work) - (steps - 1))
    attended = sum(len(each.prompt) ** 2 / 2 for each in work)
    prompts = (2 * layers * per_layer * prompt_tokens + 4 * layers * queries * attended) / FLOPS_PER_SECOND
    weights = (steps - 1) * 2 * (layers * per_layer + head) / BYTES_PER_SECOND
    products = 2 * (layers * per_layer + head) * sum(each.output - 1 for each in work) / FLOPS_PER_SECOND
    return prompts + max(weights, products) + decoded_keys * 2 * 2 * keys * layers / BYTES_PER_SECOND


def measure(core, config: dict[str, object], name: str) -> Row:  # type: ignore[no-untyped-def]
    work = WORKLOADS[name]()
    run(core, work)
    (first, steps), (second, _) = run(core, work), run(core, work)
    output = sum(each.output for each in work)
    best = floor(config, work)
    return Row(
        workload=name,
        requests=len(work),
        prompt_tokens=sum(len(each.prompt) for each in work),
        output_tokens=output,
        seconds=[first, second],
        tokens_per_second=[output / first, output / second],
        floor_seconds=best,
        share_of_floor=[best / first, best / second],
        steps=steps,
    )


def cold_start(options: argparse.Namespace) -> float:
    """Seconds from the start of a process to its first token, with no compiled kernel on disk; weights are random."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        command = [sys.executable, __file__, "first-token", "--config", str(options.config)]
        subprocess.run(command, check=True, env={**os.environ, "TRITON_CACHE_DIR": cache})
        return time.perf_counter() - began


def first_token(config: dict[str, object], options: argparse.Namespace) -> None:
    """Runs in a process of its own; says when it got how far."""
    began = time.perf_counter()
    core = engine(config, options)
    ready = time.perf_counter()
    run(core, [Work(list(range(128)), 2)])
    ended = time.perf_counter()
    print(f"  imports, weights, kernels {ready - began:.1f} s, first tokens {ended - ready:.1f} s", flush=True)


def profile(core, work: list[Work], name: str) -> None:  # type: ignore[no-untyped-def]
    """Where the time goes: kernels on the device, functions on the host."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as device_profile

    run(core, work)
    with device_profile(activities=[ProfilerActivity.CUDA]) as seen:
        seconds, steps = run(core, work)
    print(f"== {name}: {seconds:.3f} s, {steps} steps; kernels:")
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))
    host = cProfile.Profile()
    host.runcall(run, core, work)
    pstats.Stats(host).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=[*WORKLOADS, "all", "cold-start", "first-token"])
    parser.add_argument("--config", type=Path, required=True, help="a config.json that names the shape")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--max-batch-seqs", type=int)
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--quantize", choices=["none", "fp8"], default="none")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", action="store_true", help="under bench/results/h200")
    parser.add_argument("--json", action="store_true", help="print each row as a line of JSON too")
    options = parser.parse_args()
    config = json.loads(options.config.read_text(encoding="utf-8"))
    if options.workloads == ["first-token"]:
        first_token(config, options)
        return
    rows: list[Row] = []
    starts: list[float] = []
    names = list(WORKLOADS) if "all" in options.workloads else options.workloads
    if "cold-start" in names:
        names.remove("cold-start")
        starts = [cold_start(options) for _ in range(2)]
        print(f"cold start to first token: {starts[0]:.1f} s, {starts[1]:.1f} s", flush=True)
    core = engine(config, options) if names else None
    for name in names:
        if options.profile:
            profile(core, WORKLOADS[name](), name)
            continue
        rows.append(row := measure(core, config, name))
        figures = " ".join(
            f"{s:8.3f} s {t:9.0f} tok/s" for s, t in zip(row.seconds, row.tokens_per_second, strict=True)
        )
        print(f"{name:8} {figures}  {max(row.share_of_floor):.0%} of the floor, {row.steps} steps", flush=True)
        if options.json:
            print(json.dumps(asdict(row)), flush=True)
    if options.save:
        _save(options.config.stem, rows, starts)


def _save(name: str, rows: list[Row], starts: list[float]) -> None:
    """Adds to what is there: workloads may be measured apart."""
    import torch

    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found |= {row.workload: asdict(row) for row in rows}
    if starts:
        found["cold_start_seconds"] = starts
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
