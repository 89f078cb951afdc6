"""LoRA adapters on JAX: the tokens and scores of torch's on any number of ranks, with nothing compiled later."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from jax_models import DEGREES, FAMILIES, ROWS, compilations, jax_runner
from model_directory import write_model
from native_models import ModelCheckpoint, savable_model
from peft_directory import DOWN, OF_ANY, random_adapter

from ostro import LLM, EngineConfig, SamplingParams
from ostro.backends.jax.adapters import Adapters
from ostro.backends.jax.layout import AdapterLayout
from ostro.backends.jax.placed import PlacedModel
from ostro.backends.jax.programs import Programs
from ostro.backends.jax.runner import JaxRunner
from ostro.backends.planning import plan
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import NOT_FINITE, ModelRunner
from ostro.engine.scheduler import Limits
from ostro.errors import BadCheckpoint
from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from ostro.torch_models.build import build_model
from ostro.torch_models.lora import Adapters as TorchAdapters
from ostro.weights import open_checkpoint
from ostro.weights.adapter import LowRank, read_adapter

SCORED = SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=0)
SEEDED = SamplingParams(max_tokens=6, temperature=1.0, logprobs=0)
HUGE = "huge"
TP = 4

Gains = dict[tuple[int, int], tuple[list[int], list[float]]]
"""Tokens and log-probabilities, the prompt's among them, by request and choice."""


@cache
def adapters_of(family: str) -> Adapters:
    """Adapters of different ranks and projections; the third changes one kind alone, the last overflows."""
    model = savable_model(FAMILIES[family])
    with TemporaryDirectory() as directory:
        made = {
            "a": random_adapter(Path(directory, "a"), model, rank=4, seed=1, targets=OF_ANY),
            "b": random_adapter(Path(directory, "b"), model, rank=9, seed=2, targets=OF_ANY),
            "one": random_adapter(Path(directory, "one"), model, rank=2, seed=3, targets=DOWN, spread=0.5),
        }
        terms = {name: read_adapter(path) for name, path in made.items()}
    [(target, term), *_] = terms["one"].items()
    huge = LowRank(np.full_like(term.a, 1e30), np.full_like(term.b, 1e30), 1.0)
    return {**terms, HUGE: {target: huge}}


@cache
def adapted_runner(family: str, tp: int) -> JaxRunner:
    config = FAMILIES[family]
    return jax_runner(config, savable_model(config), tp=tp, adapters=adapters_of(family))


def torch_runner(family: str) -> TorchRunner:
    model = savable_model(FAMILIES[family])
    adapters = TorchAdapters(model, adapters_of(family))
    adapters.attach(model)
    return TorchRunner(model, page_size=4, num_pages=128, adapters=adapters)


def engine(runner: ModelRunner, *, budget: int = 64) -> EngineCore:
    limits = Limits(max_batch_tokens=budget, max_batch_seqs=ROWS)
    return EngineCore(runner, limits, adapters=("a", "b", "one", HUGE))


def run(core: EngineCore, asked: list[Request]) -> Gains:
    for each in asked:
        core.add(each)
    gains: Gains = {}
    while core.has_work:
        for gain in core.step():
            assert gain.error is None
            tokens, scores = gains.setdefault((gain.request_id, gain.choice), ([], []))
            tokens.extend(gain.token_ids)
            scores.extend(each.logprob for each in (*gain.prompt_logprobs, *gain.logprobs))
    core.check_integrity()
    return gains


def prompt(id: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(id).integers(0, 300, length).tolist())


def requests() -> list[Request]:
    """Requests for each adapter and for none; two have the same prompt, and two neighbours share an adapter."""
    mixed = [(5, "a"), (17, None), (9, "b"), (33, "b"), (1, "one"), (12, None), (5, None)]
    return [
        Request(id=id, prompt_ids=prompt(length, length), params=SCORED, seed=id, prompt_logprobs_from=1, adapter=name)
        for id, (length, name) in enumerate(mixed)
    ] + [Request(id=7, prompt_ids=prompt(7, 8), params=SEEDED, seed=7, adapter="a")]


