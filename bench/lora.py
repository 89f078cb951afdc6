"""Eight adapters on one base: a mixed batch against the same batch of the base alone, in one run.

    python bench/lora.py                        # 16 and 32 sequences, 64 tokens in, 64 out, medians of 3
    python bench/lora.py --requests 24 --uneven # 2 to 4 sequences an adapter

The default model, on whatever runs it here; random adapters of rank 8 on all projections, as PEFT saves them. Both
sides have the same prompts and lengths. The runs alternate, so that a busy moment of the machine hits both. The prefix
cache is emptied before each run.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ostro import LLM, SamplingParams
from ostro.weights import open_checkpoint
from workloads import fixed

RESULTS = Path(__file__).parent / "results"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Row:
    requests: int
    sequences_an_adapter: list[int]
    base_seconds: list[float]
    mixed_seconds: list[float]
    base_tokens_per_second: float
    mixed_tokens_per_second: float
    ratio: float


def write_adapters(directory: Path, count: int, rank: int) -> dict[str, Path]:
    """Random adapters for all projections of the default model."""
    shapes = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in open_checkpoint(None).tensors()
        if name.removesuffix(".weight").endswith(TARGETS)
    }
    paths = {}
    for index in range(count):
        path = paths[f"adapter-{index}"] = directory / f"adapter-{index}"
        path.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS)}
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for name, (out_features, in_features) in shapes.items():
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * 0.02
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * 0.02
        save_file(tensors, path / "adapter_model.safetensors")
    return paths


def shares(requests: int, adapters: int, *, uneven: bool) -> list[int]:
    """How many sequences each adapter gets: all as many, or 2, 3, 4, 2, 3, 4 …"""
    if not uneven:
        return [requests // adapters + (index < requests % adapters) for index in range(adapters)]
    return [2 + index % 3 for index in range(adapters)]


def measure(llm: LLM, counts: list[int], length: int, out: int, repeats: int) -> Row:
    works = fixed(sum(counts), length, out)
    prompts = [work.prompt for work in works]
    # In the order in which they would come: the adapters of neighbours differ.
    order = sorted((place, index) for index, count in enumerate(counts) for place in range(count))
    names = [f"adapter-{index}" for _, index in order]
    params = SamplingParams(max_tokens=out, temperature=0, ignore_eos=True)

    def timed(adapter: Sequence[str | None] | None) -> float:
        llm.core.scheduler.kv.clear_cache()
        start = time.perf_counter()
        completions = llm.generate(prompts, params, adapter=adapter)
        seconds = time.perf_counter() - start
        assert all(completion.num_generated == out for completion in completions)
        return seconds

    base, mixed = [], []
    for _ in range(repeats):
        base.append(timed(None))
        mixed.append(timed(names))
    generated = len(prompts) * out
    base_median, mixed_median = statistics.median(base), statistics.median(mixed)
    return Row(
        requests=len(prompts),
        sequences_an_adapter=counts,
        base_seconds=base,
        mixed_seconds=mixed,
        base_tokens_per_second=generated / base_median,
        mixed_tokens_per_second=generated / mixed_median,
        ratio=base_median / mixed_median,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument(
        "--uneven", action="store_true", help="2, 3 or 4 sequences an adapter, whatever --requests says"
    )
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", type=Path, help=f"such as {RESULTS.name}/lora.json")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        paths = write_adapters(Path(directory), args.adapters, args.rank)
        on_disk = sum((path / "adapter_model.safetensors").stat().st_size for path in paths.values())
        llm = LLM(adapters=paths)
    adapters = llm.core.runner.adapters  # type: ignore[attr-defined]
    print(f"{args.adapters} adapters: {on_disk >> 20} MiB of files, {adapters.nbytes >> 20} MiB in memory")
    rows = []
    print(f"{'requests':>8} {'base tok/s':>11} {'mixed tok/s':>12} {'ratio':>6}")
    for requests in [0] if args.uneven else args.requests:
        counts = shares(requests, args.adapters, uneven=args.uneven)
        measure(llm, counts, args.input, 4, 1)  # warm up
        row = measure(llm, counts, args.input, args.output, args.repeats)
        rows.append(row)
        print(
            f"{row.requests:>8} {row.base_tokens_per_second:>11.1f} {row.mixed_tokens_per_second:>12.1f} "
            f"{row.ratio:>6.1%}",
            flush=True,
        )
    if args.save is not None:
        record = {
            "model": llm.name,
            "dtype": "float32",
            "adapters": args.adapters,
            "rank": args.rank,
            "adapter_bytes": adapters.nbytes,
            "input_tokens": args.input,
            "output_tokens": args.output,
            "threads": torch.get_num_threads(),
            "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
            "torch": torch.__version__,
            "rows": [asdict(row) for row in rows],
        }
        args.save.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
