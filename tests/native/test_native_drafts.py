"""Drafts on the native core, and on torch: tokens and log-probabilities are those of a run without drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from guessed_drafts import ReplayedDrafts
from native_models import native, needs_library, packed, savable_model
from test_native_lora import adapters_of, natively, on_torch
from test_native_runner import CONFIGS, Gains, drain, prompt, tokens

from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner
from ostro.engine.scheduler import Limits
from ostro.kernels.cpu.library import Cells
from ostro.sampling_params import SamplingParams

pytestmark = needs_library

PARAMS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=30, temperature=0),
    "sampled": SamplingParams(max_tokens=30, temperature=1.3, top_p=0.9, top_k=40),
    "logprobs": SamplingParams(max_tokens=20, temperature=0.7, logprobs=3),
    "penalties": SamplingParams(
        max_tokens=30, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logprobs=0
    ),
    "min_tokens": SamplingParams(max_tokens=30, min_tokens=12, temperature=1.0, stop_token_ids=tuple(range(60))),
    "sigma": SamplingParams(max_tokens=20, temperature=1.0, top_n_sigma=1.0, logit_bias={3: 2.0}),
    "choices": SamplingParams(max_tokens=20, temperature=1.0, n=3, logprobs=0),
}
BANS = tuple((a, b) for a in range(8) for b in range(20))


def both(runner: ModelRunner, asked: Sequence[Request]) -> tuple[Gains, Gains]:
    """A run without drafts, and one that drafts what it gave."""
    limits = Limits(max_batch_tokens=64, max_batch_seqs=8)
    without = drain(EngineCore(runner, limits), *asked)
    core = EngineCore(runner, limits, speculation=ReplayedDrafts(tokens(without)))
    core.scheduler.kv.clear_cache()
    with_drafts = drain(core, *asked)
    counters = core.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    return without, with_drafts


def ask(id: int, length: int, params: SamplingParams, **changes: object) -> Request:
    made = Request(id=id, prompt_ids=prompt(id, length), params=params, seed=id)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("kind", PARAMS)
def test_the_native_core_gives_the_same_to_the_last_bit(kind: str, name: str, tmp_path: Path) -> None:
    runner = native(packed(CONFIGS[name], savable_model(CONFIGS[name]), tmp_path / "packed"), pages=128)
    without, with_drafts = both(runner, [ask(id, 5 + 9 * id, PARAMS[kind]) for id in range(3)])
    assert with_drafts == without


@pytest.mark.parametrize("cells", Cells)
def test_any_precision_of_keys_gives_the_same_to_the_last_bit(cells: Cells, tmp_path: Path) -> None:
    weights = packed(CONFIGS["qwen3"], savable_model(CONFIGS["qwen3"]), tmp_path / "packed", bits=4)
    asked = [ask(id, 5 + 9 * id, PARAMS["logprobs"]) for id in range(3)]
    without, with_drafts = both(native(weights, cells=cells, pages=128), asked)
    assert with_drafts == without


def test_bad_words_are_banned_after_drafts_as_well(tmp_path: Path) -> None:
    runner = native(packed(CONFIGS["llama"], savable_model(CONFIGS["llama"]), tmp_path / "packed"), pages=128)
    params = SamplingParams(max_tokens=60, temperature=1.5)
    asked = [ask(id, 9, params, bad_word_ids=BANS) for id in range(4)]
    without, with_drafts = both(runner, asked)
    assert with_drafts == without


def test_sequences_that_are_preempted_give_the_same(tmp_path: Path) -> None:
    weights = packed(CONFIGS["llama"], savable_model(CONFIGS["llama"]), tmp_path / "packed")
    asked = [ask(id, 20, SamplingParams(max_tokens=40, temperature=1.0, logprobs=0)) for id in range(4)]
    without, _ = both(native(weights, pages=128), asked)
    core = EngineCore(
        native(weights, pages=8), Limits(max_batch_tokens=64), speculation=ReplayedDrafts(tokens(without))
    )
    assert drain(core, *asked) == without
    assert core.scheduler.counters.preemptions > 0
    assert core.scheduler.counters.accepted_tokens > 0


def test_rows_of_drafts_have_their_sequences_adapter(tmp_path: Path) -> None:
    terms = adapters_of("llama", tmp_path)
    asked = [ask(id, 9, PARAMS["logprobs"], adapter=[None, "a", "b", "one"][id]) for id in range(4)]
    for runner in (natively("llama", terms, tmp_path / "packed"), on_torch("llama", terms)):
        limits = Limits(max_batch_tokens=64, max_batch_seqs=8)
        without = drain(EngineCore(runner, limits, adapters=tuple(terms)), *asked)
        core = EngineCore(runner, limits, adapters=tuple(terms), speculation=ReplayedDrafts(tokens(without)))
        assert tokens(drain(core, *asked)) == tokens(without)
        assert core.scheduler.counters.accepted_tokens > 0


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", PARAMS)
def test_torch_gives_the_same_tokens(kind: str) -> None:
    runner = TorchRunner(savable_model(CONFIGS["llama"]), page_size=16, num_pages=128)
    without, with_drafts = both(runner, [ask(id, 5 + 9 * id, PARAMS[kind]) for id in range(3)])
    assert tokens(with_drafts) == tokens(without)
