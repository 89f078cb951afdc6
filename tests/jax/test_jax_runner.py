"""The standing oracles on the JAX runner, with real weights on one and on eight ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_models import FAMILIES, ROWS, compilations, jax_runner
from native_models import savable_model
from scripted_grammar import ScriptedGrammars, scripted

from ostro.backends.jax.edit_inputs import num_cells
from ostro.backends.jax.mesh import make_mesh
from ostro.backends.jax.runner import JaxRunner
from ostro.backends.jax.sampling import DrawKind
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.batch import Batch
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.runner import NOT_FINITE, ModelRunner, Step
from ostro.engine.scheduler import Limits, Progress
from ostro.errors import BadRequest, ModelError
from ostro.models.architecture import Architecture
from ostro.models.cut import cut
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.weights import Pooling

VOCAB = 300
LLAMA: Mapping[str, object] = {**FAMILIES["llama"], "max_position_embeddings": 200}
GREEDY = SamplingParams(max_tokens=12, temperature=0)
SEEDED = SamplingParams(max_tokens=12, temperature=1.0)
PAGES = 128

Tokens = dict[tuple[int, int], list[int]]


@cache
def model() -> Model:
    return savable_model(LLAMA)


@cache
def shared_runner(tp: int) -> JaxRunner:
    """Oracles share runners: nothing is read from a page before it is written."""
    return jax_runner(LLAMA, model(), tp=tp, pages=PAGES)


def torch_runner() -> TorchRunner:
    return TorchRunner(model(), page_size=4, num_pages=PAGES)


def draw_prompts(*lengths: int, seed: int = 1) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, VOCAB, length).tolist()) for length in lengths]


class Narrow:
    """A runner that pretends to have fewer pages, or to take no step ahead."""

    strides = 0
    failure = None

    def __init__(self, runner: ModelRunner, **changes: Any) -> None:
        self._runner, self.spec = runner, replace(runner.spec, **changes)
        self.launch = runner.launch


def engine(runner: ModelRunner, *, budget: int = 64, prefix_caching: bool = True) -> EngineCore:
    return EngineCore(runner, Limits(max_batch_tokens=budget, max_batch_seqs=ROWS), prefix_caching=prefix_caching)


def drain(core: EngineCore) -> Iterable[Progress]:
    while core.has_work:
        yield from core.step()
    core.check_integrity()


def run(
    core: EngineCore, prompts: Sequence[tuple[int, ...]], params: SamplingParams = GREEDY, first_id: int = 0
) -> Tokens:
    for id, prompt in enumerate(prompts, first_id):
        core.add(Request(id=id, prompt_ids=prompt, params=params, seed=id))
    tokens: Tokens = {}
    for step in drain(core):
        assert step.error is None
        tokens.setdefault((step.request_id, step.choice), []).extend(step.token_ids)
    return tokens


BOTH = pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.full), 8])
SETTINGS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])


@BOTH
@SETTINGS
def test_alone_equals_batched(tp: int, params: SamplingParams) -> None:
    prompts, runner = draw_prompts(3, 8, 21, 40, 5, 13), shared_runner(tp)
    together = run(engine(runner), prompts, params)
    for id, prompt in enumerate(prompts):
        assert run(engine(runner), [prompt], params, first_id=id) == {(id, 0): together[id, 0]}


@pytest.mark.cases(2)
@BOTH
@SETTINGS
@pytest.mark.parametrize("budget", [1, 3, 8, 17])
def test_whole_equals_chunked(tp: int, params: SamplingParams, budget: int) -> None:
    prompts, runner = draw_prompts(3, 21, 40), shared_runner(tp)
    assert run(engine(runner, budget=budget), prompts, params) == run(engine(runner), prompts, params)


@pytest.mark.full
@BOTH
@SETTINGS
def test_cold_equals_prefix_hit(tp: int, params: SamplingParams) -> None:
    [shared, *tails] = draw_prompts(30, 3, 9)
    prompts = [shared + tail for tail in tails] + [shared]
    core = engine(shared_runner(tp))
    run(core, [shared], first_id=100)
    warm = run(core, prompts, params)
    assert core.scheduler.counters.cache_hits >= 3 * 28
    assert warm == run(engine(shared_runner(tp), prefix_caching=False), prompts, params)


@pytest.mark.full
@BOTH
@SETTINGS
def test_unpreempted_equals_preempted(tp: int, params: SamplingParams) -> None:
    prompts, runner = draw_prompts(10, 14, 9, 12), shared_runner(tp)
    core = engine(Narrow(runner, num_pages=14))
    assert run(core, prompts, params) == run(engine(runner), prompts, params)
    assert core.scheduler.counters.preemptions > 0


@pytest.mark.full
@BOTH
def test_running_a_step_ahead_gives_the_same_tokens(tp: int) -> None:
    prompts, runner = draw_prompts(5, 30, 2), shared_runner(tp)
    assert runner.spec.steps_ahead == 1
    for params in (GREEDY, SEEDED, replace(SEEDED, repetition_penalty=1.5, frequency_penalty=0.5)):
        ahead = run(engine(runner), prompts, params)
        assert ahead == run(engine(Narrow(runner, steps_ahead=0)), prompts, params)


CHANGES: Mapping[str, Mapping[str, object]] = {
    "choices": {"n": 3},
    "more choices than rows": {"n": 20},
    "greedy repetition": {"repetition_penalty": 1.4, "temperature": 0},
    "occurrences": {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    "bias": {"logit_bias": {5: 8.0, 7: -100.0}},
    "sigma": {"top_n_sigma": 1.0},
    "sigma, repetition, choices": {"top_n_sigma": 1.5, "repetition_penalty": 1.2, "n": 2},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.1, "temperature": 1.5},
}


@pytest.mark.cases(2)
@BOTH
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_settings_give_the_tokens_of_the_torch_runner(tp: int, changes: Mapping[str, Any]) -> None:
    prompts, params = draw_prompts(6, 19, 33), replace(SEEDED, **changes)
    assert run(engine(shared_runner(tp)), prompts, params) == run(engine(torch_runner()), prompts, params)


@pytest.mark.full
def test_bans_give_the_tokens_of_the_torch_runner() -> None:
    [prompt] = draw_prompts(9)
    plain = run(engine(shared_runner(1)), [prompt])[0, 0]

    def banned(runner: ModelRunner) -> list[int]:
        core = engine(runner)
        words = ((plain[2],), (plain[4], plain[5]))
        params = replace(GREEDY, min_tokens=6)
        stops = frozenset({plain[0]})
        core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, bad_word_ids=words, eos_ids=stops))
        return [token for step in drain(core) for token in step.token_ids]

    tokens = banned(shared_runner(1))
    assert tokens == banned(torch_runner())
    assert plain[2] not in tokens
    assert tokens[0] != plain[0]


@pytest.mark.full
@BOTH
@SETTINGS
def test_masks_give_the_tokens_of_the_torch_runner(tp: int, params: SamplingParams) -> None:
    """Each choice has a mask of its own, though the first tokens of all come from one row of logits."""
    prompts = draw_prompts(6, 9)
    edges = {0: dict.fromkeys(range(0, VOCAB, 7), 1), 1: dict.fromkeys(range(1, VOCAB, 5), 0)}
    constraint = scripted(edges)

    def masked(runner: ModelRunner) -> Tokens:
        core, tokens = engine(runner), Tokens()
        for id, prompt in enumerate(prompts):
            request = Request(
                id=id, prompt_ids=prompt, params=replace(params, n=id + 1), seed=id, constraint=constraint
            )
            core.add(request, ScriptedGrammars(VOCAB).prepare(constraint))
        for step in drain(core):
            tokens.setdefault((step.request_id, step.choice), []).extend(step.token_ids)
        return tokens

    tokens = masked(shared_runner(tp))
    assert tokens == masked(torch_runner())
    for choice in tokens.values():
        assert len(choice) == 12
        assert all(token % 7 == 0 for token in choice[::2])
        assert all(token % 5 == 1 for token in choice[1::2])


class Watching(Narrow):
    """Counts the steps whose sampling was deferred."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.num_late = 0
        self.launch = self._launch

    def _launch(self, batch: Batch) -> Step:
        step = self._runner.launch(batch)
        self.num_late += step.sample is not None
        return step


