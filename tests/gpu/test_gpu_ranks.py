"""The GPU's runner on two ranks gives one rank's tokens: planned once, carried out by both. The ranks are threads here,
which take turns; `bench/gpu_tensor_parallel.py` has processes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from divided_models import ThreadCollective, ThreadGroup, divided
from native_models import savable_model
from scripted_grammar import scripted
from test_gpu_runner import CONFIGS, GREEDY, ON_GPU, SAMPLED, SHALLOW, STRUCTURE, on_cpu, requests, run, tokens
from thread_ranks import ThreadRanks
from triton_device import slow_in_the_interpreter
from triton_fp8 import round_as_gpus_do

from ostro.engine.core import EngineCore
from ostro.runner.gpu.part import GpuPart
from ostro.runner.gpu.projections import Fp8Linear
from ostro.runner.gpu.quantize import quantize_fp8
from ostro.runner.gpu.runner import GpuRunner
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.shard import Collective

RANKS, ROWS, PAGES = 2, 8, 256


@contextmanager
def two_ranks(
    config: Mapping[str, object], whole: Model, device: torch.device, *, pages: int = PAGES, budget: int = 64
) -> Iterator[tuple[EngineCore, ThreadRanks]]:
    group = ThreadGroup(RANKS)
    first, second = (part.to(device) for part in divided(config, whole, group))
    collectives: list[Collective] = [ThreadCollective(group, rank) for rank in range(RANKS)]
    part = GpuPart(
        second,
        page_size=16,
        num_pages=pages,
        max_batch_seqs=ROWS,
        tokens=torch.zeros(4096, dtype=torch.int32, device=device),
        captured=0,
        group=collectives[1],
    )
    ranks = ThreadRanks(group, [part])
    try:
        runner = GpuRunner(
            first,
            page_size=16,
            num_pages=pages,
            max_batch_tokens=budget,
            max_batch_seqs=ROWS,
            ranks=ranks,
            group=collectives[0],
        )
        yield EngineCore(runner), ranks
    finally:
        ranks.close()


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=slow_in_the_interpreter) for name in CONFIGS if name != "llama")]
)
def test_greedy_tokens_are_those_of_one_rank(name: str, device: torch.device) -> None:
    """Gemma-2 is not fused: its layers are torch's, with collectives of their own."""
    asked, whole = requests([GREEDY] * (6 if ON_GPU else 3)), savable_model(CONFIGS[name])
    with two_ranks(CONFIGS[name], whole, device, budget=12) as (core, ranks):
        assert tokens(run(core, asked)) == tokens(on_cpu(whole.to("cpu"), asked))
    assert ranks.longest < 16_000


@slow_in_the_interpreter
def test_sampled_tokens_are_those_of_one_rank(device: torch.device) -> None:
    """Only the first rank samples: the other reads its tokens on the device, drawn within the step or apart from it."""
    asked, whole = requests(SAMPLED), savable_model(SHALLOW)
    with two_ranks(SHALLOW, whole, device) as (core, _):
        assert tokens(run(core, asked)) == tokens(on_cpu(whole.to("cpu"), asked))


@slow_in_the_interpreter
def test_constrained_rows_are_sampled_late_for_both(device: torch.device) -> None:
    params = [SamplingParams(max_tokens=4, temperature=1.0), SamplingParams(max_tokens=4, temperature=0)]
    asked = [replace(each, constraint=scripted(STRUCTURE)) for each in requests(params)] + [
        replace(each, id=each.id + 10) for each in requests([GREEDY])
    ]
    whole = savable_model(SHALLOW)
    with two_ranks(SHALLOW, whole, device) as (core, _):
        assert tokens(run(core, asked)) == tokens(on_cpu(whole.to("cpu"), asked))


@slow_in_the_interpreter
def test_preempted_and_shared_sequences_are_those_of_one_rank(device: torch.device) -> None:
    asked, whole = requests([SamplingParams(max_tokens=16, temperature=1.0)] * 3, shared=17), savable_model(SHALLOW)
    with two_ranks(SHALLOW, whole, device, pages=4, budget=48) as (core, _):
        assert tokens(run(core, asked)) == tokens(on_cpu(whole.to("cpu"), asked))
        assert core.scheduler.counters.preemptions > 0
        assert core.scheduler.counters.cache_hits > 0


def test_fp8_weights_have_the_scales_of_whole_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_gpus_do(monkeypatch)
    config = {**CONFIGS["qwen3"], "hidden_size": 64, "intermediate_size": 64}
    whole = savable_model(config)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    group = ThreadGroup(RANKS)
    parts = [part.to(device, dtype) for part in divided(config, whole, group)]
    group.run(lambda rank: quantize_fp8(parts[rank], ThreadCollective(group, rank)))
    whole = whole.to(device, dtype)
    quantize_fp8(whole)
    for name, module in whole.named_modules():
        if isinstance(module, Fp8Linear) and name.endswith(("o_proj", "down_proj")):
            halves = [part.get_submodule(name) for part in parts]
            joined = torch.cat([half.get_parameter("weight").float() for half in halves], 1)
            assert torch.equal(joined, module.weight.float())
            assert all(torch.equal(half.get_parameter("scale"), module.scale) for half in halves)
