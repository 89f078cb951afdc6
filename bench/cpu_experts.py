"""A mixture of experts on a GPU with little memory: its experts on the CPU, everything else on the GPU. Weights random.

    python bench/cpu_experts.py                                          # Qwen3-30B-A3B in Q4_0, all experts on the CPU
    python bench/cpu_experts.py gpt-oss-20b --gpu-memory 12G --format MXFP4
    python bench/cpu_experts.py qwen3-30b-a3b --threads 8 --alone        # the CPU's part alone, by number of rows

torch gets no more of the GPU's memory than `--gpu-memory`. One layer's experts are packed from random blocks of the
format, and each layer has a copy of its own, so that none is found in a cache. Prompts and outputs are those of
`workloads.py`, shortened. Each workload runs once to warm up, which captures graphs, and then twice for the record.

What is printed for a step of one stream: the time of the whole, that of the CPU's operations, that of the GPU with the
CPU's part left out, and that of as many trips to the CPU and back on which it has nothing to do.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import byref
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from gpu import run
from ostro.backends.native.expert_steps import ExpertLowering
from ostro.backends.native.packing import pack
from ostro.config import EngineConfig, read_size
from ostro.formats.gguf_header import GGML_TYPES
from ostro.kernels.cpu.library import CMatrix, instruction_sets, library, panel_of
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.kernels.cpu.program import Allocate, Program
from ostro.models.architecture import Architecture, StoredTensor
from ostro.models.expert_layers import ExpertLayers, mixtures_of, with_cpu_experts
from ostro.models.registry import describe
from ostro.system.machine import num_cpus
from ostro.weights.arrays import WeightArray
from workloads import Work, fixed

CONFIGS = Path(__file__).parent / "configs"
MOST_ROWS = 1024
# What a block begins with, so that weights are as large as those of a trained model.
SCALES = {"Q4_0": np.float16(0.0045).tobytes(), "Q8_0": np.float16(0.0003).tobytes(), "MXFP4": bytes([119])}
WORKLOADS: Mapping[str, Callable[[], list[Work]]] = {
    "single": lambda: fixed(1, 128, 256),
    "batch8": lambda: fixed(8, 128, 64),
    "prefill": lambda: fixed(4, 2048, 1),
}


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    workload: str
    tokens: int
    seconds: list[float]
    tokens_per_second: list[float]


# ---- weights


def random_blocks(tensor: StoredTensor, format: str, dice: np.random.Generator) -> WeightArray:
    """A tensor of random blocks, whose scales are all the same."""
    shape = tensor.shape
    *stack, rows, columns = (*shape[:-2], shape[-1], shape[-2]) if tensor.transposed else shape
    kind = next(each for each in GGML_TYPES.values() if each.name == format)
    scale = np.frombuffer(SCALES[format], np.uint8)
    count = int(np.prod([*stack, rows])) * columns // kind.block_size
    blocks = dice.integers(0, 256, (count, kind.block_bytes), np.uint8)
    blocks[:, : len(scale)] = scale
    return WeightArray(format, shape, blocks.reshape(*stack, rows, -1), transposed=tensor.transposed)


def stored_format(model: str) -> str:
    """As checkpoints of the model are packed, in four bits where there are kernels."""
    if not model.startswith("gpt-oss"):
        return "Q4_0"
    number = next(number for number, each in GGML_TYPES.items() if each.name == "MXFP4")
    matrix = CMatrix(rows=64, cols=2880)
    return "Q8_0" if library().ostro_format(number, 0, byref(matrix)) < 0 else "MXFP4"


def arrays(layers: ExpertLayers, format: str) -> Iterator[tuple[str, WeightArray]]:
    dice = np.random.default_rng(0)
    for tensor in layers.tensors():
        if len(tensor.shape) - tensor.stacked == 2:
            yield tensor.name, random_blocks(tensor, format, dice)
        else:
            yield tensor.name, WeightArray.of(dice.standard_normal(tensor.shape, np.float32) * np.float32(0.02))


class Copies(PackedFile):
    """Packed experts of one layer, copied for each of several."""

    def __init__(self, one: PackedFile, number: int) -> None:
        self._one, self.panel = one, one.panel
        whole = one._bytes
        self._copies: list[npt.NDArray[np.uint8]] = [aligned_copy(whole) for _ in range(number)]
        steps, matrices = one.program["steps"], len(one.matrices)
        self.program = one.program | {"steps": [*steps]}
        for layer in range(1, number):
            for step in steps:
                matrix = step["matrix"]
                own = step | ({} if matrix is None else {"matrix": matrix + layer * matrices})
                self.program["steps"].append(own)
        self.program["head_step"] = self.program["logits_step"] = len(self.program["steps"])
        self.matrices = one.matrices * number
        self._vectors = one._vectors
        self._bytes = whole
        self.nbytes = number * one.nbytes

    def pointed(self):  # type: ignore[no-untyped-def]
        found = (CMatrix * len(self.matrices))(*(each.described() for each in self.matrices))
        of_one = len(self._one.matrices)
        for number, (matrix, entry) in enumerate(zip(found, self.matrices, strict=True)):
            library().ostro_point(byref(matrix), self._copies[number // of_one].ctypes.data + entry.at)
        return found


def aligned_copy(whole: npt.NDArray[np.uint8], align: int = 1 << 21) -> npt.NDArray[np.uint8]:
    """In memory that begins where a huge page may."""
    memory = np.empty(len(whole) + align, np.uint8)
    start = -memory.ctypes.data % align
    memory[start : start + len(whole)] = whole
    return memory[start : start + len(whole)]


def random_experts(layers: ExpertLayers, format: str) -> Copies:
    first = ExpertLayers(layers.shape, layers.backbone, layers.mixtures[:1])
    with open(os.memfd_create("experts"), "w+b") as file:
        writer = PackedWriter(file, panel_of(instruction_sets()[0]), threads=num_cpus())
        writer.finish(pack(first, arrays(first, format), writer, bits=0).to_json())
        return Copies(PackedFile(file, Path("memory")), len(layers.mixtures))


# ---- the CPU alone


def alone(weights: Copies, threads: Sequence[int], rows: Sequence[int]) -> None:
    """Rows through all layers, one after the other: bytes of the experts that are hit, by time."""
    steps = weights.program["steps"]
    count, chosen = steps[0]["experts"], steps[0]["chosen"]
    hidden = weights.program["hidden_size"]
    number = len(steps) // ExpertLowering.STEPS
    of_expert = sum(each.nbytes for each in weights._one.matrices) / count
    dice = np.random.default_rng(1)
    for used in threads:
        program = Program(
            weights, isa=instruction_sets()[0], num_pages=0, max_tokens=MOST_ROWS, max_asked=1, threads=used
        )
        given = program.buffer(ExpertLowering.GIVEN)
        for amount in rows:
            experts = np.stack([dice.permutation(count)[:chosen] for _ in range(amount)])
            given[:amount, :hidden] = dice.standard_normal((amount, hidden))
            given[:amount, hidden : hidden + chosen] = experts
            given[:amount, hidden + chosen : hidden + 2 * chosen] = 1 / chosen
            runs = [
                program.rowwise_run(first, first + ExpertLowering.STEPS, amount)
                for first in range(0, len(steps), ExpertLowering.STEPS)
            ]
            times = []
            for _ in range(3 if amount < 64 else 1):
                began = time.perf_counter()
                for each in runs:
                    each()
                times.append(time.perf_counter() - began)
            took, read = min(times), of_expert * len(np.unique(experts)) * number
            print(
                f"  CPU alone, {used:3} threads, {amount:4} rows: {took * 1e3:8.2f} ms for {number} layers, "
                f"{read / took / 1e9:6.1f} GB/s, {amount / took:8.1f} rows/s",
                flush=True,
            )


# ---- with the GPU


def engine(config: Mapping[str, object], weights: Copies, options: argparse.Namespace):  # type: ignore[no-untyped-def]
    import torch

    from ostro.backends.cuda.cpu_experts import CpuMixtures
    from ostro.backends.loading import make_runner
    from ostro.engine.core import EngineCore
    from ostro.torch_models.build import build_described

    described = describe(config, max_seq_len=options.max_seq_len)
    assert isinstance(described, Architecture)
    there, _ = with_cpu_experts(described, options.layers)
    device = torch.device("cuda")
    model = build_described(there, dtype=torch.bfloat16, device=device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.02)

    def make(allocate: Mapping[int, Allocate]) -> Program:
        isa, threads = instruction_sets()[0], options.threads
        return Program(
            weights, isa=isa, num_pages=0, max_tokens=MOST_ROWS, max_asked=1, threads=threads, allocate=allocate
        )

    mixtures = CpuMixtures(make, device)
    mixtures.attach(model)
    settings = EngineConfig(
        device="cuda",
        max_seq_len=options.max_seq_len,
        kv_memory=options.kv_memory,
        max_batch_tokens=options.max_batch_tokens,
        max_batch_seqs=64,
        kernel_choices="off",
    )
    return EngineCore(make_runner(model, settings)), mixtures


def measure(core, model: str, name: str, runs: int) -> Row:  # type: ignore[no-untyped-def]
    work = WORKLOADS[name]()
    warm = [Work(each.prompt, min(each.output, 8)) for each in work]
    for _ in range(2):
        run(core, warm)
    seconds = [run(core, work)[0] for _ in range(runs)]
    tokens = sum(len(each.prompt) if name == "prefill" else each.output for each in work)
    row = Row(model, name, tokens, seconds, [tokens / each for each in seconds])
    best = " ".join(f"{each:8.1f}" for each in row.tokens_per_second)
    what = "prompt tokens/s" if name == "prefill" else "tokens/s"
    print(f"  {name:8} {best} {what}", flush=True)
    return row


def step_parts(core, mixtures) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Milliseconds of a decode step of one stream."""
    short, long = [Work(list(range(16)), 16)], [Work(list(range(16)), 80)]
    run(core, short)

    def step_ms() -> float:
        # The difference of two lengths is decode steps alone.
        return statistics.median((run(core, long)[0] - run(core, short)[0]) / 64 * 1e3 for _ in range(3))

    whole = step_ms()
    mixtures.program.profile()
    run(core, long)
    profile = {name: seconds / 80 * 1e3 for name, seconds in mixtures.program.profile().items() if seconds}
    found = {"whole": whole, **{f"CPU: {name}": ms for name, ms in profile.items()}}
    # Graphs anew, without the host functions.
    with patch("ostro.backends.cuda.cpu_experts.launch_host_function", lambda *arguments: None):
        core.runner.part.graphs.forget()
        run(core, short)
        found["GPU, without the CPU's part"] = step_ms()
    core.runner.part.graphs.forget()
    run(core, short)
    return found


