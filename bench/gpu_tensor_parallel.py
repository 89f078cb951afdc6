"""Whether a model divided over ranks gives one rank's tokens on a GPU: sharded kernels, plans and messages.

    python bench/gpu_tensor_parallel.py --config bench/configs/qwen3-0.6b.json --layers 4
    python bench/gpu_tensor_parallel.py --config bench/configs/llama-3.1-8b.json --layers 2 --quantize fp8
    python bench/gpu_tensor_parallel.py --config bench/configs/llama-3.1-8b.json --ranks 4 --backend nccl

All ranks share the first GPU with gloo, which sums through the host: this shows that tokens are right, not how fast
they are, and no graphs are captured. NCCL wants a GPU for each rank. Weights are random and in float32, where sums in
another order change hardly any token; in bfloat16 or with fp8 many sequences part ways after a while. How many part
ways by rounding alone is shown by one rank that runs them in smaller batches.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ostro.backends.backend import open_model
from ostro.backends.cuda.load import first_rank
from ostro.backends.loading import load_runner
from ostro.backends.ranks.ranks import Ranks
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner
from ostro.sampling_params import SamplingParams
from ostro.weights import open_checkpoint
from random_model import write_weights

Tokens = dict[tuple[int, int], list[int]]


def requests(vocab_size: int, output: int, seed: int) -> list[Request]:
    """Greedy, seeded, truncated, penalised, with bias, forked; prompts of many lengths, some sharing a beginning."""
    kinds = [
        SamplingParams(max_tokens=output, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=output, temperature=1.0, ignore_eos=True),
        SamplingParams(max_tokens=output, temperature=0.8, top_k=50, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=output, temperature=1.0, frequency_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=output, temperature=0.5, logit_bias={7: 5.0}, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=output, temperature=1.0, n=3, ignore_eos=True),
    ]
    dice = random.Random(seed)
    shared = [dice.randrange(vocab_size) for _ in range(200)]
    made = []
    for id in range(4 * len(kinds)):
        own = [dice.randrange(vocab_size) for _ in range(dice.choice([1, 5, 40, 300]))]
        prompt = tuple(shared + own if id % 3 == 0 else own)
        made.append(Request(id=id, prompt_ids=prompt, params=kinds[id % len(kinds)], seed=1000 * seed + id))
    return made


def run(runner: ModelRunner, asked: list[Request]) -> tuple[Tokens, float]:
    core = EngineCore(runner)
    tokens: Tokens = {}
    began = time.perf_counter()
    for request in asked:
        core.add(request)
    while core.has_work:
        for gain in core.step():
            tokens.setdefault((gain.request_id, gain.choice), []).extend(gain.token_ids)
    core.check_integrity()
    return tokens, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="fewer than the config says")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--quantize", choices=["none", "fp8"], default="none")
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and draws")
    options = parser.parse_args()
    config = json.loads(options.config.read_text(encoding="utf-8"))
    if options.layers is not None:
        config["num_hidden_layers"] = options.layers
    settings = EngineConfig(
        device="cuda",
        dtype="bfloat16" if options.quantize == "fp8" else options.dtype,
        quantize=options.quantize,
        max_seq_len=1024,
        kv_memory=2 << 30,
        max_batch_seqs=64,
        max_batch_tokens=1024,
        # Gloo cannot be captured: so that both run the same kernels.
        cuda_graphs=options.backend == "nccl",
    )
    devices = range(options.ranks) if options.backend == "nccl" else [0] * options.ranks
    with tempfile.TemporaryDirectory() as directory:
        # Spread far enough that choices are clear.
        write_weights(config, Path(directory), dtype="float32", spread=0.05)
        checkpoint = open_checkpoint(directory)
        asked = requests(config["vocab_size"], options.output, options.seed)
        alone, seconds = run(load_runner(checkpoint, settings), asked)
        rebatched, _ = run(load_runner(checkpoint, replace(settings, max_batch_seqs=8, max_batch_tokens=128)), asked)
        ranks = Ranks(options.ranks, backend=options.backend, devices=devices)
        try:
            together, seconds_together = run(
                first_rank(open_model(checkpoint, settings).divided(options.ranks), ranks), asked
            )
        finally:
            ranks.close()
    same, same_by_rounding = (sum(other[key] == alone[key] for key in alone) for other in (together, rebatched))
    prefixes = sum(_common(together[key], tokens) for key, tokens in alone.items())
    total = sum(map(len, alone.values()))
    print(
        json.dumps(
            {
                "config": options.config.stem,
                "ranks": options.ranks,
                "backend": options.backend,
                "dtype": settings.dtype,
                "quantize": options.quantize,
                "sequences": len(alone),
                "equal_sequences": same,
                "equal_on_one_rank_in_other_batches": same_by_rounding,
                "tokens": total,
                "tokens_before_the_first_difference": prefixes,
                "differing": {
                    f"request {key[0]}, choice {key[1]}": _common(together[key], tokens)
                    for key, tokens in alone.items()
                    if together[key] != tokens and options.dtype == "float32"
                },
                "seconds": [round(seconds, 2), round(seconds_together, 2)],
            }
        )
    )
    if options.dtype == "float32" and options.quantize == "none" and same < same_by_rounding:
        raise SystemExit("tokens differ where one rank's did not")


def _common(a: list[int], b: list[int]) -> int:
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


if __name__ == "__main__":
    main()
