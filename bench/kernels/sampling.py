"""Times the device's sampler in a CUDA graph, after holding its tokens to the plain sampler's. One line a case.

    python bench/kernels/sampling.py [seconds]

Each graph samples from several batches of logits in turn, so that small ones do not time the cache alone; the time is
that of one batch. Flat logits are normal with deviation 3, whose nuclei are wider than any real one; steep ones have a
few tokens far above the rest, as models give them. The floor is one read of the logits at 4.3 TB/s.
"""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from ostro.backends.sampling.logprobs import logprob_table
from ostro.backends.sampling.sampler import sample
from ostro.engine.request import Request
from ostro.engine.sequence import Sequence
from ostro.kernels.gpu.sampling import SamplerTables, SlotSettings, sample_tokens
from ostro.sampling_params import SamplingParams

BANDWIDTH = 4.3e12
VOCAB = 151_936
KINDS = {
    "greedy": SlotSettings(slot=0, seed=0, temperature=0.0),
    "plain": SlotSettings(slot=0, seed=0, temperature=0.8),
    "min-p": SlotSettings(slot=0, seed=0, min_p=0.05),
    "top-k 50": SlotSettings(slot=0, seed=0, top_k=50),
    "top-p 0.9": SlotSettings(slot=0, seed=0, top_p=0.9),
    "top-k 50, top-p 0.95": SlotSettings(slot=0, seed=0, top_k=50, top_p=0.95),
    "top-k 5000, top-p 0.9": SlotSettings(slot=0, seed=0, top_k=5000, top_p=0.9),
    "penalties": SlotSettings(
        slot=0, seed=0, repetition_penalty=1.2, frequency_penalty=0.3, prompt_ids=(1, 2, 3), output_ids=(3, 4, 4)
    ),
}


