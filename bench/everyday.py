"""Everyday prompts, answered natively and in float32: are the answers right, do they end, how far are the two apart?

    python bench/everyday.py                 # the default model; some minutes
    python bench/everyday.py --model FILE divergence
    python bench/everyday.py --model qwen2.5-coder-0.5b seeds

    answers      each prompt at temperature 0 and with the model's own sampling defaults, without max_tokens: how many
                 of those with an expectation are right, and how each ended
    seeds        the first ten prompts with an expectation, natively, at the model's sampling defaults with ten seeds:
                 how often each is answered wrongly, and whether it is answered rightly at temperature 0
    divergence   KL divergence, in nats, of the native next-token distributions from float32's, over float32's answers

Float32 is the torch path on the same file, dequantised. The prompts are in bench/texts/everyday.jsonl, one a line, with
the words of which one must be in a right answer.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ostro import LLM, Completion, SamplingParams
from ostro.backends.native.runner import NativeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig
from ostro.kernels.cpu.program import Piece
from ostro.kernels.paged_attention import PagedAttention
from ostro.kernels.paged_attention import Piece as TorchPiece

PROMPTS = Path(__file__).parent / "texts" / "everyday.jsonl"
# A request's own seed, so that a run can be repeated.
SEED = 1
NUM_ASKED, NUM_SEEDS = 10, 10
# Tokens of an answer within which its point must have been made.
POINT = 160

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    expect: tuple[str, ...]

    def is_answered(self, answer: str) -> bool:
        return not self.expect or any(re.search(rf"\b{re.escape(word)}\b", answer) for word in self.expect)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["answers", "divergence"], metavar="answers|seeds|divergence")
    parser.add_argument("--model", help="default: smollm2-135m")
    parser.add_argument("--verbose", action="store_true", help="show each answer's first line")
    args = parser.parse_args()
    prompts = read_prompts()
    if args.parts == ["seeds"]:
        report_seeds(prompts, LLM(config=EngineConfig(model=args.model, backend="native")))
        return
    native, exact = (LLM(config=EngineConfig(model=args.model, backend=backend)) for backend in ("native", "torch"))
    if "answers" in args.parts:
        for title, params in (("temperature 0", greedy()), ("the model's defaults", defaults())):
            report_answers(title, prompts, native, exact, params, verbose=args.verbose)
    if "seeds" in args.parts:
        report_seeds(prompts, native)
    if "divergence" in args.parts:
        report_divergence(prompts, native, exact)


def read_prompts() -> list[Prompt]:
    lines = (json.loads(line) for line in PROMPTS.read_text().splitlines())
    return [Prompt(line["prompt"], tuple(line.get("expect", ()))) for line in lines]


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=None, temperature=0.0)


def defaults() -> SamplingParams:
    return SamplingParams(max_tokens=None, seed=SEED)


def answer(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
    return llm.generate([llm.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in prompts], params)


def report_answers(
    title: str, prompts: Sequence[Prompt], native: LLM, exact: LLM, params: SamplingParams, *, verbose: bool
) -> None:
    graded = sum(bool(prompt.expect) for prompt in prompts)
    reasons: dict[str, list[str | None]] = {}
    for name, llm in (("native", native), ("float32", exact)):
        began = time.perf_counter()
        answers = answer(llm, prompts, params)
        right = sum(p.is_answered(a.text) for p, a in zip(prompts, answers, strict=True) if p.expect)
        reasons[name] = [each.choices[0].finish_reason for each in answers]
        ends = {reason: reasons[name].count(reason) for reason in sorted(set(map(str, reasons[name])))}
        longest = max(each.num_generated for each in answers)
        print(
            f"{title}, {name}: {right} of {graded} right; ended by {ends}; longest {longest} tokens; "
            f"{time.perf_counter() - began:.0f} s"
        )
        if verbose:
            for prompt, each in zip(prompts, answers, strict=True):
                mark = " " if prompt.is_answered(each.text) else "!"
                end = f"{each.choices[0].finish_reason}, {each.num_generated}"
                print(f"  {mark} {prompt.text} -> {each.text[:100]!r} ({end})")
    for ours, theirs in (("native", "float32"), ("float32", "native")):
        unfinished = [
            prompt.text
            for prompt, end, other in zip(prompts, reasons[ours], reasons[theirs], strict=True)
            if end != "stop" and other == "stop"
        ]
        print(f"{title}: unfinished in {ours} but not in {theirs}: {unfinished or 'none'}")


def report_seeds(prompts: Sequence[Prompt], llm: LLM) -> None:
    asked = [prompt for prompt in prompts if prompt.expect][:NUM_ASKED]
    certain = answer(llm, asked, SamplingParams(max_tokens=POINT, temperature=0.0))
    drawn = [answer(llm, asked, SamplingParams(max_tokens=POINT, seed=seed)) for seed in range(NUM_SEEDS)]
    print(f"sampling defaults: {llm.sampling_defaults.given}")
    for number, prompt in enumerate(asked):
        wrong = [each[number].text for each in drawn if not prompt.is_answered(each[number].text)]
        known = "right" if prompt.is_answered(certain[number].text) else "wrong"
        print(f"{prompt.text} {known} at temperature 0, wrong with {len(wrong)} of {NUM_SEEDS} seeds")
        for text in wrong:
            print(f"    {text[:100]!r}")


def report_divergence(prompts: Sequence[Prompt], native: LLM, exact: LLM) -> None:
    """Over the positions of float32's greedy answers, of at most 64 tokens each, and their prompts' ends."""
    answers = answer(exact, prompts, SamplingParams(max_tokens=64, temperature=0.0))
    values, agree = [], []
    for prompt, each in zip(prompts, answers, strict=True):
        asked = native.chat_prompt([{"role": "user", "content": prompt.text}])
        ids = [*asked, *each.choices[0].token_ids]
        positions = range(len(asked) - 1, len(ids) - 1)
        ours, theirs = native_logits(native, ids, positions), exact_logits(exact, ids, positions)
        values += list(divergence(theirs, ours))
        agree += list(ours.argmax(-1) == theirs.argmax(-1))
    print(
        f"KL divergence from float32: mean {np.mean(values):.5f}, p99 {np.quantile(values, 0.99):.5f}, "
        f"same best token at {np.mean(agree):.2%} of {len(values)} positions"
    )


def native_logits(llm: LLM, ids: Sequence[int], positions: range) -> Logits:
    """Logits of a sequence that fits into one step, in the pool's first pages: nothing else may be under way."""
    runner = llm.core.runner
    assert isinstance(runner, NativeRunner)
    program, tokens = runner.program, np.array(ids, np.int32)
    assert program.spec.logits is not None
    pages = np.arange(-(-len(ids) // runner.spec.page_size), dtype=np.int32)
    pieces = [Piece(0, 0, len(ids), pages)]
    program.run(tokens, pieces, np.arange(0, dtype=np.int32), last=program.spec.head_step)
    blocks = []
    for at in range(positions.start, positions.stop, program.max_asked):
        asked = np.arange(at, min(at + program.max_asked, positions.stop), dtype=np.int32)
        program.run(tokens, pieces, asked, first=program.spec.head_step)
        blocks.append(program.buffer(program.spec.logits)[: len(asked), : runner.spec.vocab_size].copy())
    return np.concatenate(blocks)


def exact_logits(llm: LLM, ids: Sequence[int], positions: range) -> Logits:
    """The same by the torch path, likewise."""
    runner = llm.core.runner
    assert isinstance(runner, TorchRunner)
    size = runner.spec.page_size
    piece = TorchPiece(0, 0, len(ids), list(range(-(-len(ids) // size))))
    with torch.inference_mode():
        attention = PagedAttention(runner.cache, [piece], size)
        hidden = runner.model(torch.tensor(ids), torch.arange(len(ids)), attention)
        logits: Logits = runner.model.logits(hidden[positions.start : positions.stop]).numpy()
    return logits


def divergence(exact: Logits, ours: Logits) -> npt.NDArray[np.float64]:
    """KL(exact || ours) of each row."""
    theirs, own = log_softmax(exact), log_softmax(ours)
    result: npt.NDArray[np.float64] = (np.exp(theirs) * (theirs - own)).sum(-1)
    return result


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return result


if __name__ == "__main__":
    main()
