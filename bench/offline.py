"""Ostro against transformers' `generate`, offline, on the default model in fp32, in one run.

    python bench/offline.py                      # 1, 8 and 32 requests, 128 tokens in, 128 out, medians of 3
    python bench/offline.py --requests 8 --repeats 1

Both run the same weights on the same threads and generate the same number of tokens, greedily. transformers gets its
best case: one static batch of equal lengths, no padding. The runs alternate, so that a busy moment of the machine hits
both. The prefix cache is emptied before each run.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from ostro import LLM, SamplingParams
from ostro.weights import open_checkpoint

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    requests: int
    ostro_seconds: list[float]
    transformers_seconds: list[float]
    ostro_tokens_per_second: float
    transformers_tokens_per_second: float
    speedup: float
    same_tokens: float
    """Share of the requests whose tokens are all equal."""


def load_transformers() -> transformers.LlamaForCausalLM:
    checkpoint = open_checkpoint(None)
    config = transformers.LlamaConfig(**dict(checkpoint.config))
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


def draw_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    tokens = run()
    return time.perf_counter() - start, tokens


def measure(llm: LLM, peer: transformers.LlamaForCausalLM, prompts: list[list[int]], out: int, repeats: int) -> Row:
    params = SamplingParams(max_tokens=out, temperature=0, ignore_eos=True)

    def ours() -> list[list[int]]:
        llm.core.scheduler.kv.clear_cache()
        return [completion.choices[0].token_ids for completion in llm.generate(prompts, params)]

    def theirs() -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            whole = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=out,
                min_new_tokens=out,
                do_sample=False,
                pad_token_id=0,
            )
        tokens: list[list[int]] = whole[:, ids.shape[1] :].tolist()
        return tokens

    ours_seconds, theirs_seconds = [], []
    for _ in range(repeats):
        seconds, tokens = timed(ours)
        ours_seconds.append(seconds)
        seconds, peer_tokens = timed(theirs)
        theirs_seconds.append(seconds)
        assert [len(t) for t in tokens] == [len(t) for t in peer_tokens] == [out] * len(prompts)
    generated = len(prompts) * out
    best, peer_best = statistics.median(ours_seconds), statistics.median(theirs_seconds)
    return Row(
        requests=len(prompts),
        ostro_seconds=ours_seconds,
        transformers_seconds=theirs_seconds,
        ostro_tokens_per_second=generated / best,
        transformers_tokens_per_second=generated / peer_best,
        speedup=peer_best / best,
        same_tokens=sum(a == b for a, b in zip(tokens, peer_tokens, strict=True)) / len(prompts),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", type=Path, default=RESULTS / "offline.json")
    args = parser.parse_args()

    transformers.logging.set_verbosity_error()
    llm, peer = LLM(), load_transformers()
    rows = []
    print(f"{'requests':>8} {'ostro tok/s':>12} {'transformers tok/s':>19} {'speedup':>8} {'same tokens':>12}")
    for count in args.requests:
        prompts = draw_prompts(count, args.input, llm.core.runner.spec.vocab_size)
        measure(llm, peer, prompts, 8, 1)  # warm up
        row = measure(llm, peer, prompts, args.output, args.repeats)
        rows.append(row)
        print(
            f"{row.requests:>8} {row.ostro_tokens_per_second:>12.1f} {row.transformers_tokens_per_second:>19.1f} "
            f"{row.speedup:>7.2f}x {row.same_tokens:>12.0%}",
            flush=True,
        )
    record = {
        "model": llm.name,
        "dtype": "float32",
        "input_tokens": args.input,
        "output_tokens": args.output,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": [asdict(row) for row in rows],
    }
    args.save.parent.mkdir(parents=True, exist_ok=True)
    args.save.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
