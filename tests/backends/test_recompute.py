"""HRM in the engine: a sequence is given what the model alone gives it, whatever runs beside it, however the work is
cut; and what halting early saves.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hrm_brain import write_brain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostro.backends.torch.recompute import RecomputeRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.runner import Solution, TokenLogprob
from ostro.engine.scheduler import Limits
from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.torch_models.hrm import HrmConfig, HrmModel, load_hrm
from ostro.torch_models.ragged import Ragged
from ostro.weights.hrm_checkpoint import open_hrm

VOCABULARY = 300
SHALLOW: dict[str, Any] = {"h_layers": 1, "l_layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    "upstream": {"dialect": "upstream", **SHALLOW},
    "aios": {"dialect": "aios", **SHALLOW},
    "experts": {"dialect": "aios", "moe": True, "experts": 4, **SHALLOW},
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HrmModel:
    path = write_brain(tmp_path_factory.mktemp(request.param), **KINDS[request.param])
    checkpoint = open_hrm(path)
    return load_hrm(HrmConfig.read(checkpoint.config), checkpoint.tensors(), torch.float32)


def states(model: HrmModel, ids: Sequence[int], steps: int) -> Tensor:
    """Hidden states of one sequence by itself: [tokens, hidden]."""
    layout = Ragged([model.config.puzzle_len + len(ids)], torch.device("cpu"))
    embedded, carry = model.embed(torch.tensor(ids), layout), model.start(layout)
    for _ in range(steps):
        carry = model.advance(carry, embedded, layout)
    return carry.z_h[model.config.puzzle_len :]


def next_logprobs(model: HrmModel, ids: Sequence[int], steps: int) -> Tensor:
    return model.head(states(model, ids, steps)[-1:]).log_softmax(-1)[0]


def request(
    id: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    n: int = 1,
    temperature: float = 0.0,
    scored_from: int | None = None,
    one_pass: bool = False,
    puzzle: int | None = None,
) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens,
        n=n,
        temperature=temperature,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=None if scored_from is None else 0,
    )
    return Request(
        id=id,
        prompt_ids=tuple(prompt),
        params=params,
        seed=id,
        prompt_logprobs_from=scored_from,
        one_pass=one_pass,
        task=Task.GENERATE if puzzle is None else Task.SOLVE,
        puzzle=puzzle or 0,
    )


class Gathered:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.solution: Solution | None = None


def run(
    model: HrmModel,
    *requests: Request,
    steps: int | None = None,
    halting: bool = False,
    max_batch_tokens: int = 512,
    max_batch_seqs: int = 64,
) -> tuple[dict[tuple[int, int], Gathered], EngineCore]:
    runner = RecomputeRunner(model, steps=steps, halting=halting)
    core = EngineCore(runner, Limits(max_batch_tokens=max_batch_tokens, max_batch_seqs=max_batch_seqs))
    found = {(each.id, choice): Gathered() for each in requests for choice in range(each.params.n)}
    for each in requests:
        core.add(each)
    while core.has_work:
        for gain in core.step():
            own = found[gain.request_id, gain.choice]
            own.tokens += gain.token_ids
            own.logprobs += gain.logprobs
            own.prompt_logprobs += gain.prompt_logprobs
            own.solution = gain.solution
        core.check_integrity()
    return found, core


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


def test_greedy_tokens_are_the_likeliest_of_a_fresh_pass_each(model: HrmModel) -> None:
    steps = model.config.decoding_steps
    found, core = run(model, request(1, prompt(7), max_tokens=6))
    ids = prompt(7)
    for token, logprob in zip(found[1, 0].tokens, found[1, 0].logprobs, strict=True):
        expected = next_logprobs(model, ids, steps)
        assert token == int(expected.argmax())
        assert math.isclose(logprob.logprob, float(expected[token]), abs_tol=1e-5)
        ids.append(token)
    assert core.scheduler.counters.computed_tokens == sum(range(7, 13))
    assert core.scheduler.counters.outer_steps == 6 * steps
    assert core.scheduler.counters.saved_steps == 0


@settings(max_examples=5)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    max_batch_tokens=st.sampled_from([1, 40, 512]),
    max_batch_seqs=st.sampled_from([2, 64]),
)
def test_batched_equals_alone(model: HrmModel, lengths: list[int], max_batch_tokens: int, max_batch_seqs: int) -> None:
    requests = [
        request(
            id,
            prompt(length, id),
            max_tokens=2,
            n=1 + id % 2,
            temperature=0.8 * (id % 3 > 0),
            scored_from=max(1, length - 3) if id % 2 and length > 1 else None,
        )
        for id, length in enumerate(lengths)
    ]
    together, _ = run(model, *requests, max_batch_tokens=max_batch_tokens, max_batch_seqs=max_batch_seqs)
    for each in requests:
        alone, _ = run(model, each)
        for key, own in alone.items():
            assert together[key].tokens == own.tokens
            assert _numbers(together[key]) == _numbers(own)


def _numbers(gathered: Gathered) -> list[float]:
    return [each.logprob for each in (*gathered.prompt_logprobs, *gathered.logprobs)]


def test_the_likelihood_of_what_was_generated_is_the_product_of_its_steps(model: HrmModel) -> None:
    found, _ = run(model, request(1, prompt(5), max_tokens=8, temperature=1.0))
    whole = [*prompt(5), *found[1, 0].tokens]
    scored, core = run(model, request(2, whole, max_tokens=0, scored_from=5), max_batch_tokens=20)
    assert [each.token_id for each in scored[2, 0].prompt_logprobs] == found[1, 0].tokens
    assert _numbers(scored[2, 0]) == pytest.approx(_numbers(found[1, 0]), abs=1e-6)
    # A pass for each token of the continuation, and none for the prompt's own.
    assert core.scheduler.counters.computed_tokens == sum(range(5, 13))
    assert core.scheduler.counters.steps > 1


def test_one_pass_sees_what_comes_after(model: HrmModel) -> None:
    ids = prompt(12)
    found, core = run(model, request(1, ids, max_tokens=0, scored_from=8, one_pass=True))
    logprobs = model.head(states(model, ids, model.config.decoding_steps)).log_softmax(-1)
    expected = [float(logprobs[at - 1, ids[at]]) for at in range(8, 12)]
    assert _numbers(found[1, 0]) == pytest.approx(expected, abs=1e-5)
    assert core.scheduler.counters.computed_tokens == 12
    honest, _ = run(model, request(1, ids, max_tokens=0, scored_from=8))
    assert _numbers(honest[1, 0]) != pytest.approx(expected, abs=1e-3)


# --- halting --------------------------------------------------------------------------------------------------------

MOST = 6


def train_halting(model: HrmModel, examples: Sequence[Sequence[int]]) -> None:
    """Fits the q-head so that a sequence halts after a number of steps that depends on its length."""
    features, targets = [], []
    for ids in examples:
        for steps, state in enumerate(_first_states(model, ids), 1):
            features.append(torch.cat((state, torch.ones(1))))
            targets.append(1.0 if steps >= 1 + len(ids) % 3 else -1.0)
    fitted = torch.linalg.lstsq(torch.stack(features), torch.tensor(targets)[:, None]).solution[:, 0]
    head = model.inner.q_head
    head.weight.data = torch.stack((fitted[:-1], -fitted[:-1]))
    head.bias.data = torch.stack((fitted[-1], -fitted[-1]))


def _first_states(model: HrmModel, ids: Sequence[int]) -> Iterator[Tensor]:
    """What the q-head sees after each step."""
    layout = Ragged([model.config.puzzle_len + len(ids)], torch.device("cpu"))
    embedded, carry = model.embed(torch.tensor(ids), layout), model.start(layout)
    for _ in range(MOST):
        carry = model.advance(carry, embedded, layout)
        yield carry.z_h[0].clone()


def halting_step(model: HrmModel, ids: Sequence[int]) -> int:
    """The step after which the head prefers to halt; the last if none is."""
    layout = Ragged([model.config.puzzle_len + len(ids)], torch.device("cpu"))
    embedded, carry = model.embed(torch.tensor(ids), layout), model.start(layout)
    for step in range(1, MOST):
        carry = model.advance(carry, embedded, layout)
        halt, go_on = model.halting(carry, layout)[0].tolist()
        if halt > go_on:
            return step
    return MOST


def test_a_halted_sequence_leaves_and_the_others_go_on(model: HrmModel) -> None:
    examples = [prompt(length, length) for length in range(3, 15)]
    train_halting(model, examples)
    steps = [halting_step(model, ids) for ids in examples]
    assert len(set(steps)) > 1
    assert min(steps) < MOST
    requests = [request(id, ids, max_tokens=1) for id, ids in enumerate(examples)]
    found, core = run(model, *requests, steps=MOST, halting=True)
    for id, (ids, own) in enumerate(zip(examples, steps, strict=True)):
        # As the full run is at the step at which it halts.
        expected = next_logprobs(model, ids, own)
        [logprob] = found[id, 0].logprobs
        assert logprob.token_id == int(expected.argmax())
        assert math.isclose(logprob.logprob, float(expected[logprob.token_id]), abs_tol=1e-5)
    counters = core.scheduler.counters
    assert counters.outer_steps == sum(steps)
    assert counters.saved_steps == MOST * len(steps) - sum(steps) > 0


def test_without_halting_all_steps_are_taken(model: HrmModel) -> None:
    requests = [request(id, prompt(length), max_tokens=1) for id, length in enumerate((3, 9, 9))]
    _, core = run(model, *requests, steps=3)
    assert (core.scheduler.counters.outer_steps, core.scheduler.counters.saved_steps) == (9, 0)


# --- puzzles --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> HrmModel:
    checkpoint = open_hrm(write_brain(tmp_path_factory.mktemp("solver"), dialect="upstream", puzzle_size=40, **SHALLOW))
    return load_hrm(HrmConfig.read(checkpoint.config), checkpoint.tensors(), torch.float32)


def solved_alone(model: HrmModel, ids: Sequence[int], puzzle: int, steps: int) -> tuple[list[int], list[float]]:
    """The likeliest token at each position, and the q-head's logits, by the model itself."""
    layout = Ragged([model.config.puzzle_len + len(ids)], torch.device("cpu"))
    embedded, carry = model.embed(torch.tensor(ids), layout, [puzzle]), model.start(layout)
    for _ in range(steps):
        carry = model.advance(carry, embedded, layout)
    best = model.head(carry.z_h[model.config.puzzle_len :]).argmax(-1)
    return best.tolist(), model.halting(carry, layout)[0].tolist()


