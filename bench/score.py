"""Scoring many continuations of one prompt: together, and pair by pair, in one run.

    python bench/score.py                       # 1,000 pairs after 500 shared tokens; the other side is timed on 20

Pair by pair is what a client without batches does to a server without a prefix cache: each pair alone, its prompt
computed again. `--cached` gives the other side the prefix cache too. The default model in fp32.
"""

import argparse
import json
import platform
import random
import time
from pathlib import Path

import torch

from ostro import LLM
from ostro.config import EngineConfig
from workloads import LARGEST_TOKEN

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=500, metavar="TOKENS")
    parser.add_argument("--continuation", type=int, default=8, metavar="TOKENS")
    parser.add_argument("--alone", type=int, default=20, metavar="N", help="pairs that are also scored one by one")
    parser.add_argument("--cached", action="store_true", help="one by one with the prefix cache")
    parser.add_argument("--save", type=Path, help=f"such as {RESULTS.name}/score.json")
    args = parser.parse_args()

    dice = random.Random(0)
    prompt = [dice.randint(1, LARGEST_TOKEN) for _ in range(args.prompt)]
    endings = [[dice.randint(1, LARGEST_TOKEN) for _ in range(args.continuation)] for _ in range(args.pairs)]
    together, alone = LLM(), LLM(config=EngineConfig(prefix_caching=args.cached))
    for llm in (together, alone):
        llm.score([prompt[:50]] * 2, endings[:2])

    before = together.core.scheduler.counters.computed_tokens
    start = time.perf_counter()
    scores = together.score([prompt] * args.pairs, endings, progress=True)
    seconds = time.perf_counter() - start
    computed = together.core.scheduler.counters.computed_tokens - before

    start = time.perf_counter()
    singly = [alone.score([prompt], [ending])[0] for ending in endings[: args.alone]]
    seconds_alone = (time.perf_counter() - start) / args.alone * args.pairs
    furthest = max(abs(one.logprob - other.logprob) for one, other in zip(scores, singly, strict=False))

    most = args.prompt + args.pairs * (args.continuation + together.core.scheduler.kv.page_size)
    print(f"{args.pairs} pairs together: {seconds:.1f} s, {computed} tokens computed (the prompt once: at most {most})")
    print(
        f"pair by pair: {seconds_alone:.1f} s, from {args.alone} of them; {seconds_alone / seconds:.1f} times as long"
    )
    print(f"log-likelihoods differ by at most {furthest:.1e}")
    if args.save is not None:
        record = {
            "pairs": args.pairs,
            "prompt_tokens": args.prompt,
            "continuation_tokens": args.continuation,
            "seconds": seconds,
            "computed_tokens": computed,
            "pair_by_pair_seconds": seconds_alone,
            "pair_by_pair_cached": args.cached,
            "ratio": seconds_alone / seconds,
            "largest_difference": furthest,
            "threads": torch.get_num_threads(),
            "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        }
        args.save.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
