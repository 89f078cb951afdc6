"""One decode step of a whole model as a graph, by number of rows: what kernels cost where they run.

    python bench/kernels/step.py --config bench/configs/qwen3-0.6b.json --rows 1 8 128 256 --length 850

Weights are random, each row has its own pages. Prints microseconds a step, and the share of the floor: all weights and
all keys and values read once; of experts, as many as the rows would hit if they chose at random.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ostro.backends.cuda.choices import Choices
from ostro.backends.cuda.fused import FusedDecoder
from ostro.backends.cuda.measuring import this_gpu
from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.cuda.step_plan import SamplerKind, StepKind
from ostro.kernels.gpu.tilings import ROWS, candidates
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.experts import Experts

BYTES_PER_SECOND = 4.3e12
REPLAYS = 30


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    taken = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(start.elapsed_time(end)) / REPLAYS * 1e3)
    return sorted(taken)[2]


def read_bytes(model: Model, rows: int) -> float:
    """Bytes of all weights except experts that no row is expected to hit."""
    mixtures = [each for each in model.modules() if isinstance(each, Experts)]
    missed = [
        (1 - each.chosen / each.count) ** rows * (each.up.weight.nbytes + each.down.weight.nbytes) for each in mixtures
    ]
    return sum(parameter.nbytes for parameter in model.parameters()) - sum(missed)


def set_inputs(runner: GpuRunner, rows: int, length: int) -> None:
    """Every row has `length` tokens in pages of its own, and samples."""
    size = runner.spec.page_size
    pages = np.arange(rows * -(-length // size)).reshape(rows, -1)
    runner.part.attention.tables.update(pages.tolist())
    place = pages[:, -1] * size + (length - 1) % size
    inputs = np.zeros((5, rows), dtype=np.int32)
    inputs[1], inputs[2], inputs[3], inputs[4] = length - 1, length, place, np.arange(rows)
    runner.part.inputs[:, :rows] = torch.from_numpy(inputs).to(runner.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128, 256])
    parser.add_argument("--length", type=int, default=384)
    options = parser.parse_args()
    config = json.loads(options.config.read_text(encoding="utf-8"))
    model = build_model(config, dtype=torch.bfloat16, device=torch.device("cuda"), max_seq_len=4096)
    for parameter in model.parameters():
        parameter.data.normal_(float(parameter.dim() == 1), 0.02)
    shape = model.shape
    most = max(options.rows)
    runner = GpuRunner(
        model,
        page_size=64,
        num_pages=most * -(-options.length // 64) + 1,
        max_batch_tokens=1024,
        max_batch_seqs=most,
        graphs=False,
    )
    runner.part.attention.pages.memory.normal_()
    keys = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 2
    with torch.inference_mode():
        for rows in options.rows:
            set_inputs(runner, rows, options.length)
            floor = (read_bytes(model, rows) + rows * options.length * keys) / BYTES_PER_SECOND * 1e6
            for name, set_up in VARIANTS.items():
                set_up(runner)
                kind = StepKind(SamplerKind(truncated=False, penalties=False), keeps_logits=False)
                took = microseconds(captured(partial(runner.part.decode_step, rows, kind)))
                print(f"{options.config.stem} rows={rows:3} {name:28} {took:8.1f} µs  {floor / took:.0%}", flush=True)


def own_matmuls(decoder: FusedDecoder) -> Choices:
    """Our own matmuls for all rows, as the cost model tiles them."""
    device = this_gpu(torch.device("cuda")).multiprocessors
    table = {}
    for matmul in decoder.matmuls:
        found = {rows: candidates(matmul, rows, device, most=1) for rows in ROWS}
        table[matmul] = {rows: best[0] for rows, best in found.items() if best}
    return Choices(table)


def _with(overlaps: bool, *, own: bool, folds: bool = True) -> Callable[[GpuRunner], None]:
    def set_up(runner: GpuRunner) -> None:
        decoder = runner.part.decoder
        assert decoder is not None
        decoder.overlaps, decoder.folds = overlaps, folds
        decoder.choices = own_matmuls(decoder) if own else Choices()

    return set_up


VARIANTS: dict[str, Callable[[GpuRunner], None]] = {
    "own matmuls": _with(True, own=True),
    "own matmuls, norms apart": _with(True, own=True, folds=False),
    "own matmuls, no overlap": _with(False, own=True),
    "library's matmuls": _with(True, own=False),
    "library's, no overlap": _with(False, own=False),
}


if __name__ == "__main__":
    main()