def main() -> None:
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    began = time.perf_counter()
    cases = [partial(check, vocab, batch) for vocab, batch in ((151_936, 16), (128_256, 40), (50_257, 8))]
    cases += [partial(check_alone)]
    cases += [partial(clock, kind, batch, "flat") for kind in ("greedy", "plain") for batch in (1, 8, 64, 256)]
    cases += [partial(clock, kind, 256, shape) for kind in list(KINDS)[2:7] for shape in ("flat", "steep")]
    cases += [partial(clock, kind, 1, shape) for kind in list(KINDS)[2:6] for shape in ("flat", "steep")]
    cases += [partial(clock, "penalties", batch, "flat") for batch in (1, 256)]
    cases += [partial(clock_logprobs, batch) for batch in (1, 64)]
    for case in cases:
        if time.perf_counter() - began > limit:
            print("stopped: out of time")
            break
        try:
            print(case(), flush=True)
        except Exception as error:  # noqa: BLE001 -- one broken case must not hide the others
            print(f"FAILED {case.func.__name__}{case.args}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-3)
    print(f"{time.perf_counter() - began:.0f} s in all")


def check(vocab: int, batch: int) -> str:
    """All kinds of rows in one batch, flat and steep, several steps of each."""
    entries = [replace(kind, slot=slot, seed=slot) for slot, kind in enumerate(list(KINDS.values()) * (batch // 8))]
    wrong, drawn = [], 0
    for seed, shape in enumerate(("flat", "steep")):
        logits = make_logits(batch, vocab, shape, seed)
        tables, slots, tokens, errors = make_state(entries, vocab)
        seqs = [sequence_of(entry) for entry in entries]
        for step in range(4):
            tokens.fill_(-7)
            sample_tokens(logits, slots, tables, tokens, errors, truncated=True, penalties=True)
            expected = [sampled.token_id for sampled in sample(logits.float(), seqs)]
            for row, (token, other) in enumerate(zip(tokens.tolist(), expected, strict=True)):
                drawn += 1
                if token != other:
                    wrong.append(f"{shape} step {step} row {row} ({list(KINDS)[row % 8]}): {token} for {other}")
                # The device goes on from its own token, so the plain sampler must too.
                seqs[row].token_ids.append(token)
            assert not errors.any()
    verdict = "same tokens" if not wrong else f"{len(wrong)} DIFFER, first: " + "; ".join(wrong[:4])
    return f"check     vocab {vocab:6d} batch {batch:3d}: {drawn} draws, {verdict}"


def check_alone() -> str:
    entries = [replace(list(KINDS.values())[slot % 7], slot=slot, seed=slot) for slot in range(64)]
    logits = make_logits(64, VOCAB, "flat", 3)
    tables, slots, together, errors = make_state(entries, VOCAB)
    sample_tokens(logits, slots, tables, together, errors, truncated=True, penalties=False)
    tables, slots, alone, errors = make_state(entries, VOCAB)
    for row in range(64):
        one = slice(row, row + 1)
        sample_tokens(logits[one], slots[one], tables, alone[one], errors[one], truncated=True, penalties=False)
    return f"check     rows alone and in a batch of 64: {int((together != alone).sum())} differ"


def clock(kind: str, batch: int, shape: str) -> str:
    entry = KINDS[kind]
    entries = [replace(entry, slot=slot, seed=slot) for slot in range(batch)]
    tables, slots, tokens, errors = make_state(entries, VOCAB)
    sets = 4 if batch >= 64 else 32
    inputs = [make_logits(batch, VOCAB, shape, seed) for seed in range(sets)]

    def work() -> None:
        for logits in inputs:
            sample_tokens(logits, slots, tables, tokens, errors, truncated=entry.truncates, penalties=entry.penalises)

    taken = graph_time(work) / sets
    floor = batch * VOCAB * 2 / BANDWIDTH
    return f"time      {kind:22s} {shape:5s} batch {batch:3d}: {taken * 1e6:7.1f} us   floor {floor * 1e6:5.1f} us"


def clock_logprobs(batch: int) -> str:
    logits = make_logits(batch, VOCAB, "flat", 0)
    tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
    taken = graph_time(lambda: logprob_table(logits.float(), tokens, 5))
    return f"time      logprob_table, top 5         batch {batch:3d}: {taken * 1e6:7.1f} us"


def graph_time(work: Callable[[], object]) -> float:
    """Seconds that the device takes for the work, captured once and replayed back to back."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 8)
    return median(times[1:])


def make_logits(batch: int, vocab: int, shape: str, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(batch, vocab, device="cuda", generator=generator)
    if shape == "flat":
        return (logits * 3).bfloat16()
    heads = torch.randint(vocab, (batch, 60), device="cuda", generator=generator)
    heights = 20 - 10 * torch.rand(batch, 60, device="cuda", generator=generator)
    return (logits * 2).scatter(1, heads, heights).bfloat16()


def make_state(entries: list[SlotSettings], vocab: int) -> tuple[SamplerTables, Tensor, Tensor, Tensor]:
    tables = SamplerTables(len(entries), vocab, torch.device("cuda"))
    tables.admit(entries)
    slots = torch.arange(len(entries), dtype=torch.int32, device="cuda")
    return tables, slots, torch.zeros_like(slots), torch.zeros_like(slots, dtype=torch.int8)


def sequence_of(entry: SlotSettings) -> Sequence:
    params = SamplingParams(
        max_tokens=None,
        temperature=entry.temperature,
        top_k=entry.top_k,
        top_p=entry.top_p,
        min_p=entry.min_p,
        repetition_penalty=entry.repetition_penalty,
        presence_penalty=entry.presence_penalty,
        frequency_penalty=entry.frequency_penalty,
    )
    request = Request(id=0, prompt_ids=tuple(entry.prompt_ids) or (0,), params=params, seed=entry.seed)
    seq = Sequence(0, request, max_len=100_000)
    seq.token_ids.extend(entry.output_ids)
    return seq


if __name__ == "__main__":
    main()