@BOTH
def test_a_step_begins_before_its_masks_are_known(tp: int) -> None:
    """Beside rows without a structure, and with penalties, which count the tokens until then."""
    constraint = scripted({0: dict.fromkeys(range(0, VOCAB, 7), 1), 1: dict.fromkeys(range(1, VOCAB, 5), 0)})

    def tokens(runner: ModelRunner) -> Tokens:
        core, found = engine(runner), Tokens()
        for id, prompt in enumerate(draw_prompts(5, 9, 12, 3)):
            params = replace(SEEDED, logprobs=1) if id % 2 else replace(SEEDED, frequency_penalty=2.0)
            grammar = None if id == 3 else constraint
            request = Request(id=id, prompt_ids=prompt, params=params, seed=id, constraint=grammar)
            core.add(request, None if grammar is None else ScriptedGrammars(VOCAB).prepare(grammar))
        for step in drain(core):
            assert step.error is None
            found.setdefault((step.request_id, step.choice), []).extend(step.token_ids)
        return found

    watched = Watching(shared_runner(tp))
    assert tokens(watched) == tokens(torch_runner())
    assert watched.num_late >= 8


def test_more_changes_than_a_program_has_room_for_give_the_tokens_of_the_torch_runner() -> None:
    bias = {token: token % 7 - 3.0 for token in range(VOCAB)}

    def tokens(runner: ModelRunner) -> Tokens:
        core, found = engine(runner), Tokens()
        words = tuple((token,) for token in range(VOCAB - 50))
        for id, prompt in enumerate(draw_prompts(*[20] * ROWS)):
            params = replace(SEEDED, logit_bias=bias, repetition_penalty=1.3, logprobs=2)
            core.add(Request(id=id, prompt_ids=prompt, params=params, seed=id, bad_word_ids=words))
        for step in drain(core):
            found.setdefault((step.request_id, step.choice), []).extend(step.token_ids)
        return found

    assert num_cells(ROWS) < ROWS * (2 * VOCAB - 50)
    assert tokens(shared_runner(8)) == tokens(torch_runner())


