"""Constrained rows against free ones on one GPU, in one run: what masks cost a batch.

    python bench/gpu_constrained.py --config bench/configs/llama-3.1-8b.json --rows 64 --ranks …/llama3/tokenizer.model
    python bench/gpu_constrained.py --config bench/configs/qwen3-0.6b.json --rows 12 64 --ranks …

The weights are random, so the text is nonsense, but each row has to follow its tool's signature all the same. A row
writes calls in an endless list: all rows write equally many tokens, in the same steps as their free twins. Both run in
turn. The vocabulary is Llama 3's 128k, from PyPI's llama-models.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from constrained import TOOLS, call_schema
from gpu import defaults, engine
from ostro.engine.constraint import Constraint, Prototype
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.grammar.check import check_structured
from ostro.grammar.compiler import GrammarCompiler
from ostro.sampling_params import SamplingParams
from ostro.structured import StructuredOutput
from structured import Ranks


def constraints(compiler: GrammarCompiler) -> list[tuple[Constraint, Prototype]]:
    """One for each tool: a list of calls without end."""
    found: list[tuple[Constraint, Prototype]] = []
    for name in TOOLS:
        schema = {"type": "array", "items": call_schema(name), "minItems": 1000}
        constraint = check_structured(StructuredOutput.from_schema(schema), {}, compiler.vocabulary.tokenizer)
        found.append((constraint, compiler.prepare(constraint)))
    return found


def run(core: EngineCore, structures: list[tuple[Constraint, Prototype]], rows: int, free: int, tokens: int) -> float:
    """Seconds. The first `free` rows have no structure."""
    core.scheduler.kv.clear_cache()
    began = time.perf_counter()
    for row in range(rows):
        constraint, prototype = (None, None) if row < free else structures[row % len(structures)]
        params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=constraint is None)
        prompt = tuple(range(1 + row, 33 + row))
        core.add(Request(id=row, prompt_ids=prompt, params=params, seed=row, constraint=constraint), prototype)
    written = 0
    while core.has_work:
        written += sum(len(gain.token_ids) for gain in core.step())
    assert written == rows * tokens, f"{written} tokens, not {rows * tokens}"
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a config.json that names the shape")
    parser.add_argument("--ranks", type=Path, required=True, metavar="FILE", help="Llama 3's vocabulary")
    parser.add_argument("--rows", type=int, nargs="+", default=[12, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    config = json.loads(args.config.read_text(encoding="utf-8"))
    core = engine(config, defaults())
    tokenizer = Ranks(args.ranks)
    structures = constraints(GrammarCompiler(lambda: tokenizer, config["vocab_size"]))
    print(f"{'rows':>5} {'constrained':>11} {'free tok/s':>11} {'tok/s':>9} {'ratio':>7}")
    for rows in args.rows:
        # All of them, half of them, and one: free rows must not wait for the others either.
        for constrained in (rows, rows // 2, 1):
            shares: dict[int, list[float]] = {rows: [], rows - constrained: []}
            for free in shares:
                run(core, structures, rows, free, 16)
            for _ in range(args.repeats):
                for free, seconds in shares.items():
                    seconds.append(run(core, structures, rows, free, args.tokens))
            free_seconds, own_seconds = shares[rows], shares[rows - constrained]
            ratio = statistics.median(a / b for a, b in zip(free_seconds, own_seconds, strict=True))
            speeds = [rows * args.tokens / statistics.median(each) for each in (free_seconds, own_seconds)]
            print(f"{rows:>5} {constrained:>11} {speeds[0]:>11.0f} {speeds[1]:>9.0f} {ratio:>7.1%}", flush=True)


if __name__ == "__main__":
    main()
