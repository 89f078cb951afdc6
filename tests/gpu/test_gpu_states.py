"""Recurrent states on the GPU's runner: the CPU's tokens in fp32, and the standing oracles; with `deterministic`, the
same bits.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from every_family import RECURRENT, config_of
from fake_tiers import FixedCosts
from family_case import Config
from model_files import write_checkpoint
from test_deterministic import Gain
from test_deterministic import run as run_for_numbers
from test_gpu_runner import ON_GPU, Gains, run, tokens
from tiny_models import LLAMA, VOCAB, random_model
from triton_device import slow_in_the_interpreter

from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.planning import plan
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits
from ostro.engine.tiers import Tiers
from ostro.errors import Unsupported
from ostro.models.architecture import ring_states, state_bytes
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.recurrent import GatedDelta, Mamba2

PAGE = 16
FUSED = ("qwen3_5", "lfm2", "granitemoehybrid", "falcon_h1")
ONE_OF_EACH = pytest.mark.parametrize("name", FUSED)
LENGTHS = (3, 17, 40, 70) if ON_GPU else (3, 17)


def config_for(name: str) -> Config:
    return config_of(name, {**LLAMA, "hidden_size": 64, "head_dim": 16})


def model_of(name: str) -> Model:
    """One whose states remember: every token counts for all that follow."""
    model = random_model(config_for(name), max_seq_len=512)
    for module in model.modules():
        if isinstance(module, GatedDelta | Mamba2):
            module.decay.weight.data = torch.linspace(-5, -2, len(module.decay.weight))
    return model


def prompts(*lengths: int) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(0, VOCAB, (length,)).tolist() for length in lengths]


def asked(
    texts: Sequence[Sequence[int]], params: SamplingParams | None = None, *, max_tokens: int = 4, first_id: int = 0
) -> list[Request]:
    params = params or SamplingParams(max_tokens=max_tokens, temperature=0)
    numbered = enumerate(texts, first_id)
    return [Request(id=id, prompt_ids=tuple(text), params=params, seed=id) for id, text in numbered]


def engine(
    model: Model,
    device: torch.device,
    *,
    pages: int = 64,
    states: int = 16,
    budget: int = 64,
    deterministic: bool = False,
    prefix_caching: bool = True,
) -> EngineCore:
    runner = GpuRunner(
        model.to(device),
        page_size=PAGE,
        num_pages=pages,
        num_states=states,
        max_batch_tokens=budget,
        max_batch_seqs=8,
        deterministic=deterministic,
    )
    return EngineCore(runner, prefix_caching=prefix_caching)


def on_cpu(name: str, requests: list[Request]) -> Gains:
    runner = TorchRunner(model_of(name), page_size=4, num_pages=512, num_states=64)
    return run(EngineCore(runner, Limits(max_batch_tokens=256)), requests)


@slow_in_the_interpreter
@pytest.mark.parametrize("name", RECURRENT)
def test_families_give_the_cpus_tokens(name: str, device: torch.device) -> None:
    requests = asked(prompts(*LENGTHS), max_tokens=24 if ON_GPU else 3)
    core = engine(model_of(name), device, budget=24)
    assert tokens(run(core, requests)) == tokens(on_cpu(name, requests))


@pytest.mark.full
def test_a_step_of_prompts_and_single_tokens_gives_the_cpus_tokens(device: torch.device) -> None:
    """The second prompt joins while the first one is decoded."""
    requests = asked(prompts(3, 20), max_tokens=3)
    core = engine(model_of("qwen3_5"), device, budget=12)
    assert tokens(run(core, requests)) == tokens(on_cpu("qwen3_5", requests))


@slow_in_the_interpreter
@ONE_OF_EACH
def test_prefix_hits_preemption_and_few_slots_change_no_token(name: str, device: torch.device) -> None:
    model = model_of(name)
    [shared, *tails] = prompts(35, 3, 9, 14)
    requests = asked([shared + tail for tail in tails], max_tokens=24)
    expected = tokens(run(engine(model, device, prefix_caching=False), requests))
    for pages, states in ((64, 16), (9, 16), (64, 2)):
        core = engine(model, device, pages=pages, states=states)
        run(core, asked([shared], first_id=100))
        assert tokens(run(core, requests)) == expected
        assert core.scheduler.counters.cache_hits > 0
        assert (core.scheduler.counters.preemptions > 0) == (pages == 9)


@slow_in_the_interpreter
@ONE_OF_EACH
def test_forked_choices_equal_requests_of_their_own(name: str, device: torch.device) -> None:
    model, [prompt] = model_of(name), prompts(19)
    params = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=3)
    forked = tokens(run(engine(model, device), asked([prompt], params)))
    alone = tokens(run(engine(model, device, budget=5, prefix_caching=False), asked([prompt], params)))
    assert len({*map(tuple, forked.values())}) == 3
    assert forked == alone


@slow_in_the_interpreter
@ONE_OF_EACH
def test_a_state_that_comes_back_from_host_memory_changes_no_token(name: str, device: torch.device) -> None:
    """The first of three prompts of two pages each, in five."""
    core = engine(model_of(name), device, pages=5, states=3, budget=24)
    assert isinstance(core.runner, GpuRunner)
    core = EngineCore(core.runner, tiers=Tiers(core.runner.host_store(16, 4), costs=FixedCosts(1.0)))
    requests = asked(prompts(18, 18, 18), max_tokens=3)
    first = [tokens(run(core, [request])) for request in requests]
    assert tokens(run(core, requests[:1])) == first[0]
    counters = core.scheduler.counters
    assert (counters.fetched_states, counters.cache_hits) == (1, PAGE)
    core.close()


def test_the_states_take_the_memory_that_the_spec_says(device: torch.device) -> None:
    core = engine(model_of("qwen3_5"), device, states=3)
    assert isinstance(core.runner, GpuRunner)
    states = core.runner.part.states
    assert states is not None
    assert (
        states.nbytes == 3 * core.runner.spec.state_bytes == 3 * state_bytes(ring_states(core.runner.model.states), 4)
    )


def test_a_plan_counts_a_state_as_the_runner_keeps_it(tmp_path: Path) -> None:
    model = model_of("qwen3_5")
    directory = write_checkpoint(tmp_path, config_for("qwen3_5"), model)
    found = plan(directory, EngineConfig(device="cuda", dtype="bfloat16"), memory=1 << 36)
    assert found.state_bytes == state_bytes(ring_states(model.states), 2)
    assert found.num_states == 2 * found.max_batch_seqs


def test_drafts_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, config_for("qwen3_5"), model_of("qwen3_5"))
    with pytest.raises(Unsupported, match="speculative ngram does not work on a GPU"):
        plan(directory, EngineConfig(device="cuda", speculative="ngram"), memory=1 << 36)


# ---- bits


def scored(texts: Sequence[Sequence[int]], *, max_tokens: int = 5, first_id: int = 0) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, logprobs=5, prompt_logprobs=2)
    return [
        Request(id=id, prompt_ids=tuple(text), params=params, seed=id, prompt_logprobs_from=1)
        for id, text in enumerate(texts, first_id)
    ]


@slow_in_the_interpreter
@ONE_OF_EACH
def test_deterministic_numbers_are_the_same_alone_batched_chunked_and_after_hits(
    name: str, device: torch.device
) -> None:
    model, texts = model_of(name), prompts(*LENGTHS)
    together = run_for_numbers(engine(model, device, deterministic=True), scored(texts))
    for budget in (7, 64):
        for request in scored(texts):
            core = engine(model, device, budget=budget, deterministic=True)
            assert run_for_numbers(core, [request]) == {request.id: together[request.id]}


@slow_in_the_interpreter
@ONE_OF_EACH
def test_deterministic_numbers_of_an_answer_fed_back_are_those_of_the_text_computed_cold(
    name: str, device: torch.device
) -> None:
    model = model_of(name)
    core = engine(model, device, deterministic=True)
    [text, *questions] = prompts(20, 5, 18)
    params = SamplingParams(max_tokens=20, temperature=1.0, logprobs=2)

    def answer(core: EngineCore, text: list[int], turn: int) -> Gain:
        return run_for_numbers(core, asked([text], params, first_id=turn))[turn]

    for turn, question in enumerate(questions):
        text = text + question
        found = answer(core, text, turn)
        assert answer(engine(model, device, deterministic=True, prefix_caching=False), text, turn) == found
        text = text + found[0]
    assert core.scheduler.counters.cache_hits > 0