@BOTH
def test_log_probabilities_are_those_of_the_torch_runner(tp: int) -> None:
    [prompt] = draw_prompts(37)
    params = replace(SEEDED, logprobs=3, prompt_logprobs=2, max_tokens=5)

    def logprobs(runner: ModelRunner) -> list[tuple[int, float, int, list[int]]]:
        core = engine(runner, budget=16)
        core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1))
        found = [entry for step in drain(core) for entry in (*step.prompt_logprobs, *step.logprobs)]
        return [(each.token_id, each.logprob, each.rank, [token for token, _ in each.top]) for each in found]

    found, expected = logprobs(shared_runner(tp)), logprobs(torch_runner())
    assert len(found) == 36 + 5
    for one, other in zip(found, expected, strict=True):
        assert (one[0], *one[2:]) == (other[0], *other[2:])
        assert one[1] == pytest.approx(other[1], abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "mode", ["mean", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("cls", "lasttoken"))]
)
def test_pooled_vectors_are_those_of_the_torch_runner(mode: Literal["mean", "cls", "lasttoken"]) -> None:
    [prompt] = draw_prompts(18)
    pooling = Pooling(mode, normalize=False)

    def pooled(runner: ModelRunner, budget: int) -> list[float]:
        core = engine(runner, budget=budget)
        params = SamplingParams(max_tokens=0)
        core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, task=Task.EMBED))
        [last] = [step for step in drain(core) if step.finish_reason]
        assert last.pooled is not None
        return last.pooled

    expected = pooled(TorchRunner(model(), page_size=4, num_pages=PAGES, pooling=pooling), 64)
    runner = jax_runner(LLAMA, model(), tp=8, pages=PAGES, pooling=pooling)
    for budget in (7, 64):
        assert pooled(runner, budget) == pytest.approx(expected, abs=1e-4)


@pytest.mark.full
def test_a_prompt_of_one_token_is_pooled_beside_a_sequence_that_decodes() -> None:
    """The program that also draws returns no hidden states."""
    runner = jax_runner(LLAMA, model(), pages=PAGES, pooling=Pooling("mean", normalize=False))
    core = engine(runner)
    core.add(Request(id=0, prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=12), seed=0))
    for _ in range(3):
        core.step()
    core.add(Request(id=1, prompt_ids=(5,), params=SamplingParams(max_tokens=0), seed=0, task=Task.EMBED))
    ended = {step.request_id: step for step in drain(core) if step.finish_reason}
    assert ended[1].pooled is not None
    assert len(ended) == 2


