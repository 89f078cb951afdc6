"""How fast the engine is on one GPU: the workloads of `workloads.py` on a model of a named shape, weights random.

    python bench/gpu.py nano single batch8 --config bench/configs/qwen3-0.6b.json
    python bench/gpu.py all --config bench/configs/llama-3.1-8b.json --save
    python bench/gpu.py cold-start --config bench/configs/qwen3-0.6b.json
    python bench/gpu.py nano --config bench/configs/qwen3-0.6b.json --profile      # kernels and host phases
    python bench/gpu.py nano --config bench/configs/qwen3-0.6b.json --host         # the host alone

Each workload runs twice to warm up, which compiles kernels and captures graphs, and then twice for the record; every
output's length is checked. The cache of prefixes is emptied before each run. Temperature is 0.6, as nano-vllm has it.
The floor that a run is compared with is that of `floor.py`.

A kernel that is launched ahead of its inputs waits for the kernel before it, and a profile counts this wait as its own
time. `--profile` therefore lists kernels twice: with overlaps, whose total is true, and without, where each kernel's
time is its own.

`--host` leaves out everything that runs on the device but for copies: no graph is replayed and no kernel launched. The
time that is left is what the scheduler, the planning of steps and the reading of results take.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from floor import floor_seconds
from workloads import WORKLOADS, Work

RESULTS = Path(__file__).parent / "results" / "h200"
# When the process that started this one did so: see `cold_start`.
BEGAN = "OSTRO_BENCH_BEGAN"

P = ParamSpec("P")
R = TypeVar("R")


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


def settings(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    from ostro.config import EngineConfig

    return EngineConfig(
        max_seq_len=options.max_seq_len,
        max_batch_tokens=options.max_batch_tokens,
        max_batch_seqs=options.max_batch_seqs,
        page_size=options.page_size,
        cuda_graphs=not options.no_cuda_graphs,
        deterministic=options.deterministic,
        cascade_attention=not options.no_cascade_attention,
        # Random weights in 4 bits are made here, not by the engine.
        quantize="none" if options.quantize == "int4" else options.quantize,
        kv_dtype=options.kv_dtype,
        kernel_choices=options.kernel_choices,
        tensor_parallel=1,
    )


def random_model(config: dict[str, object], options: argparse.Namespace, device: str = "cuda"):  # type: ignore[no-untyped-def]
    import torch

    from ostro.backends.torch.devices import pick_dtype
    from ostro.torch_models.build import build_model

    place = torch.device(device)
    model = build_model(config, dtype=pick_dtype("auto", place), device=place, max_seq_len=options.max_seq_len)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.02)
    if options.quantize == "int4":
        pack(model)
    return model


def pack(model) -> None:  # type: ignore[no-untyped-def]
    """Gives the layers' projections random weights of 4 bits in groups of 128, as a quantised checkpoint has them."""
    import torch

    from ostro.backends.cuda.projections import PackedLinear
    from ostro.kernels.gpu.packed_words import Packed, pack_pairs
    from ostro.torch_models.layers import Linear

    for layer in model.layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, Linear):
                    continue
                (outs, ins), device = child.shape, child.weight.device
                words = torch.randint(-(2**31), 2**31, (outs, ins // 8), dtype=torch.int32, device=device)
                # Codes from 0 to 15 with the standard deviation of weights that are not quantised.
                scales = torch.full((outs, ins // 128), 0.02 / 4.6, dtype=torch.float16, device=device)
                pairs = pack_pairs(scales, torch.full_like(scales, 8.0))
                setattr(parent, name, PackedLinear(child, Packed(words, pairs, 4, 128, False)))
    torch.cuda.empty_cache()


def engine(config: dict[str, object], options: argparse.Namespace, model=None):  # type: ignore[no-untyped-def]
    from ostro.backends.loading import make_runner
    from ostro.engine.core import EngineCore

    model = random_model(config, options) if model is None else model
    core = EngineCore(make_runner(model, settings(options)))
    if options.no_overlaps:
        set_overlaps(core, False)
    # As the engine's process does: what is loaded stays.
    gc.collect()
    gc.freeze()
    return core


def set_overlaps(core, overlaps: bool) -> None:  # type: ignore[no-untyped-def]
    """Sets whether kernels are launched ahead of their inputs. Graphs already captured do not change."""
    if (decoder := core.runner.part.decoder) is not None:
        decoder.overlaps = overlaps


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


def measure(  # type: ignore[no-untyped-def]
    core, config: dict[str, object], name: str, *, quantize: str = "none", fp8_kv: bool = False, runs: int = 2
) -> Row:
    from ostro.models.architecture import Architecture
    from ostro.models.registry import describe

    work = WORKLOADS[name]()
    # Steps with prompts are captured when a second one of their size is met.
    for _ in range(2):
        run(core, work)
    timed = [run(core, work) for _ in range(runs)]
    seconds, (_, steps) = [each for each, _ in timed], timed[0]
    output = sum(each.output for each in work)
    described = describe(config)
    assert isinstance(described, Architecture), "only decoders have a floor"
    best = floor_seconds(described, work, quantize=quantize, fp8_kv=fp8_kv)
    return Row(
        workload=name,
        requests=len(work),
        prompt_tokens=sum(len(each.prompt) for each in work),
        output_tokens=output,
        seconds=seconds,
        tokens_per_second=[output / each for each in seconds],
        floor_seconds=best,
        share_of_floor=[best / each for each in seconds],
        steps=steps,
    )


# ---- the host alone


@contextmanager
def without_device_work(core) -> Iterator[None]:  # type: ignore[no-untyped-def]
    """Steps are planned, sent and fetched as ever, but nothing is computed: every token is 0."""
    import torch

    from ostro.backends.cuda.graphs import StepGraphs
    from ostro.backends.cuda.part import GpuPart
    from ostro.backends.cuda.sampling import Sampler
    from ostro.backends.cuda.step_plan import Mixed

    runner = core.runner
    shape, spec = runner.model.shape, runner.spec
    hidden = torch.zeros(spec.max_batch_tokens, shape.hidden_size, dtype=runner.dtype, device=runner.device)
    logits = torch.zeros(spec.max_batch_seqs, shape.vocab_size, dtype=runner.dtype, device=runner.device)
    runner.part.idle()

    def no_graph(self: object, size: int, kind: object) -> Callable[[], None]:
        return lambda: None

    def no_forward(self: GpuPart, step: Mixed) -> torch.Tensor:
        return hidden[: step.inputs.shape[1]]

    def no_head(self: GpuPart, rows: torch.Tensor) -> torch.Tensor:
        return logits[: len(rows)]

    def no_draw(self: Sampler, scores: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, *rest: object) -> None:
        pass

    with (
        patch.object(StepGraphs, "get", no_graph),
        patch.object(GpuPart, "forward", no_forward),
        patch.object(GpuPart, "head", no_head),
        patch.object(Sampler, "draw", no_draw),
    ):
        runner._drawn.tokens.zero_()
        runner._drawn.errors.zero_()
        yield


def measure_host(core, name: str) -> None:  # type: ignore[no-untyped-def]
    work = WORKLOADS[name]()
    with without_device_work(core):
        run(core, work)
        found = [run(core, work) for _ in range(2)]
    tokens = sum(each.output for each in work)
    figures = " ".join(
        f"{seconds:8.3f} s {seconds / steps * 1e6:7.1f} µs a step {seconds / tokens * 1e6:6.2f} µs a token"
        for seconds, steps in found
    )
    print(f"{name:8} host alone {figures}", flush=True)


# ---- cold start


def cold_start(options: argparse.Namespace) -> "Start":
    """The start of a process up to its first token, with no compiled kernel and no choice of kernels on disk; weights
    are random.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "first-token", "--config", str(options.config)]
        command += ["--kernel-choices", options.kernel_choices]
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "OSTRO_CACHE": cache, BEGAN: str(time.time())}
        output = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
        return Start(**json.loads(output.splitlines()[-1]))


@dataclass(frozen=True, slots=True)
class Start:
    seconds: dict[str, float]
    """By phase, in order, with the total."""
    compiling: dict[str, float]
    """When the process that compiles ahead had done what, in seconds since the start; empty if there was none."""
    slowest: str
    """The kernel that took it longest."""
    compiled: int
    """Kernels that it compiled, or found in the cache."""
    missed: int
    """Entries that first launches added to Triton's cache: they were compiled then."""

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if name != "total")
        moments = ", ".join(f"{name} at {seconds:.1f}" for name, seconds in self.compiling.items())
        ahead = f"{self.compiled} ahead, slowest {self.slowest} ({moments})" if self.compiling else "none ahead"
        return (
            f"cold start to first token: {self.seconds['total']:.1f} s ({phases})\n"
            f"  kernels: {ahead}; {self.missed} new in Triton's cache after that"
        )


def first_token(config: dict[str, object], options: argparse.Namespace) -> None:
    """Runs in a process of its own; prints what took how long, in order."""
    began = float(os.environ.get(BEGAN, time.time()))
    took = Phases(began)
    took.end("python")
    from ostro.backends.cuda.precompiling import Request, precompiler

    took.end("imports before torch")
    with precompiler(config, settings(options)) as started:
        took.end("start of the compiling process")
        import torch

        took.end("torch")
        from ostro.backends.cuda.choices import choose
        from ostro.backends.cuda.compiling import compile_kernels
        from ostro.backends.cuda.graphs import StepGraphs
        from ostro.backends.cuda.load import preparing_keys
        from ostro.backends.cuda.measuring import this_gpu
        from ostro.devices import DEVICE_KINDS

        took.end("other imports")
        with preparing_keys(torch.device("cuda")):
            square = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
            torch.mm(square, square)
            torch.cuda.synchronize()
            took.end("context and cuBLAS")
            if started is not None:
                started.begin(
                    Request(config, DEVICE_KINDS["cuda"].resolve(settings(options)), this_gpu(torch.device("cuda")))
                )
            model = random_model(config, options)
            took.end("weights")
            compiled = None if started is None else started.wait()
            took.end("wait for kernels")
        took.end("wait for keys")
        entries = cache_entries()
        with (
            patch("ostro.backends.cuda.part.compile_kernels", took.of("first launches", compile_kernels)),
            patch("ostro.backends.cuda.compiling.choose", took.of("choice of kernels", choose)),
            patch.object(StepGraphs, "_capture", took.of("capture", StepGraphs._capture)),
        ):
            core = engine(config, options, model)
            torch.cuda.synchronize()
            took.end("memory")
            run(core, [Work(list(range(128)), 2)])
            took.end("first tokens")
    found = Start(
        seconds={name: round(seconds, 3) for name, seconds in took.seconds.items()},
        compiling={} if compiled is None else {name: round(at - began, 3) for name, at in compiled.moments.items()},
        slowest="" if compiled is None else compiled.slowest,
        compiled=0 if compiled is None else compiled.kernels,
        missed=cache_entries() - entries,
    )
    print(json.dumps(asdict(found)), flush=True)


def cache_entries() -> int:
    return sum(each.is_dir() for each in Path(os.environ["TRITON_CACHE_DIR"]).iterdir())


class Phases:
    """Seconds by phase. A phase that runs within another is not counted as the other's."""

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {}
        self._began = self._since = began
        self._apart = 0.0

    def end(self, name: str) -> None:
        """Attributes the time since the last phase to `name`."""
        now = time.time()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self.seconds["total"] = now - self._began
        self._since = now

    def of(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, as a phase of its own."""

        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            before, apart = time.time(), self._apart
            result = function(*args, **kwargs)
            # Without phases within it.
            took = time.time() - before - (self._apart - apart)
            self.seconds[name] = self.seconds.get(name, 0.0) + took
            self._apart += took
            # The phase around it began later by as much.
            self._since += took
            return result

        return timed


# ---- profiles


def profile(core, work: list[Work], name: str) -> None:  # type: ignore[no-untyped-def]
    """Where the time goes: kernels on the device, with overlaps and without, and functions on the host."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as device_profile

    decoder = core.runner.part.decoder
    usual = decoder is not None and decoder.overlaps
    for overlaps in (False, True) if usual else (False,):
        set_overlaps(core, overlaps)
        core.runner.part.graphs.forget()
        core.runner.part.mixed.graphs.forget()
        run(core, work)
        with device_profile(activities=[ProfilerActivity.CUDA]) as seen:
            seconds, steps = run(core, work)
        print(f"== {name}, {'with' if overlaps else 'without'} overlaps: {seconds:.3f} s, {steps} steps; kernels:")
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))
    host = cProfile.Profile()
    host.runcall(run, core, work)
    pstats.Stats(host).sort_stats("tottime").print_stats(18)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=[*WORKLOADS, "all", "cold-start", "first-token"])
    parser.add_argument("--config", type=Path, required=True, help="a config.json that names the shape")
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--max-batch-seqs", type=int)
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-cascade-attention", action="store_true", help="each row reads a shared prefix for itself")
    parser.add_argument("--quantize", choices=["none", "fp8", "int4"], default="none")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--kernel-choices", default="auto", metavar="auto|off|FILE")
    parser.add_argument("--no-overlaps", action="store_true", help="launch no kernel ahead of its inputs")
    parser.add_argument("--runs", type=int, default=2, help="for the record, after the one that warms up")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--host", action="store_true", help="without the device's work")
    parser.add_argument("--save", action="store_true", help="under bench/results/h200")
    parser.add_argument("--json", action="store_true", help="print each row as a line of JSON too")
    return parser


def defaults(**changes: object) -> argparse.Namespace:
    """Options that `engine` needs, for benchmarks with options of their own."""
    return argparse.Namespace(**{**vars(arguments().parse_args(["all", "--config", "none"])), **changes})


def main() -> None:
    options = arguments().parse_args()
    config = json.loads(options.config.read_text(encoding="utf-8"))
    if options.workloads == ["first-token"]:
        first_token(config, options)
        return
    rows: list[Row] = []
    starts: list[Start] = []
    names = list(WORKLOADS) if "all" in options.workloads else options.workloads
    if "cold-start" in names:
        names.remove("cold-start")
        starts = [cold_start(options) for _ in range(2)]
        for start in starts:
            print(start, flush=True)
    core = engine(config, options) if names else None
    for name in names:
        if options.profile:
            profile(core, WORKLOADS[name](), name)
            continue
        if options.host:
            measure_host(core, name)
            continue
        fp8_kv = options.kv_dtype == "fp8"
        rows.append(row := measure(core, config, name, quantize=options.quantize, fp8_kv=fp8_kv, runs=options.runs))
        figures = " ".join(
            f"{s:8.3f} s {t:9.0f} tok/s" for s, t in zip(row.seconds, row.tokens_per_second, strict=True)
        )
        print(f"{name:8} {figures}  {max(row.share_of_floor):.0%} of the floor, {row.steps} steps", flush=True)
        if options.json:
            print(json.dumps(asdict(row)), flush=True)
    if options.save:
        _save(options.config.stem, rows, starts)


def _save(name: str, rows: list[Row], starts: list[Start]) -> None:
    """Adds to what is there: workloads may be measured apart."""
    import torch

    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found |= {row.workload: asdict(row) for row in rows}
    if starts:
        found["cold_start_seconds"] = [start.seconds["total"] for start in starts]
        found["cold_start_phases"] = [asdict(start) for start in starts]
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
