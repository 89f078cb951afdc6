"""Drafts on the GPU's runner: tokens and log-probabilities are those of a run without drafts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from guessed_drafts import EagerDrafts, ReplayedDrafts
from native_models import savable_model
from peft_directory import random_adapter
from scripted_grammar import scripted
from test_gpu_ranks import two_ranks
from test_gpu_runner import CONFIGS, ON_GPU, QWEN3, SAMPLED, SHALLOW, STRUCTURE, Gains, on_cpu, requests, run, tokens
from tiny_models import VOCAB, random_model
from triton_device import slow_in_the_interpreter

from ostro.backends.cuda.runner import GpuRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.speculation import Speculation
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.lora import Adapters
from ostro.weights.adapter import read_adapter

LENGTH = 8 if ON_GPU else 6
# In the interpreter, in `make test`, some of what is sampled.
SOME = [each for each in SAMPLED if each.n == 1 and (each.logprobs is not None or each.repetition_penalty != 1.0)]


def engine(
    model: Model,
    device: torch.device,
    speculation: Speculation | None,
    *,
    pages: int = 256,
    padded: int = 0,
    deterministic: bool = False,
) -> EngineCore:
    runner = GpuRunner(
        model.to(device),
        page_size=16,
        num_pages=pages,
        max_batch_tokens=64,
        max_batch_seqs=8,
        graph_max_tokens=padded,
        deterministic=deterministic,
    )
    return EngineCore(runner, speculation=speculation)


def longer(params: SamplingParams) -> SamplingParams:
    return params.with_changes(max_tokens=LENGTH)


def assert_alike(given: Gains, expected: Gains) -> None:
    assert tokens(given) == tokens(expected)
    for key, (_, logprobs, _, error) in expected.items():
        assert given[key][3] == error
        assert [(each.token_id, each.rank) for each in given[key][1]] == [(e.token_id, e.rank) for e in logprobs]
        assert [each.logprob for each in given[key][1]] == pytest.approx([each.logprob for each in logprobs], abs=1e-3)


def assert_drafted(core: EngineCore) -> None:
    counters = core.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens


def drafted(model: Model, device: torch.device, asked: Sequence[Request], expected: Gains, *, padded: int = 0) -> None:
    core = engine(model, device, ReplayedDrafts(tokens(expected)), padded=padded)
    assert_alike(run(core, list(asked)), expected)
    assert_drafted(core)


@pytest.mark.full
@pytest.mark.parametrize(
    ("params", "padded"),
    [
        (SOME, 64),
        pytest.param(SAMPLED, 0, marks=slow_in_the_interpreter),
        pytest.param(SAMPLED, 64, marks=slow_in_the_interpreter),
    ],
    ids=["some, padded", "all", "all, padded"],
)
def test_sampled_tokens_and_log_probabilities_equal_the_cpus(
    params: Sequence[SamplingParams], padded: int, device: torch.device
) -> None:
    """With many kinds of sampling in one batch: penalties, seeds, bans and biases see the drafts before them."""
    asked = requests([longer(each) for each in params])
    expected = on_cpu(random_model(SHALLOW), asked)
    drafted(random_model(SHALLOW), device, asked, expected, padded=padded)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["gemma2", *(pytest.param(n, marks=slow_in_the_interpreter) for n in ("llama", "mistral"))]
)
def test_greedy_tokens_equal_the_cpus(name: str, device: torch.device) -> None:
    """Drafts are attended to as a prompt is, with a window and soft caps."""
    asked = requests([SamplingParams(max_tokens=LENGTH, temperature=0)] * 2, longest=30)
    expected = on_cpu(random_model(CONFIGS[name]), asked)
    drafted(random_model(CONFIGS[name]), device, asked, expected)


@pytest.mark.full
def test_constrained_rows_draw_under_the_masks_along_their_drafts(device: torch.device) -> None:
    params = [
        SamplingParams(max_tokens=LENGTH, temperature=1.0),
        SamplingParams(max_tokens=LENGTH, temperature=1.0, top_p=0.9, logprobs=2),
        SamplingParams(max_tokens=LENGTH, temperature=1.0, top_n_sigma=0.7, logit_bias={12: 3.0}),
        SamplingParams(max_tokens=LENGTH, temperature=1.0),
    ]
    structures = [None, scripted(STRUCTURE), scripted(STRUCTURE), scripted(STRUCTURE, jump_forward=True)]
    asked = [replace(each, constraint=one) for each, one in zip(requests(params), structures, strict=True)]
    expected = on_cpu(random_model(SHALLOW), asked)
    core = engine(random_model(SHALLOW), device, ReplayedDrafts(tokens(expected)))
    assert_alike(run(core, asked), expected)
    assert core.scheduler.counters.accepted_tokens > 0


def test_words_are_banned_by_drafts_that_stand_before_them(device: torch.device) -> None:
    bans = tuple((a, b) for a in range(0, VOCAB, 2) for b in range(8))
    asked = [
        replace(each, bad_word_ids=bans) for each in requests([SamplingParams(max_tokens=LENGTH, temperature=1.5)] * 2)
    ]
    drafted(random_model(SHALLOW), device, asked, on_cpu(random_model(SHALLOW), asked))


@pytest.mark.full
def test_deterministic_outputs_have_the_same_bits_with_drafts(device: torch.device) -> None:
    asked = requests([SamplingParams(max_tokens=LENGTH, temperature=1.0, logprobs=0)] * 2)
    without = run(engine(random_model(SHALLOW), device, None, deterministic=True), asked)
    core = engine(random_model(SHALLOW), device, ReplayedDrafts(tokens(without)), deterministic=True)
    assert run(core, asked) == without
    assert_drafted(core)


@pytest.mark.full
def test_an_answer_that_its_request_predicts_takes_a_fraction_of_the_steps(device: torch.device) -> None:
    [request] = requests([SamplingParams(max_tokens=16, temperature=0)])
    expected = on_cpu(random_model(SHALLOW), [request])
    predicting = replace(request, predicted_ids=tuple(tokens(expected)[0, 0]))
    core = engine(random_model(SHALLOW), device, EagerDrafts())
    assert tokens(run(core, [predicting])) == tokens(expected)
    assert core.scheduler.counters.steps < 8


@slow_in_the_interpreter
def test_sequences_that_are_preempted_give_the_same(device: torch.device) -> None:
    asked = requests([SamplingParams(max_tokens=16, temperature=1.0)] * 3, shared=17)
    expected = on_cpu(random_model(QWEN3), asked)
    core = engine(random_model(QWEN3), device, ReplayedDrafts(tokens(expected)), pages=4)
    assert tokens(run(core, asked)) == tokens(expected)
    assert core.scheduler.counters.preemptions > 0
    assert_drafted(core)


@slow_in_the_interpreter
def test_two_ranks_verify_what_one_does(device: torch.device) -> None:
    asked, whole = requests([longer(params) for params in SAMPLED]), savable_model(SHALLOW)
    with two_ranks(SHALLOW, whole, device) as (core, _):
        expected = on_cpu(whole.to("cpu"), asked)
        core.scheduler.speculation = ReplayedDrafts(tokens(expected))
        assert tokens(run(core, asked)) == tokens(expected)
        assert_drafted(core)


@slow_in_the_interpreter
def test_rows_of_drafts_have_their_sequences_adapter(device: torch.device, tmp_path: Path) -> None:
    names = [None, "red", "green"]
    paths = {
        name: random_adapter(tmp_path / name, random_model(QWEN3), seed=seed, rank=3 + seed)
        for seed, name in enumerate(("red", "green"))
    }
    made = requests([SamplingParams(max_tokens=LENGTH, temperature=0)] * 3)
    asked = [replace(each, adapter=name) for each, name in zip(made, names, strict=True)]

    def adapted(speculation: Speculation | None) -> EngineCore:
        model = random_model(QWEN3).to(device)
        adapters = Adapters(model, {name: read_adapter(path) for name, path in paths.items()})
        adapters.attach(model)
        runner = GpuRunner(model, page_size=16, num_pages=64, max_batch_tokens=64, max_batch_seqs=8, adapters=adapters)
        return EngineCore(runner, adapters=tuple(paths), speculation=speculation)

    without = run(adapted(None), asked)
    core = adapted(ReplayedDrafts(tokens(without)))
    assert tokens(run(core, asked)) == tokens(without)
    assert_drafted(core)
