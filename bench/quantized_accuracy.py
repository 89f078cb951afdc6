"""What weights in 8 and 4 bits cost on a CPU, in accuracy and speed, and what they save in memory.

    python bench/quantized_accuracy.py                 # a minute or two on two cores
    python bench/quantized_accuracy.py --model DIR

Against the same model in float32, each in a process of its own:

    text      perplexity of the text of `fp8_accuracy`; how far the predictions at each of its tokens moved
    speed     tokens a second of processor time, of one sequence and of eight together, 64 tokens each, on one thread
    memory    what the process holds once it has computed them, and what `ostro plan` says of the weights
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch

from fp8_accuracy import QUESTIONS, RESULTS, TEXT, TOKENS, predictions
from ostro import LLM, SamplingParams
from ostro.backends.planning import plan
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig, Quantization

VARIANTS: tuple[Quantization, ...] = ("none", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Row:
    quantize: str
    perplexity: float
    divergence: float
    """Mean Kullback-Leibler divergence from the predictions in float32, in nats."""
    same_likeliest: float
    tokens_per_second_alone: float
    tokens_per_second_of_eight: float
    resident_mib: int
    weights_mib: int


def measure(model: str | None, quantize: Quantization, plain: Path) -> Row:
    """`plain` holds the predictions in float32; the first variant writes them."""
    config = EngineConfig(
        model=model, device="cpu", quantize=quantize, prefix_caching=False, kv_memory=64 << 20, threads=1
    )
    llm = LLM(config=config)
    alone, of_eight = (speed(llm, number) for number in (1, 8))
    resident = resident_mib()
    runner = llm.core.runner
    assert isinstance(runner, TorchRunner)
    ids = llm.tokenizer.encode(TEXT)
    found = predictions(runner.model, ids)
    if quantize == "none":
        torch.save(found, plain)
    expected = torch.load(plain, mmap=True)
    return Row(
        quantize=quantize,
        perplexity=math.exp(-found.gather(1, torch.tensor(ids[1:])[:, None]).mean().item()),
        divergence=(expected.exp() * (expected - found)).sum(-1).mean().item(),
        same_likeliest=(found.argmax(-1) == expected.argmax(-1)).float().mean().item(),
        tokens_per_second_alone=alone,
        tokens_per_second_of_eight=of_eight,
        resident_mib=resident,
        weights_mib=plan(model, config).weights_bytes >> 20,
    )


def speed(llm: LLM, number: int) -> float:
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS[:number]]
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    llm.generate(prompts, params.with_changes(max_tokens=2))
    started = time.process_time()
    llm.generate(prompts, params)
    return number * TOKENS / (time.process_time() - started)


def resident_mib() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--save", type=Path, default=RESULTS / "quantized_accuracy.json")
    parser.add_argument("--only", choices=get_args(Quantization), help=argparse.SUPPRESS)
    args = parser.parse_args()
    plain = args.save.with_suffix(".plain.pt")
    if args.only is not None:
        print(json.dumps(asdict(measure(args.model, args.only, plain))))
        return
    args.save.parent.mkdir(parents=True, exist_ok=True)
    print(f"{'':<6}{'perplexity':>11}{'divergence':>11}{'same likeliest':>15}{'alone/s':>9}{'of 8/s':>8}{'MiB':>7}")
    rows = []
    try:
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--only", variant, "--save", str(args.save)]
            if args.model is not None:
                command += ["--model", args.model]
            row = Row(**json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
            rows.append(row)
            print(
                f"{row.quantize:<6}{row.perplexity:>11.3f}{row.divergence:>11.5f}{row.same_likeliest:>15.1%}"
                f"{row.tokens_per_second_alone:>9.1f}{row.tokens_per_second_of_eight:>8.1f}{row.resident_mib:>7}",
                flush=True,
            )
    finally:
        plain.unlink(missing_ok=True)
    record = {
        "model": args.model or "the default model",
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    args.save.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