@pytest.mark.full
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_row_of_nan_fails_alone_and_leaves_nothing_behind_in_its_pages(tp: int) -> None:
    """The pages of the failed sequence are used again by others, with its NaN in the slots that are not filled yet."""
    poisoned, broken = VOCAB - 1, savable_model(LLAMA)
    next(broken.parameters()).data[poisoned] = float("nan")
    runner = jax_runner(LLAMA, broken, tp=tp, pages=PAGES)
    prompts = [tuple(token % poisoned for token in prompt) for prompt in draw_prompts(6, 7, 21)]
    clean = run(engine(runner), prompts)
    core = engine(Narrow(runner, num_pages=40), prefix_caching=False)
    for id, prompt in enumerate([*prompts, (*prompts[0], poisoned), (poisoned,) * 30]):
        core.add(Request(id=id, prompt_ids=prompt, params=GREEDY, seed=0))
    errors = {step.request_id: step.error for step in drain(core) if step.finish_reason}
    assert errors == {0: None, 1: None, 2: None, 3: NOT_FINITE, 4: NOT_FINITE}
    assert run(core, prompts) == clean


@pytest.mark.slow
@BOTH
def test_bfloat16_weights_give_nearly_the_same_log_probabilities(tp: int) -> None:
    [prompt] = draw_prompts(20)

    def scores(runner: ModelRunner) -> list[float]:
        core = engine(runner)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1))
        return [entry.logprob for step in drain(core) for entry in step.prompt_logprobs]

    runner = jax_runner(LLAMA, model(), tp=tp, dtype=jnp.bfloat16)
    assert runner.spec.precision == "bfloat16 weights, bfloat16 keys and values"
    assert scores(runner) == pytest.approx(scores(shared_runner(tp)), abs=0.5)


def test_an_unknown_shape_is_an_error_and_not_compiled() -> None:
    programs = shared_runner(1).programs
    with compilations() as made, pytest.raises(ModelError, match="No program was compiled for draw 99"):
        programs["draw", 99, DrawKind.PLAIN]
    assert made == []


def test_programs_and_the_seconds_they_took_are_counted() -> None:
    programs = shared_runner(1).programs
    assert len(programs) == 10
    assert programs.seconds > 0


def test_a_step_writes_its_own_slots_and_no_others() -> None:
    """Padding is written nowhere, and neighbours keep what they hold."""
    runner = shared_runner(8)
    core = engine(runner)
    # Another prompt than other tests have left there.
    [prompt] = draw_prompts(6, seed=99)
    core.add(Request(id=0, prompt_ids=prompt, params=SamplingParams(max_tokens=0), seed=0, task=Task.EMBED))
    batch = core.scheduler.schedule()
    assert isinstance(batch, Batch)
    before = np.array(runner._cache.pages)
    runner.launch(batch)
    changed = (np.array(runner._cache.pages) != before).any(axis=(0, 1, 3, 5)).reshape(-1)
    pages = batch.chunks[0].seq.pages
    assert np.flatnonzero(changed).tolist() == sorted(pages[at // 4] * 4 + at % 4 for at in range(6))


@pytest.mark.slow
def test_no_program_copies_the_pages() -> None:
    """Neither all of them nor a layer's."""
    runner = jax_runner(LLAMA, model(), pages=50_000)
    of_a_layer = sum(own.nbytes for own in jax.tree.leaves(runner._cache.pages)) // 2
    assert runner.programs.step_bytes() < of_a_layer / 4


def test_pages_are_updated_in_place() -> None:
    runner = shared_runner(1)
    before = [own.unsafe_buffer_pointer() for own in jax.tree.leaves(runner._cache.pages)]
    run(engine(runner), draw_prompts(9))
    assert [own.unsafe_buffer_pointer() for own in jax.tree.leaves(runner._cache.pages)] == before


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 3, r"8 attention heads do not divide by it. Set it to one of 1, 2, 4, 8"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}, 2, "Set it to one of 1, 3"),
        ({"intermediate_size": 42}, 4, r"the MLP's width, 42, .* one of 1, 2\."),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48}, 4, "6 KV heads"),
    ],
)
def test_a_degree_that_does_not_divide_is_refused_with_those_that_do(
    changes: Mapping[str, object], tp: int, message: str
) -> None:
    described = describe({**LLAMA, **changes})
    assert isinstance(described, Architecture)
    with pytest.raises(BadRequest, match=message):
        cut(described, tp)


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(BadRequest, match="JAX finds 8 cpu devices"):
        make_mesh(16)