def tokens(gains: Gains) -> dict[tuple[int, int], list[int]]:
    return {key: gain[0] for key, gain in gains.items()}


def cases() -> Iterator[ParameterSet]:
    """Compiling takes many seconds for each. The other tests of this file have the runner of the quick one, too."""
    for family in FAMILIES:
        for tp in DEGREES if family == "llama" else (2,):
            is_short = (family, tp) == ("llama", TP)
            yield pytest.param(
                family, tp, marks=pytest.mark.full if is_short else pytest.mark.slow, id=f"{family}-{tp}"
            )


@pytest.mark.parametrize(("family", "tp"), list(cases()))
def test_tokens_and_scores_are_those_of_the_torch_runner(family: str, tp: int) -> None:
    found, expected = run(engine(adapted_runner(family, tp)), requests()), run(engine(torch_runner(family)), requests())
    assert tokens(found) == tokens(expected)
    for key, (_, scores) in expected.items():
        assert found[key][1] == pytest.approx(scores, abs=2e-3)
    # The same prompt, with an adapter and without.
    assert found[0, 0][1][:4] != pytest.approx(found[6, 0][1][:4], abs=0.1)


@pytest.mark.full
def test_a_row_has_the_same_tokens_alone_and_beside_rows_of_other_adapters() -> None:
    runner = adapted_runner("llama", TP)
    together = tokens(run(engine(runner), requests()))
    for each in requests():
        assert tokens(run(engine(runner), [each])) == {(each.id, 0): together[each.id, 0]}
    assert tokens(run(engine(runner, budget=7), requests())) == together


@pytest.mark.full
def test_an_adapter_that_overflows_fails_alone() -> None:
    runner = adapted_runner("llama", TP)
    clean, core = run(engine(runner), requests()), engine(runner)
    for each in [*requests(), Request(id=50, prompt_ids=(1, 2, 3), params=SCORED, seed=0, adapter=HUGE)]:
        core.add(each)
    steps = []
    while core.has_work:
        steps += core.step()
    assert {(step.request_id, step.error) for step in steps if step.error} == {(50, NOT_FINITE)}
    for id, choice in clean:
        assert [token for step in steps if step.request_id == id for token in step.token_ids] == clean[id, choice][0]


@pytest.mark.full
def test_nothing_is_compiled_after_loading_whichever_adapters_a_step_has() -> None:
    runner = adapted_runner("llama", TP)
    random = np.random.default_rng(3)
    core, names = engine(runner), [None, None, "a", "b", "one"]
    with compilations() as made:
        for id in range(30):
            params = SamplingParams(max_tokens=int(random.integers(1, 9)), temperature=float(id % 2), n=1 + id % 3)
            length, name = int(random.integers(1, 40)), names[int(random.integers(0, 5))]
            core.add(Request(id=id, prompt_ids=prompt(id, length), params=params, seed=id, adapter=name))
            for _ in range(int(random.integers(0, 9))):
                core.step()
        while core.has_work:
            core.step()
    assert made == []


def names(runner: JaxRunner) -> set[str]:
    """Names of its programs, without the part after their shapes."""
    assert isinstance(runner.programs, Programs)
    return {" ".join(map(str, key[:2])) for key in runner.programs}


@pytest.mark.full
def test_steps_without_adapters_are_those_of_the_base_alone() -> None:
    """Bit for bit: programs of their own multiply by no adapter."""
    base = jax_runner(FAMILIES["llama"], savable_model(FAMILIES["llama"]), tp=TP)
    adapted = adapted_runner("llama", TP)
    keys, further = names(base), names(adapted) - names(base)
    assert further == {f"{key}, with adapters" for key in keys if key.startswith(("step", "generate"))}
    asked = [each for each in requests() if each.adapter is None]
    assert run(engine(adapted), asked) == run(engine(base), asked)


