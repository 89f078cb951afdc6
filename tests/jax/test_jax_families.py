"""Every family on one to eight ranks: exactly the tokens of the torch runner, in float32."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from every_family import CASES, DENSE, TINY
from jax_models import DEGREES, FAMILIES, ROWS, jax_runner
from native_models import savable_model

from ostro.backends.jax.layout import jax_architecture
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner
from ostro.engine.scheduler import Limits
from ostro.errors import BadRequest, UnsupportedModel
from ostro.models.architecture import Architecture
from ostro.models.cut import cut
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model

Tokens = dict[tuple[int, int], list[int]]

PARAMS: Sequence[SamplingParams] = (
    SamplingParams(max_tokens=8, temperature=0),
    SamplingParams(max_tokens=8, temperature=1.0),
    SamplingParams(max_tokens=8, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=8, temperature=1.0, n=3),
)


@cache
def model_of(family: str) -> Model:
    return savable_model(FAMILIES[family])


def generated(runner: ModelRunner, lengths: Sequence[int] = (3, 21, 40, 10)) -> Tokens:
    random = np.random.default_rng(7)
    core = EngineCore(runner, Limits(max_batch_tokens=48, max_batch_seqs=ROWS))
    for id, (length, params) in enumerate(zip(lengths, PARAMS, strict=True)):
        prompt = tuple(random.integers(0, 300, length).tolist())
        core.add(Request(id=id, prompt_ids=prompt, params=params, seed=id))
    tokens: Tokens = {}
    while core.has_work:
        for step in core.step():
            tokens.setdefault((step.request_id, step.choice), []).extend(step.token_ids)
    core.check_integrity()
    return tokens


@cache
def expected(family: str) -> Tokens:
    return generated(TorchRunner(model_of(family), page_size=4, num_pages=128))


def is_divisible(config: Mapping[str, object], ranks: int) -> bool:
    described = describe(config)
    assert isinstance(described, Architecture)
    try:
        cut(described, ranks)
    except BadRequest:
        return False
    return True


def test_all_families_are_divisible() -> None:
    assert all(is_divisible(config, ranks) for config in FAMILIES.values() for ranks in DEGREES)


def cases() -> Iterator[ParameterSet]:
    """Compiling takes seconds for each. `make test` lowers the steps of some, and its tests of the runner have Llama;
    `make test-all` has each family on one number of ranks, and one with norms over all of them.
    """
    for index, family in enumerate(FAMILIES):
        for tp in DEGREES:
            is_quick = tp == DEGREES[index % len(DEGREES)] or (family, tp) == ("olmo2", 8)
            yield pytest.param(
                family, tp, marks=pytest.mark.full if is_quick else pytest.mark.slow, id=f"{family}-{tp}"
            )


@pytest.mark.parametrize(("family", "tp"), list(cases()))
def test_tokens_are_those_of_the_torch_runner(family: str, tp: int) -> None:
    runner = jax_runner(FAMILIES[family], model_of(family), tp=tp)
    tokens = generated(runner)
    assert sum(map(len, tokens.values())) == 6 * 8
    assert tokens == expected(family)


def refused(name: str) -> str | None:
    try:
        jax_architecture(describe(TINY[name]))
    except UnsupportedModel as error:
        return error.message
    return None


def test_hrm_text_mixtures_of_experts_and_what_torch_alone_runs_are_refused_by_name() -> None:
    # Granite 4's case has experts; its variants without them run.
    assert {name for name in CASES if refused(name) is None} == {*DENSE, "qwen3_5", "lfm2"}
    for name, reason in (
        ("hrm_text", "its layers run several times per token"),
        ("olmoe", "it is a mixture of experts"),
        ("qwen3_5_moe", "it is a mixture of experts"),
        ("gemma4", "its layers differ in their heads"),
        ("falcon_h1", "its layers attend and keep a state at once"),
    ):
        assert reason in (refused(name) or ""), name
