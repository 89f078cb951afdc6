"""The standing oracles on real models whose layers keep a state: exact token equality, in fp32, on the CPU."""

from collections.abc import Iterator

import pytest
import tiny_models
import torch
from _pytest.mark import ParameterSet
from dense_context import dense_logits
from every_family import RECURRENT, config_of
from guessed_drafts import ReplayedDrafts
from test_torch_runner import dense_greedy, drain, draw_prompts, run
from tiny_models import random_model

from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits
from ostro.engine.speculation import Speculation
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.recurrent import GatedDelta, Mamba2

CONFIGS = {name: config_of(name, {**tiny_models.LLAMA, "head_dim": 8}) for name in RECURRENT}
FAMILIES = pytest.mark.parametrize("name", CONFIGS)
ONE_OF_EACH = pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "granitemoehybrid", "falcon_h1"])


def model_of(name: str) -> Model:
    """One whose states remember: every token counts for all that follow."""
    model = random_model(CONFIGS[name], max_seq_len=512)
    for module in model.modules():
        if isinstance(module, GatedDelta | Mamba2):
            module.decay.weight.data = torch.linspace(-5, -2, len(module.decay.weight))
    return model


def engine(
    model: Model,
    *,
    pages: int = 256,
    states: int = 64,
    budget: int = 256,
    prefix_caching: bool = True,
    speculation: Speculation | None = None,
) -> EngineCore:
    runner = TorchRunner(model, page_size=4, num_pages=pages, num_states=states)
    limits = Limits(max_batch_tokens=budget)
    return EngineCore(runner, limits, prefix_caching=prefix_caching, speculation=speculation)


@FAMILIES
def test_states_in_slots_generate_what_a_loop_without_a_cache_does(name: str) -> None:
    model, prompts = model_of(name), draw_prompts(1, 4, 5, 17, 30)
    tokens = run(engine(model), prompts)
    for id, prompt in enumerate(prompts):
        assert tokens[id, 0] == dense_greedy(model, prompt, 12)


@ONE_OF_EACH
def test_every_token_of_a_prompt_counts(name: str) -> None:
    """Or the others would not see a state that is lost."""
    model, [prompt] = model_of(name), draw_prompts(40)
    other = [(prompt[0] + 1) % tiny_models.VOCAB, *prompt[1:]]
    assert not torch.equal(dense_logits(model, prompt)[-1], dense_logits(model, other)[-1])


@ONE_OF_EACH
def test_alone_equals_batched(name: str) -> None:
    model, prompts = model_of(name), draw_prompts(3, 8, 21, 40, 5, 13)
    together = run(engine(model), prompts)
    for id, prompt in enumerate(prompts):
        assert run(engine(model), [prompt], first_id=id) == {(id, 0): together[id, 0]}


@ONE_OF_EACH
@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_whole_equals_chunked(name: str, budget: int) -> None:
    model, prompts = model_of(name), draw_prompts(2, 21, 65)
    assert run(engine(model, budget=budget), prompts) == run(engine(model), prompts)


@FAMILIES
def test_cold_equals_prefix_hit(name: str) -> None:
    model = model_of(name)
    [shared, *tails] = draw_prompts(30, 3, 9)
    prompts = [shared + tail for tail in tails] + [shared]
    core = engine(model)
    run(core, [shared], first_id=100)
    warm = run(core, prompts)
    assert core.scheduler.counters.cache_hits >= 3 * 20
    assert warm == run(engine(model, prefix_caching=False), prompts)


@ONE_OF_EACH
def test_an_answer_fed_back_as_a_prompt_equals_the_same_text_computed_cold(name: str) -> None:
    model = model_of(name)
    core, [text, *questions] = engine(model), draw_prompts(20, 5, 6, 7)
    for turn, question in enumerate(questions):
        text = text + question
        [answer] = run(core, [text], first_id=turn).values()
        assert run(engine(model, prefix_caching=False), [text], first_id=turn) == {(turn, 0): answer}
        text = text + answer
    assert core.scheduler.counters.cache_hits > 0