@pytest.mark.parametrize("max_batch_tokens", [20, 512])
def test_puzzles_are_solved_together_beside_texts_as_the_model_solves_each(
    solver: HrmModel, max_batch_tokens: int
) -> None:
    puzzles = [(prompt(9, seed=i), i % 3) for i in range(4)] + [(prompt(128), 1), (prompt(128), 2)]
    requests = [request(i, ids, max_tokens=0, puzzle=puzzle) for i, (ids, puzzle) in enumerate(puzzles)]
    texts = [request(10, prompt(5), max_tokens=3), request(11, prompt(7), max_tokens=0, scored_from=3)]
    found, core = run(solver, *requests, *texts, max_batch_tokens=max_batch_tokens)
    for i, (ids, puzzle) in enumerate(puzzles):
        own = found[i, 0]
        best, (q_halt, q_continue) = solved_alone(solver, ids, puzzle, 4)
        assert own.solution == Solution(best, 4, q_halt, q_continue)
        assert not own.tokens
        assert not own.prompt_logprobs
    assert found[10, 0].solution is None
    assert len(found[10, 0].tokens) == 3
    assert len(found[11, 0].prompt_logprobs) == 4
    assert core.scheduler.counters.saved_steps == 0


def test_puzzles_that_halt_say_after_how_many_steps(solver: HrmModel) -> None:
    puzzles = [(prompt(9, seed=i), i % 3) for i in range(12)]
    requests = [request(i, ids, max_tokens=0, puzzle=puzzle) for i, (ids, puzzle) in enumerate(puzzles)]
    found, core = run(solver, *requests, steps=6, halting=True)
    taken = []
    for i, (ids, puzzle) in enumerate(puzzles):
        own = found[i, 0].solution
        assert own is not None
        assert (own.predictions, [own.q_halt, own.q_continue]) == solved_alone(solver, ids, puzzle, own.steps)
        assert own.halted or own.steps == 6
        taken.append(own.steps)
    assert len(set(taken)) > 1
    assert core.scheduler.counters.saved_steps == 6 * 12 - sum(taken)


@pytest.mark.parametrize(
    ("kind", "puzzle", "complaint"),
    [
        ("aios", 0, "for HRM checkpoints of upstream's dialect"),
        ("upstream", 1, "knows puzzles from 0 to 0"),
        ("upstream", -1, "knows puzzles from 0 to 0"),
    ],
)
def test_puzzles_that_a_model_does_not_know_are_refused(
    tmp_path_factory: pytest.TempPathFactory, kind: str, puzzle: int, complaint: str
) -> None:
    checkpoint = open_hrm(write_brain(tmp_path_factory.mktemp(kind), **KINDS[kind]))
    other = load_hrm(HrmConfig.read(checkpoint.config), checkpoint.tensors(), torch.float32)
    with pytest.raises(BadRequest, match=complaint):
        run(other, request(1, [1, 2], max_tokens=0, puzzle=puzzle))
