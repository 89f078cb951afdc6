"""Models divided over processes give exactly the tokens of one process, in float32: every family, and every oracle.

Starting a process takes seconds: the tests of this file share one group of two ranks and one of four.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from divided_models import FAMILIES
from every_family import DIVISIBLE_STATES
from guessed_drafts import ReplayedDrafts
from model_files import write_checkpoint
from native_models import savable_model
from peft_directory import random_adapter

from ostro.backends.backend import open_model
from ostro.backends.memory import Room
from ostro.backends.ranks.messages import Begin, Load
from ostro.backends.ranks.ranks import Ranks
from ostro.backends.torch.load import first_rank, make_runner
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner
from ostro.engine.scheduler import Limits, Progress
from ostro.errors import BadRequest, Unavailable
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.weights import open_checkpoint

Tokens = dict[tuple[int, int], list[int]]

PAGE = 4
KINDS: Sequence[SamplingParams] = (
    SamplingParams(max_tokens=8, temperature=0),
    SamplingParams(max_tokens=8, temperature=1.0),
    SamplingParams(max_tokens=8, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=8, temperature=1.0, n=3),
)
LENGTHS = (3, 21, 40, 10)
ROOMY = EngineConfig(page_size=PAGE, max_running_tokens=128 * PAGE, device="cpu")


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Ranks]]:
    """By number of ranks; started by the first test that needs them."""
    started: dict[int, Ranks] = {}
    yield started
    for ranks in started.values():
        ranks.close()


def group(groups: dict[int, Ranks], number: int) -> Ranks:
    if number not in groups:
        groups[number] = Ranks(number, backend="gloo")
    return groups[number]


MODELS = {**FAMILIES, **DIVISIBLE_STATES}


@cache
def model_of(family: str) -> Model:
    return savable_model(MODELS[family])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def checkpoint_of(family: str, saved: Path) -> Path:
    directory = saved / family
    return directory if directory.exists() else write_checkpoint(directory, MODELS[family], model_of(family))


def divided(ranks: Ranks, path: Path, config: EngineConfig = ROOMY) -> ModelRunner:
    opened = open_model(open_checkpoint(path), config).divided(ranks.ranks)
    return first_rank(opened, ranks)


def engine(runner: ModelRunner, *, budget: int = 48, adapters: tuple[str, ...] = ()) -> EngineCore:
    return EngineCore(runner, Limits(max_batch_tokens=budget), adapters=adapters)


def prompts(*lengths: int, seed: int = 7) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, 300, length).tolist()) for length in lengths]


def drain(core: EngineCore) -> Iterator[Progress]:
    while core.has_work:
        yield from core.step()
    core.check_integrity()


def run(core: EngineCore, asked: Sequence[Request]) -> Tokens:
    for request in asked:
        core.add(request)
    tokens: Tokens = {}
    for step in drain(core):
        tokens.setdefault((step.request_id, step.choice), []).extend(step.token_ids)
    return tokens


def mixed() -> list[Request]:
    """Greedy, seeded, truncated, forked: prompts in chunks, beside each other."""
    return [
        Request(id=id, prompt_ids=prompt, params=params, seed=id)
        for id, (prompt, params) in enumerate(zip(prompts(*LENGTHS), KINDS, strict=True))
    ]


@cache
def expected(family: str) -> Tokens:
    return run(engine(make_runner(model_of(family), ROOMY)), mixed())


def cases() -> Iterator[ParameterSet]:
    """In the short form, three families on two ranks: OLMo-2 norms across ranks, GPT-2 has biases and odd layouts, and
    Granite's states have a group that all ranks share.
    """
    for family in MODELS:
        for number in (2, 4):
            is_short = number == 2 and family in ("olmo2", "gpt2", "granitemoehybrid")
            yield pytest.param(family, number, marks=() if is_short else pytest.mark.slow, id=f"{family}-{number}")


@pytest.mark.parametrize(("family", "number"), list(cases()))
def test_tokens_are_those_of_one_process(family: str, number: int, groups: dict[int, Ranks], saved: Path) -> None:
    runner = divided(group(groups, number), checkpoint_of(family, saved))
    core = engine(runner)
    tokens = run(core, mixed())
    assert sum(map(len, tokens.values())) == 6 * 8
    assert tokens == expected(family)
    hits = core.scheduler.counters.cache_hits
    assert run(core, mixed()) == expected(family)
    assert core.scheduler.counters.cache_hits > hits


NUMBERS = pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])


@pytest.mark.full
@NUMBERS
def test_preempted_equals_unpreempted(number: int, groups: dict[int, Ranks], saved: Path) -> None:
    tight = EngineConfig(page_size=PAGE, max_running_tokens=14 * PAGE, device="cpu")
    asked = [
        Request(id=id, prompt_ids=prompt, params=KINDS[id % 2], seed=id)
        for id, prompt in enumerate(prompts(10, 14, 9, 12))
    ]
    core = engine(divided(group(groups, number), checkpoint_of("llama", saved), tight))
    assert run(core, asked) == run(engine(make_runner(model_of("llama"), ROOMY)), asked)
    assert core.scheduler.counters.preemptions > 0


@pytest.mark.full
@NUMBERS
@pytest.mark.parametrize("name", DIVISIBLE_STATES)
def test_states_survive_preemption_and_drafts(name: str, number: int, groups: dict[int, Ranks], saved: Path) -> None:
    asked = [
        Request(id=id, prompt_ids=prompt, params=replace(KINDS[id % 2], max_tokens=20), seed=id)
        for id, prompt in enumerate(prompts(10, 14, 9, 12))
    ]
    expected = run(engine(make_runner(model_of(name), ROOMY)), asked)
    ranks, path = group(groups, number), checkpoint_of(name, saved)
    tight = replace(ROOMY, max_running_tokens=12 * PAGE)
    for config, accuracy in ((tight, None), (ROOMY, 0.0), (ROOMY, 0.6), (ROOMY, 1.0), (tight, 0.8)):
        drafts = None if accuracy is None else ReplayedDrafts(expected, accuracy=accuracy, most=8)
        runner = divided(ranks, path, config)
        core = EngineCore(runner, Limits(max_batch_tokens=48), speculation=drafts)
        assert run(core, asked) == expected
        counters = core.scheduler.counters
        assert (counters.preemptions > 0) == (config is tight)
        assert (counters.accepted_tokens > 0) == bool(accuracy)


@NUMBERS
def test_log_probabilities_are_those_of_one_process(number: int, groups: dict[int, Ranks], saved: Path) -> None:
    [prompt] = prompts(33)
    asked = Request(
        id=0,
        prompt_ids=prompt,
        params=SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, logprobs=2),
        seed=0,
        prompt_logprobs_from=1,
    )
    ranks, path = group(groups, number), checkpoint_of("llama", saved)
    found = []
    for core in (engine(make_runner(model_of("llama"), ROOMY)), engine(divided(ranks, path))):
        core.add(asked)
        found.append([each for step in drain(core) for each in step.prompt_logprobs + step.logprobs])
    alone, together = found
    assert len(alone) == 32 + 3
    assert [each.token_id for each in together] == [each.token_id for each in alone]
    assert [each.logprob for each in together] == pytest.approx([each.logprob for each in alone], abs=1e-4)


@pytest.mark.parametrize(
    ("family", "number"),
    [
        ("llama", 2),
        pytest.param("phi3", 4, marks=pytest.mark.slow),
        *(pytest.param(name, 4, marks=pytest.mark.full) for name in ("qwen3_5", "granitemoehybrid")),
    ],
)
def test_adapters_are_divided_too(
    family: str, number: int, groups: dict[int, Ranks], saved: Path, tmp_path: Path
) -> None:
    model = savable_model(MODELS[family])
    names = ("red", "green")
    config = EngineConfig(
        page_size=PAGE,
        max_running_tokens=128 * PAGE,
        device="cpu",
        adapters=tuple((name, str(random_adapter(tmp_path / name, model, seed=at))) for at, name in enumerate(names)),
    )
    asked = [
        Request(id=id, prompt_ids=prompt, params=KINDS[0], seed=id, adapter=adapter)
        for id, (prompt, adapter) in enumerate(zip(prompts(9, 9, 17), (None, *names), strict=True))
    ]
    runner = divided(group(groups, number), checkpoint_of(family, saved), config)
    tokens = run(engine(runner, adapters=names), asked)
    assert tokens == run(engine(make_runner(model, config), adapters=names), asked)
    assert tokens != run(engine(make_runner(model_of(family), ROOMY)), [plain(each) for each in asked])


def plain(request: Request) -> Request:
    return Request(id=request.id, prompt_ids=request.prompt_ids, params=request.params, seed=request.seed)


def test_indivisible_model_is_refused_and_the_ranks_survive(groups: dict[int, Ranks], saved: Path) -> None:
    ranks, path = group(groups, 2), checkpoint_of("olmo2", saved)
    odd: Mapping[str, object] = {**FAMILIES["llama"], "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
    with pytest.raises(BadRequest, match="9 attention heads"):
        divided(ranks, write_checkpoint(saved / "odd", odd, savable_model(odd)))
    assert run(engine(divided(ranks, path)), mixed()) == expected("olmo2")


@pytest.mark.full
def test_a_rank_that_cannot_load_its_part_says_why_and_ends(saved: Path) -> None:
    ranks = Ranks(2, backend="gloo")
    try:
        too_long = EngineConfig(max_seq_len=1 << 20, device="cpu")
        ranks.send(Load(str(checkpoint_of("llama", saved)), too_long))
        with pytest.raises(BadRequest, match="knows only 64 positions") as caught:
            ranks.agree_on(Room(8, 0))
        assert caught.value.param == "max_seq_len"
        assert (ranks.failure or "").startswith("Rank 1 of 2 ended (exit status 1): ")
        assert caught.value.message in (ranks.failure or "")
    finally:
        ranks.close()


@pytest.mark.full
def test_a_rank_with_an_error_that_nobody_expected_says_so_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    """It used to end without a word about the reason, and later with an error after which no engine starts again."""
    ranks = Ranks(2, backend="gloo")
    try:
        # Of a model that was never loaded.
        ranks.send(Begin(8))
        with pytest.raises(Unavailable, match=r"Rank 1 failed \(AssertionError"):
            ranks.agree_on(Room(8, 0))
        assert "AssertionError" in (ranks.failure or "")
        assert "rank 1 failed" in caplog.text
    finally:
        ranks.close()


@pytest.mark.slow
def test_an_interrupted_step_is_the_end_of_the_ranks(saved: Path) -> None:
    """The others would wait in the middle of it, and take the next step's sums for its own."""
    ranks = Ranks(2, backend="gloo")
    try:
        core = EngineCore(divided(ranks, checkpoint_of("llama", saved)))
        core.add(Request(id=0, prompt_ids=(1, 2, 3), params=KINDS[0], seed=0))
        with pytest.raises(KeyboardInterrupt), ranks.in_step():
            raise KeyboardInterrupt
        assert "no longer agree" in (core.runner.failure or "")
        with pytest.raises(Unavailable, match="Load the model again"):
            core.step()
    finally:
        ranks.close()
