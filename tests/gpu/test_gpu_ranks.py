"""The GPU's runner on two ranks gives one rank's tokens: planned once, carried out by both. The ranks are threads here,
which take turns; `bench/gpu_tensor_parallel.py` has processes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean

import pytest
import torch
from divided_models import ThreadCollective, ThreadGroup, divided
from native_models import savable_model
from scripted_grammar import scripted
from test_gpu_runner import (
    ANY_PREFIX,
    CONFIGS,
    GREEDY,
    ON_GPU,
    SAMPLED,
    SHALLOW,
    SHARING,
    STRUCTURE,
    Gains,
    num_prefix_items,
    on_cpu,
    on_gpu,
    requests,
    run,
    tokens,
)
from thread_ranks import ThreadRanks
from triton_device import slow_in_the_interpreter
from triton_fp8 import round_as_gpus_do

from ostro.backends.cuda.part import GpuPart
from ostro.backends.cuda.projections import Fp8Linear
from ostro.backends.cuda.quantize import quantize_fp8
from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.cuda.shared_prefixes import PrefixLimits
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.kernels.gpu.fp8 import MOST_UNROUNDED
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.shard import Collective

RANKS, ROWS, PAGES = 2, 8, 256
MODELS: Mapping[str, Mapping[str, object]] = {
    **CONFIGS,
    "olmo2": {**CONFIGS["llama"], "architectures": ["Olmo2ForCausalLM"]},
    "gpt_neox": {**CONFIGS["llama"], "architectures": ["GPTNeoXForCausalLM"]},
}


@contextmanager
def two_ranks(
    config: Mapping[str, object],
    whole: Model,
    device: torch.device,
    *,
    pages: int = PAGES,
    budget: int = 64,
    fp8: bool = False,
    limits: PrefixLimits | None = None,
) -> Iterator[tuple[EngineCore, ThreadRanks]]:
    group = ThreadGroup(RANKS)
    first, second = parts = [part.to(device) for part in divided(config, whole, group)]
    if fp8:
        group.run(lambda rank: quantize_fp8(parts[rank], ThreadCollective(group, rank)))
    collectives: list[Collective] = [ThreadCollective(group, rank) for rank in range(RANKS)]
    part = GpuPart(
        second,
        page_size=16,
        num_pages=pages,
        max_batch_seqs=ROWS,
        tokens=torch.zeros(4096, dtype=torch.int32, device=device),
        captured=0,
        cascades=limits is not None,
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
            prefix_limits=limits,
        )
        yield EngineCore(runner), ranks
    except BaseException:
        # The other may wait for this one.
        group.abort()
        raise
    finally:
        ranks.close()


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=slow_in_the_interpreter) for name in MODELS if name != "llama")]
)
def test_greedy_tokens_are_those_of_one_rank(name: str, device: torch.device) -> None:
    """Gemma-2 norms what the ranks have summed up, OLMo-2 queries and keys over all ranks' heads, and GPT-NeoX's MLP
    does not wait for attention.
    """
    asked, whole = requests([GREEDY] * (6 if ON_GPU else 3)), savable_model(MODELS[name])
    with two_ranks(MODELS[name], whole, device, budget=12) as (core, ranks):
        assert tokens(run(core, asked)) == tokens(on_cpu(whole.to("cpu"), asked))
    assert ranks.longest < 16_000


@slow_in_the_interpreter
def test_sampled_tokens_are_those_of_one_rank(device: torch.device) -> None:
    """Only the first rank samples: the other reads its tokens on the device, drawn within the step or apart from it."""
    asked, whole = requests(SAMPLED), savable_model(SHALLOW)
    with two_ranks(SHALLOW, whole, device) as (core, _):
        assert tokens(run(core, asked)) == tokens(on_cpu(whole.to("cpu"), asked))


@slow_in_the_interpreter
def test_prefixes_are_read_together_on_both(device: torch.device) -> None:
    asked, whole = requests(SHARING, shared=80), savable_model(SHALLOW)
    with two_ranks(SHALLOW, whole, device, budget=100, limits=ANY_PREFIX) as (core, _):
        assert tokens(run(core, asked)) == tokens(on_cpu(whole.to("cpu"), asked))
        assert isinstance(core.runner, GpuRunner)
        assert num_prefix_items(core.runner) > 0


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


needs_float32 = pytest.mark.skipif(ON_GPU, reason="on a GPU fp8 needs bfloat16, where near ties fall either way")
FP8_CONFIG: Mapping[str, object] = {**SHALLOW, "hidden_size": 64, "intermediate_size": 64}


def fp8_runs(asked: list[Request], device: torch.device, budget: int) -> tuple[Gains, Gains, Gains]:
    """Runs of 8-bit weights on two ranks and on one, and of the original weights."""
    whole = savable_model(FP8_CONFIG)
    with two_ranks(FP8_CONFIG, whole, device, budget=budget, fp8=True) as (core, _):
        together = run(core, asked)
    plain, _ = on_gpu(whole, device, asked, budget=budget)
    quantize_fp8(whole)
    alone, _ = on_gpu(whole, device, asked, budget=budget)
    return together, alone, plain


def differences(found: Gains, expected: Gains) -> list[float]:
    """Between the prompts' scores."""
    both = [
        (mine, theirs) for key, gain in found.items() for mine, theirs in zip(gain[2], expected[key][2], strict=True)
    ]
    return [abs(mine.logprob - theirs.logprob) for mine, theirs in both]


@needs_float32
@slow_in_the_interpreter
def test_fp8_weights_give_the_tokens_of_one_rank(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of few rows, whose inputs are not rounded."""
    round_as_gpus_do(monkeypatch)
    asked = requests([replace(GREEDY, prompt_logprobs=0), *SAMPLED[:3]])
    asked[0] = replace(asked[0], prompt_ids=tuple(range(3, 12)), prompt_logprobs_from=1)
    together, alone, plain = fp8_runs(asked, device, budget=MOST_UNROUNDED)
    assert tokens(together) == tokens(alone)
    assert max(differences(together, alone)) < 1e-4
    assert max(differences(alone, plain)) > 1e-2


@needs_float32
@slow_in_the_interpreter
def test_fp8_scores_of_many_rows_are_as_good_on_two_ranks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their inputs are rounded: by a scale of the whole row on one rank, by one of each half on two."""
    round_as_gpus_do(monkeypatch)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompt = tuple(range(3, 3 + MOST_UNROUNDED + 4))
    asked = [Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1)]
    together, alone, plain = fp8_runs(asked, device, budget=64)
    assert 0 < mean(differences(together, plain)) < 1.5 * mean(differences(alone, plain))
