"""The fake runner's fast twin: the same outputs, at a cost that does not grow with the context."""

import random

import pytest

from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.scheduler import Limits, Progress
from ostro.runner.fake import FakeRunner
from ostro.sampling_params import SamplingParams


def outputs(seed: int, *, strict: bool) -> list[list[Progress]]:
    """Of each step, for requests that share prefixes, fork, are preempted, score and embed."""
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
