"""What drafts bring on one GPU if all of them are right: a model of a named shape, weights random, one stream.

    python bench/gpu_speculative.py --config bench/configs/llama-3.1-8b.json
    python bench/gpu_speculative.py --config bench/configs/llama-3.1-8b.json --no-graphs

Random weights repeat nothing that could be looked up. So a first greedy run without drafts is the `prediction` of the
runs after it: what an edit would be that changes nothing. Between random logits there are near ties, which may fall
differently among several rows than alone; so embeddings are made to outweigh what layers add, and each token is surely
followed by the next. `same` says how many tokens are equal. Each is run three times, the first to warm up; times are
from the first token to the last.
"""

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path

from gpu import defaults, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a config.json that names the shape")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--deterministic", action="store_true", help="then all tokens must be the same")
    parser.add_argument("--no-graphs", action="store_true", help="launch the kernels of steps with drafts one by one")
    options = parser.parse_args()
    from ostro.engine.request import Request
    from ostro.engine.speculation import NgramSpeculation
    from ostro.sampling_params import SamplingParams

    core = engine(json.loads(options.config.read_text(encoding="utf-8")), defaults(deterministic=options.deterministic))
    make_certain(core.runner.model)
    if options.no_graphs:
        core.runner.part.mixed.most = 0
    prompt = tuple(random.Random(1).choices(range(1000), k=128))
    params = SamplingParams(max_tokens=options.length, temperature=0, ignore_eos=True)
    plain = Request(id=1, prompt_ids=prompt, params=params, seed=0)
    for _ in range(3):
        base, text, _ = timed(core, plain)
    print(f"without drafts   {(options.length - 1) / base:7.0f} tokens/s", flush=True)
    core.scheduler.speculation = NgramSpeculation()
    for number in range(3):
        seconds, tokens, steps = timed(core, replace(plain, predicted_ids=tuple(text)))
        same = next((at for at, (a, b) in enumerate(zip(text, tokens, strict=True)) if a != b), len(text))
        print(
            f"with drafts {number}    {(options.length - 1) / seconds:7.0f} tokens/s, {base / seconds:.2f} times; "
            f"{options.length / steps:.2f} tokens a step, {1e3 * seconds / steps:.2f} ms a step; same: {same}",
            flush=True,
        )
    counters = core.scheduler.counters
    print(f"accepted {counters.accepted_tokens} of {counters.drafted_tokens}")


def make_certain(model) -> None:  # type: ignore[no-untyped-def]
    """Each token is followed by the next one in the vocabulary, or, if the head is the embedding, by itself."""
    embeddings = model.body.embed_tokens.weight.data
    if model.lm_head.weight.data_ptr() != embeddings.data_ptr():
        model.lm_head.weight.data.copy_(embeddings.roll(1, 0))
    # Layers add some ten times what a random embedding is.
    embeddings.mul_(3000)


def timed(core, request) -> tuple[float, list[int], int]:  # type: ignore[no-untyped-def]
    """Seconds from the first token to the last, the tokens, and the steps."""
    core.scheduler.kv.clear_cache()
    before, first, tokens = core.scheduler.counters.steps, 0.0, list[int]()
    core.add(request)
    while core.has_work:
        gains = core.step()
        if gains and not tokens:
            first = time.perf_counter()
        tokens += [token for gain in gains for token in gain.token_ids]
    return time.perf_counter() - first, tokens, core.scheduler.counters.steps - before


if __name__ == "__main__":
    main()