def trips(mixtures, number: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Milliseconds of as many trips as a step has, on which the CPU finds nothing to do, as one graph; and with kernels
    that read and write the machine's memory themselves instead of copies.
    """
    import torch

    from ostro.backends.cuda.driver import launch_host_function
    from ostro.kernels.gpu.experts import Ending, add_up
    from ostro.kernels.gpu.handover import hand_over
    from ostro.kernels.gpu.routing import Routed

    device = torch.device("cuda")
    width, chosen = mixtures._sums.shape[1], mixtures.program.spec.steps[0].chosen
    x, slots = torch.zeros(1, width, device=device, dtype=torch.bfloat16), torch.full((1,), -1, device=device)
    experts = torch.zeros(1, chosen, device=device, dtype=torch.int32)
    weights = torch.zeros(1, chosen, device=device)

    def copied() -> None:
        for layer in range(number):
            add_up(mixtures._begin(layer, x, experts, weights, slots, beside=False)(), None, Ending(residual=x))

    def direct() -> None:
        for layer in range(number):
            hand_over(x, Routed(experts, weights), slots, mixtures._given)
            run = mixtures._run(layer, 1)
            launch_host_function(torch.cuda.current_stream().cuda_stream, run.function, run.argument)
            add_up(mixtures._sums[:1], None, Ending(residual=x))

    def no_host() -> None:
        with patch("ostro.backends.cuda.cpu_experts.launch_host_function", lambda *arguments: None):
            copied()

    found = {}
    for name, body in {"copies": copied, "copies, no host function": no_host, "no copies": direct}.items():
        try:
            found[f"trips, {name}"] = graph_ms(body)
        except Exception as error:  # noqa: BLE001 (a figure that is missing must not cost the others)
            print(f"  trips, {name}: {error!r}", flush=True)
    return found


def graph_ms(body: Callable[[], None]) -> float:
    import torch

    with torch.inference_mode():
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            body()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            body()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(20):
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def measured(name: str, options: argparse.Namespace, end: float) -> list[Row]:
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    if options.shrink:
        config["num_hidden_layers"] = options.shrink
    described = describe(config, max_seq_len=options.max_seq_len)
    assert isinstance(described, Architecture)
    options.layers = len(mixtures_of(described)) if options.cpu_experts == "all" else int(options.cpu_experts)
    _, experts = with_cpu_experts(described, options.layers)
    format = options.format or stored_format(name)
    began = time.monotonic()
    weights = random_experts(experts, format)
    print(
        f"{name}, {options.layers} layers' experts in {format} on the CPU: {weights.nbytes / 1e9:.1f} GB, made in "
        f"{time.monotonic() - began:.1f} s; {num_cpus()} CPUs, {instruction_sets()[0]}",
        flush=True,
    )
    alone(weights, options.alone_threads or [options.threads], options.alone_rows)
    if options.alone:
        return []
    import torch

    core, mixtures = engine(config, weights, options)
    print(f"  {core.runner.spec.precision}; {time.monotonic() - began:.1f} s", flush=True)
    rows = []
    for workload in options.workloads:
        if time.monotonic() < end:
            rows.append(measure(core, name, workload, options.runs))
    most = torch.cuda.max_memory_reserved() / 1e9
    print(f"  GPU memory at most {most:.2f} GB of torch's, and keys and values are part of it", flush=True)
    if time.monotonic() < end:
        found = step_parts(core, mixtures) | trips(mixtures, options.layers)
        for part, ms in found.items():
            print(f"  one stream's step, {part}: {ms:.3f} ms", flush=True)
        print(json.dumps({"model": name, "parts": found}), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["qwen3-30b-a3b"], help="names of files in bench/configs")
    parser.add_argument("--gpu-memory", type=read_size, default=12 << 30, help="the most that torch takes (12G)")
    parser.add_argument("--kv-memory", type=read_size, default=1 << 30)
    parser.add_argument("--cpu-experts", default="all", help="layers whose experts are on the CPU (all)")
    parser.add_argument(
        "--format", choices=SCALES, help="of the experts (Q4_0; of gpt-oss MXFP4, or Q8_0 without kernels for that)"
    )
    parser.add_argument("--threads", type=int, default=max(1, num_cpus() - 1))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--alone", action="store_true", help="leave out the GPU")
    parser.add_argument("--alone-threads", type=int, nargs="+")
    parser.add_argument("--alone-rows", type=int, nargs="+", default=[1, 8, 512])
    parser.add_argument("--shrink", type=int, help="keep this many layers alone, for a rehearsal")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further workload after this time")
    parser.add_argument("--save", type=Path, help="write results as JSON")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    if not options.alone:
        import torch

        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gpu_memory / total))
    rows = []
    for name in options.models:
        if time.monotonic() < end:
            rows += measured(name, options, end)
    if options.save is not None:
        options.save.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
