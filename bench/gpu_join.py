"""How long eight streams wait for a prompt that joins them, on one GPU: a model of a named shape, weights random.

    python bench/gpu_join.py --config bench/configs/qwen3-0.6b.json

Streams decode, and every 40 steps a prompt of 100 tokens joins for a single token. A gap is the time between the
arrival of two tokens of the streams. In one run, first with steps that launch their kernels one by one, then with
graphs: there the first join meets its size, the second captures a graph, and the others replay it.
"""

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median

from gpu import defaults, engine

STREAMS, APART = 8, 40


def gaps(core, joins: int, length: int) -> tuple[list[float], list[float]]:  # type: ignore[no-untyped-def]
    """Milliseconds between the streams' tokens: the longest around each join, and all others."""
    from ostro.engine.request import Request
    from ostro.sampling_params import SamplingParams

    draw = random.Random(1)
    core.scheduler.kv.clear_cache()
    for id in range(STREAMS):
        params = SamplingParams(max_tokens=APART * (joins + 2), temperature=0.6, ignore_eos=True)
        core.add(Request(id=id, prompt_ids=tuple(draw.choices(range(1000), k=64)), params=params, seed=id))
    steps, last, found, joined = 0, time.perf_counter(), [], 0
    while core.has_work:
        gains = core.step()
        if not any(gain.request_id == 0 for gain in gains):
            continue
        now = time.perf_counter()
        found.append(1e3 * (now - last))
        last, steps = now, steps + 1
        if steps % APART == 0 and joined < joins:
            prompt = tuple(draw.choices(range(1000), k=length))
            joined += 1
            params = SamplingParams(max_tokens=1, temperature=0.6, ignore_eos=True)
            core.add(Request(id=STREAMS + joined, prompt_ids=prompt, params=params, seed=joined))
    longest = [max(found[at * APART : at * APART + 8]) for at in range(1, joins + 1)]
    others = [gap for at, gap in enumerate(found) if at > APART // 2 and at % APART >= 8]
    return longest, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a config.json that names the shape")
    parser.add_argument("--joins", type=int, default=12)
    parser.add_argument("--length", type=int, default=100, help="tokens of a prompt that joins")
    options = parser.parse_args()
    from ostro.backends.cuda.mixed_graphs import max_graph_tokens

    config = json.loads(options.config.read_text(encoding="utf-8"))
    core = engine(config, defaults())
    mixed, most = core.runner.part.mixed, max_graph_tokens(core.runner.model)
    for name, tokens in (("one by one", 0), ("graphs", most)):
        mixed.most = 0
        gaps(core, 2, options.length)
        mixed.most = tokens
        longest, others = gaps(core, options.joins, options.length)
        settled = longest[2:]
        print(
            f"{name:10} streams' gap {median(others):.2f} ms (99 %: {sorted(others)[-len(others) // 100]:.2f}); "
            f"at a join {median(settled):.2f} (most {max(settled):.2f}): {median(settled) - median(others):+.2f} ms; "
            f"the first two joins {longest[0]:.2f} and {longest[1]:.2f} ms",
            flush=True,
        )
    print(f"graphs for up to {most} tokens; made: {[padding for _, padding in mixed.graphs.made]}")


if __name__ == "__main__":
    main()
