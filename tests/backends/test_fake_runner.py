"""The fake runner's fast twin: the same outputs, at a cost that does not grow with the context."""

import random

import pytest

from ostro.backends.fake import FakeRunner, Script
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.scheduler import Limits, Progress
from ostro.sampling_params import SamplingParams


def outputs(seed: int, *, strict: bool) -> list[list[Progress]]:
    """Each step's outputs, for requests that share prefixes, fork, are preempted, score and embed."""
    dice = random.Random(seed)
    core = EngineCore(FakeRunner(num_pages=13, strict=strict), Limits(max_batch_tokens=12, max_batch_seqs=6))
    for id in range(12):
        embed = dice.random() < 0.2
        params = SamplingParams(max_tokens=0 if embed else dice.randrange(1, 20), n=1 if embed else dice.choice((1, 3)))
        request = Request(
            id=id,
            prompt_ids=(1,) * dice.randrange(1, 30) + (id,),
            params=params,
            seed=id,
            prompt_logprobs_from=dice.choice((None, 2)),
            task=Task.EMBED if embed else Task.GENERATE,
        )
        core.add(request)
    steps = []
    while core.has_work:
        steps.append(core.step())
        core.check_integrity()
    assert core.scheduler.counters.preemptions > 0
    return steps


@pytest.mark.parametrize("seed", range(5))
def test_lenient_runner_gives_what_the_strict_one_gives(seed: int) -> None:
    assert outputs(seed, strict=False) == outputs(seed, strict=True)


def test_scripted_answer_comes_word_for_word_and_then_the_end() -> None:
    scripts = [Script([7, 7], [[1, 2, 3], [4]]), Script([8], [[5]])]
    core = EngineCore(FakeRunner(scripts=scripts))
    for id, prompt in enumerate([(1, 7, 7, 2), (7, 7, 8), (8, 7, 7), (7, 8, 7), (1, 2)]):
        params = SamplingParams(max_tokens=6, n=2, temperature=0)
        core.add(Request(id=id, prompt_ids=prompt, params=params, seed=0, eos_ids=frozenset({999})))
    found: dict[tuple[int, int], list[int]] = {}
    while core.has_work:
        for step in core.step():
            found.setdefault((step.request_id, step.choice), []).extend(step.token_ids)
    assert [found[0, 0], found[0, 1]] == [[1, 2, 3, 999], [4, 999]]
    assert [found[1, 0], found[2, 0], found[3, 0]] == [[5, 999], [1, 2, 3, 999], [5, 999]]
    assert len(found[4, 0]) == 6
