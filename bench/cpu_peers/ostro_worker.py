"""Ostro's engine in a process of its own, for `bench/cpu.py`: one job as JSON on its command line, one JSON line back.

    python bench/cpu_peers/ostro_worker.py '{"task": "speed", "model": FILE, "settings": {}, "streams": [1], …}'

The task `turns` answers until its input ends; rounds.py describes that protocol.

What it times is what llama-batched-bench times. First the prompts alone, until each stream has a token. Then the same
prompts again, which the prefix cache shortens to their last page, and, from the step on that gave the last stream its
first token, as many steps as tokens are asked for. A step is the whole engine's: schedule, compute, sample, apply.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ostro
from ostro import LLM, SamplingParams
from ostro.config import EngineConfig
from ostro.engine.request import Request

WARMUP_TOKENS = 4
# What a stream may generate before the last one has its first token, where the prompts take several steps.
SLACK = 64


def main() -> None:
    job = json.loads(sys.argv[1])
    if "source" in job:
        check_source(job["source"])
    llm = LLM(config=EngineConfig(model=job["model"], **job["settings"]))
    tasks: dict[str, Callable[[LLM, Mapping[str, Any]], dict[str, object]]]
    tasks = {"describe": lambda *_: {}, "speed": speeds, "perplexity": perplexity}
    if job["task"] == "turns":
        turns(llm, job)
    else:
        print(json.dumps({"runner": describe(llm), **tasks[job["task"]](llm, job)}))


def check_source(directory: str) -> None:
    """Raises RuntimeError if this process runs another Ostro than it should."""
    if not Path(ostro.__file__).is_relative_to(directory):
        raise RuntimeError(f"{ostro.__file__} is imported, and not what is in {directory}.")


def turns(llm: LLM, job: Mapping[str, Any]) -> None:
    """Measures what each line of the input asks for. The prompts that are decoded stay in the prefix cache."""
    dice, vocab_size = random.Random(0), llm.core.runner.spec.vocab_size

    def prompts(number: int) -> list[list[int]]:
        return [[dice.randrange(vocab_size) for _ in range(job["input"])] for _ in range(number)]

    kept = prompts(job["streams"])
    prefill_seconds(llm, kept)
    print(json.dumps({"about": describe(llm)}), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["prefill", number]:
                seconds = prefill_seconds(llm, prompts(int(number)))
            case ["decode", streams, steps]:
                seconds = decode_seconds(llm, kept[: int(streams)], int(steps))
            case _:
                raise ValueError(f"unknown task: {line}")
        print(json.dumps({"seconds": seconds}), flush=True)


def describe(llm: LLM) -> str:
    """Backend and formats, as the engine describes them."""
    spec = llm.core.runner.spec
    return ", ".join(words for words in (spec.backend, spec.precision) if words)


def speeds(llm: LLM, job: Mapping[str, Any]) -> dict[str, object]:
    dice = random.Random(job["seed"])
    vocab_size = llm.core.runner.spec.vocab_size

    def prompts(number: int) -> list[list[int]]:
        return [[dice.randrange(vocab_size) for _ in range(job["input"])] for _ in range(number)]

    found = []
    for streams in job["streams"]:
        warm = prompts(streams)
        prefill_seconds(llm, warm)
        decode_seconds(llm, warm, WARMUP_TOKENS)
        fresh = prompts(streams)
        prefill = streams * job["input"] / prefill_seconds(llm, fresh)
        decode = streams * job["output"] / decode_seconds(llm, fresh, job["output"])
        found.append({"streams": streams, "prefill": prefill, "decode": decode})
    return {"speeds": found}


def prefill_seconds(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds until each prompt has its first token."""
    requests = _requests(llm, prompts, 1)
    began = time.perf_counter()
    for request in requests:
        llm.core.add(request)
    while llm.core.has_work:
        llm.core.step()
    return time.perf_counter() - began


def decode_seconds(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Seconds to decode `tokens` tokens per prompt, once all have their first."""
    core = llm.core
    requests = _requests(llm, prompts, tokens + 1 + SLACK)
    for request in requests:
        core.add(request)
    waiting = {request.id for request in requests}
    while waiting:
        waiting -= {progress.request_id for progress in core.step() if progress.token_ids}
    generated, began = 0, time.perf_counter()
    while generated < tokens * len(prompts):
        gained = sum(len(progress.token_ids) for progress in core.step())
        if gained != len(prompts):
            raise RuntimeError(f"A step gave {gained} tokens to {len(prompts)} streams: is there memory for them all?")
        generated += gained
    seconds = time.perf_counter() - began
    for request in requests:
        core.abort(request.id)
    while core.has_work:
        core.step()
    return seconds


def _requests(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return [llm.prepare(list(prompt), params) for prompt in prompts]


def perplexity(llm: LLM, job: Mapping[str, Any]) -> dict[str, object]:
    """llama-perplexity's: of the second half of each whole window of so many tokens, but for that half's first one."""
    with open(job["text"], encoding="utf-8") as file:
        # llama.cpp leaves out a file's last line end.
        ids = llm.tokenizer.encode(file.read().removesuffix("\n"))
    context = job["context"]
    windows = [ids[at : at + context] for at in range(0, len(ids) - context + 1, context)]
    seen = context // 2 + 1
    scores = llm.score([window[:seen] for window in windows], [window[seen:] for window in windows])
    scored = sum(score.num_tokens for score in scores)
    return {"perplexity": math.exp(-sum(score.logprob for score in scores) / scored), "scored": scored, "ids": ids}


if __name__ == "__main__":
    main()