@FAMILIES
def test_unpreempted_equals_preempted(name: str) -> None:
    model, prompts = model_of(name), draw_prompts(10, 14, 9, 12)
    core = engine(model, pages=14)
    assert run(core, prompts) == run(engine(model), prompts)
    assert core.scheduler.counters.preemptions > 0


@ONE_OF_EACH
@pytest.mark.parametrize("states", [1, 2, 5])
def test_few_slots_change_no_token(name: str, states: int) -> None:
    model, prompts = model_of(name), draw_prompts(10, 14, 9, 12, 30)
    core = engine(model, states=states)
    assert run(core, prompts) == run(engine(model), prompts)
    assert run(core, prompts, first_id=10) == run(engine(model), prompts, first_id=10)


@FAMILIES
def test_forked_choices_equal_requests_of_their_own(name: str) -> None:
    """With the same seed a choice draws what it would draw if its prompt had been computed for it alone."""
    model, [prompt] = model_of(name), draw_prompts(11)
    params = SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=3)
    forked = run(engine(model), [prompt], params)
    alone = run(engine(model, budget=5, prefix_caching=False), [prompt], params)
    assert len({*map(tuple, forked.values())}) == 3
    assert forked == alone


@FAMILIES
def test_pages_and_states_take_the_memory_that_the_spec_says(name: str) -> None:
    runner = TorchRunner(model_of(name), page_size=4, num_pages=8, num_states=3)
    spec, pages = runner.spec, sum(stack.nbytes for stack in runner.cache.stacks)
    assert runner.states.nbytes == 3 * spec.state_bytes > 0
    assert pages + runner.states.nbytes == spec.pages_bytes


def test_a_long_step_says_that_it_goes_on() -> None:
    """It counts each token in each layer that keeps matrices."""
    runner = TorchRunner(model_of("qwen3_5"), page_size=4, num_pages=64, num_states=4)
    run(EngineCore(runner, Limits(max_batch_tokens=256)), draw_prompts(30), SamplingParams(max_tokens=1, temperature=0))
    layers = sum(state is not None for state in runner.model.states)
    assert runner.strides == 30 * layers


def drafted_cases() -> Iterator[ParameterSet]:
    """In the short form, one case for a family of each kind."""
    short = {("qwen3_5", 0.8), ("lfm2", 1.0), ("granitemoehybrid", 0.0), ("falcon_h1", 0.6)}
    for name in CONFIGS:
        for accuracy, pages in ((0.0, 256), (0.6, 256), (1.0, 256), (0.8, 14)):
            marks = () if (name, accuracy) in short else pytest.mark.full
            yield pytest.param(name, accuracy, pages, marks=marks)


@pytest.mark.parametrize(("name", "accuracy", "pages"), [*drafted_cases()])
def test_drafts_change_no_token(name: str, accuracy: float, pages: int) -> None:
    """However many of them are right; also of sequences that are preempted, or fork, or end meanwhile."""
    model, prompts = model_of(name), draw_prompts(1, 14, 30, 9)
    for params in (SamplingParams(max_tokens=16, temperature=0), SamplingParams(max_tokens=9, seed=3, n=3)):
        without = run(engine(model), prompts, params)
        drafts = ReplayedDrafts(without, accuracy=accuracy, most=8)
        core = engine(model, pages=pages, speculation=drafts)
        assert run(core, prompts, params) == without
        counters = core.scheduler.counters
        assert counters.drafted_tokens > 0
        assert (counters.accepted_tokens > 0) == (accuracy > 0)
        assert (counters.preemptions > 0) == (pages < 256)


def test_drafts_change_no_log_probability() -> None:
    model, [prompt] = model_of("qwen3_5"), draw_prompts(14)
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=0)
    found = []
    for speculation in (None, ReplayedDrafts(run(engine(model), [prompt], params), accuracy=0.6, most=8)):
        core = engine(model, speculation=speculation)
        core.add(Request(id=0, prompt_ids=tuple(prompt), params=params, seed=0))
        found.append([each for progress in drain(core) for each in progress.logprobs])
    without, drafted = found
    assert [each.token_id for each in drafted] == [each.token_id for each in without]
    # Matmuls of several rows add up in another order.
    assert [each.logprob for each in drafted] == pytest.approx([each.logprob for each in without], abs=1e-5)
