"""Time to the first token of a long system prompt: cold, and at the next start with `kv_persist`, which finds it.

python bench/kv_persist.py [--model REF] [--tokens 4000]

Each start is a process of its own. What is timed is one request from its submission to its first token, once the model
is loaded: the second start has only the index of the file in memory, and reads pages when they are asked for.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ostro import LLM, EngineConfig, SamplingParams

RESULTS = Path(__file__).parent / "results"


def first_token(config: EngineConfig, num_tokens: int) -> dict[str, float | list[int]]:
    llm = LLM(config=config)
    vocab = llm.core.runner.spec.vocab_size
    prompt = [(17 * at + at * at) % (vocab - 300) + 200 for at in range(num_tokens)]
    llm.generate([prompt[-8:]], SamplingParams(max_tokens=1, temperature=0))
    began = time.perf_counter()
    [completion] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    seconds = time.perf_counter() - began
    again = time.perf_counter()
    llm.core.close()
    counters = llm.core.scheduler.counters
    return {
        "seconds": seconds,
        "token_ids": completion.choices[0].token_ids,
        "cached": counters.cache_hits,
        "fetch_seconds": counters.fetch_seconds,
        "close_seconds": time.perf_counter() - again,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--disk", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.disk is not None:
        config = EngineConfig(model=args.model, kv_dtype=args.kv_dtype, kv_persist=True, kv_disk=args.disk)
        print(json.dumps(first_token(replace(config, device="cpu"), args.tokens)))
        return
    with tempfile.TemporaryDirectory() as disk:
        runs = [json.loads(subprocess.check_output([sys.executable, *sys.argv, "--disk", disk])) for _ in range(3)]
    cold, *warm = runs
    assert all(each["token_ids"] == cold["token_ids"] for each in warm), "a hit gave other tokens"
    for name, each in zip(("cold", "second start", "third start"), runs, strict=True):
        found, stopping = f"{each['cached']} tokens from disk", f"{each['close_seconds']:.2f} s to stop"
        print(f"{name}: {each['seconds']:.3f} s ({found}), {stopping}")
    print(f"second start: {warm[0]['seconds'] / cold['seconds']:.1%} of cold")
    record = {"tokens": args.tokens, "kv_dtype": args.kv_dtype, "runs": runs}
    (RESULTS / "kv_persist.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