def layout(*ranks: int) -> AdapterLayout:
    described = describe(FAMILIES["llama"])
    assert isinstance(described, Architecture)
    terms = {str(number): {"model.layers.1.self_attn.v_proj": rank} for number, rank in enumerate(ranks)}
    return AdapterLayout.of(described, terms)


def test_tables_are_as_wide_as_the_next_power_of_two_and_absent_where_no_adapter_changes_anything() -> None:
    assert [layout(*ranks).widths for ranks in ((3,), (8,), (8, 1), (8, 8), (8, 8, 16), (8, 8, 17))] == [
        (8, 0, 0, 0),
        (8, 0, 0, 0),
        (16, 0, 0, 0),
        (16, 0, 0, 0),
        (32, 0, 0, 0),
        (64, 0, 0, 0),
    ]
    assert layout(2, 3).owners(0)[:5] == [1, 1, 2, 2, 2]


def placed(family: str, tp: int, adapters: Adapters | None, dtype: object = np.float32) -> PlacedModel:
    config = FAMILIES[family]
    checkpoint = ModelCheckpoint(savable_model(config), config)
    return PlacedModel.load(describe(config), checkpoint, tensor_parallel=tp, adapters=adapters, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "phi3"])
def test_adapters_are_counted_as_each_rank_holds_them(family: str) -> None:
    plain, adapted = placed(family, 8, None), placed(family, 8, adapters_of(family))
    assert adapted.adapters is not None
    counted = adapted.adapters.layout.values(adapted.described, adapted.cut)
    owners = sum(adapted.adapters.layout.widths)
    assert (counted + owners) * 4 == adapted.rank_bytes - plain.rank_bytes


def test_an_adapter_that_does_not_fit_the_dtype_is_refused_by_name() -> None:
    """Infinity times zero is NaN: it would spoil the rows of others."""
    with pytest.raises(
        BadCheckpoint, match=r"Adapter 'huge' changes .*down_proj' by numbers that are too large for float16"
    ):
        placed("llama", 1, adapters_of("llama"), np.float16)
    placed("llama", 1, adapters_of("llama"), jnp.bfloat16)


def test_an_adapter_of_another_model_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="the adapter may have been made for another model"):
        placed("llama", 1, adapters_of("gpt2"))


def saved_adapters(directory: Path, model: Path) -> Mapping[str, Path]:
    base = build_model(open_checkpoint(model).config, dtype=torch.float32)
    return {
        name: random_adapter(directory / name, base, seed=seed, rank=seed) for seed, name in ((3, "red"), (5, "tan"))
    }


def test_a_plan_counts_the_tables_of_adapters(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    paths = saved_adapters(tmp_path, model)
    config = EngineConfig(backend="jax", device="cpu", max_batch_seqs=8, max_batch_tokens=64, kv_memory=1 << 20)
    adapted = replace(config, adapters=tuple((name, str(path)) for name, path in paths.items()))
    before, after = (plan(model, each, memory=8 << 30, device="cpu") for each in (config, adapted))
    checkpoint = open_checkpoint(model)
    held = [
        PlacedModel.load(describe(checkpoint.config), checkpoint, adapters=terms)
        for terms in (None, {name: read_adapter(path) for name, path in paths.items()})
    ]
    assert held[1].adapters is not None
    owners = 4 * sum(held[1].adapters.layout.widths)
    assert after.weights_bytes - before.weights_bytes == held[1].rank_bytes - held[0].rank_bytes - owners


@pytest.mark.slow
def test_a_program_names_adapters_as_on_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    model = write_model(tmp_path / "model")
    paths = saved_adapters(tmp_path, model)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    def texts(backend: str, **settings: object) -> list[str]:
        config = EngineConfig(backend=backend, device="cpu", kv_memory=8 << 20, max_batch_seqs=8, **settings)  # type: ignore[arg-type]
        llm = LLM(model, config, adapters=paths)
        return [each.text for each in llm.generate(["the quick fox"] * 3, params, adapter=[None, "red", "tan"])]

    expected = texts("torch")
    assert len(set(expected)) == 3
    assert texts("jax", tensor_parallel=2, max_batch_tokens=64) == expected
