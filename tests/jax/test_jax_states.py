"""Models whose layers keep a state, on JAX: the tokens of transformers, and the standing oracles, on one device and
divided by heads.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import gguf_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from every_family import CASES, DIVISIBLE_STATES
from jax_models import ROWS, compilations, jax_runner, jax_runner_of
from native_models import ModelCheckpoint, savable_model
from peft_directory import random_adapter
from safetensors.torch import save_file
from telling_weights import telling
from test_jax_runner import Narrow, Tokens, drain, draw_prompts, engine, run
from transformers.core_model_loading import revert_weight_conversion

from ostro.backends.backend import open_model
from ostro.backends.jax.layout import VectorLayout, jax_architecture, matrix_values
from ostro.backends.jax.load import jax_runner as load_jax
from ostro.backends.jax.placed import PlacedModel
from ostro.backends.jax.recurrent import delta_step, ssm_step
from ostro.backends.jax.runner import JaxRunner
from ostro.backends.planning import plan
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig
from ostro.engine.batch import Batch, Chunk
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner, Step
from ostro.errors import BadRequest, Unsupported, UnsupportedModel
from ostro.models.architecture import Architecture
from ostro.models.cut import cut
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models import recurrent as plain
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_described, build_model
from ostro.torch_models.loading import load_weights
from ostro.weights import open_checkpoint
from ostro.weights.adapter import read_adapter

VOCAB = 300
STATES = 64
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def refused(config: Mapping[str, object]) -> str | None:
    try:
        jax_architecture(describe(config))
    except UnsupportedModel as error:
        return error.message
    return None


CONFIGS = {
    name: {**config, "max_position_embeddings": 512}
    for name, config in DIVISIBLE_STATES.items()
    if refused(config) is None
}
QUICK = ("qwen3_5", 4)
"""Compiling takes seconds for each: `make test` has this one."""


def some(*others: tuple[str, int]) -> pytest.MarkDecorator:
    """Models and numbers of ranks."""
    marked = [pytest.param(*other, marks=pytest.mark.full, id=f"{other[0]}-{other[1]}") for other in others]
    return pytest.mark.parametrize(("name", "tp"), [pytest.param(*QUICK, id="qwen3_5-4"), *marked])


EVERY = some(*((name, tp) for name in CONFIGS for tp in (1, 4) if (name, tp) != QUICK))
ONE_OF_EACH = some(("qwen3_5", 1), ("granitemoehybrid", 1), ("granitemoehybrid", 4), ("lfm2", 2))


@cache
def reference_of(name: str) -> transformers.PreTrainedModel:
    settings = deepcopy(dict(CONFIGS[name]))
    own = CASES[name.split("-")[0]].reference
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings, **own)
    return telling(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@cache
def model_of(name: str) -> Model:
    """The same for torch. States remember long enough for every token to count for many that follow."""
    reference = reference_of(name)
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            if key.endswith("A_log"):
                parameter.copy_(torch.linspace(-4, 0, len(parameter)))
    model = build_model(CONFIGS[name], dtype=torch.float32)
    load_weights(model, revert_weight_conversion(reference, reference.state_dict()).items())
    return model


@cache
def shared_runner(name: str, tp: int) -> JaxRunner:
    """Tests share runners: no state is read that was not written for its sequence."""
    return jax_runner(CONFIGS[name], model_of(name), tp=tp, pages=256, states=STATES)


def cold(runner: ModelRunner, prompts: Sequence[tuple[int, ...]], params: SamplingParams = GREEDY) -> Tokens:
    """Each prompt alone, from an empty cache."""
    found: Tokens = {}
    for id, prompt in enumerate(prompts):
        found |= run(engine(runner, prefix_caching=False), [prompt], params, first_id=id)
    return found


# Against transformers


@pytest.mark.cases(2)
@EVERY
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 150])
def test_scores_of_a_prompt_are_those_of_transformers(name: str, tp: int, length: int) -> None:
    """Within 1e-5 of the largest logit, beyond what its own two ways differ by: in blocks, and token by token."""
    model_of(name)
    reference, [prompt] = reference_of(name), draw_prompts(length + 1)
    ids, past, rows = torch.tensor([prompt]), None, []
    with torch.inference_mode():
        logits = reference(ids, use_cache=False).logits[0]
        for token in prompt:
            step = reference(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = step.past_key_values
            rows.append(step.logits[0])
    assert logits.std() > 0.3, "the test would not see a difference"
    allowed = 2e-5 * logits.abs().max().item() + 2 * (torch.cat(rows) - logits).abs().max().item()
    core = engine(shared_runner(name, tp))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1))
    found = [entry.logprob for step in drain(core) for entry in step.prompt_logprobs]
    expected = logits.log_softmax(-1)[torch.arange(length), list(prompt[1:])]
    assert found == pytest.approx(expected.tolist(), abs=allowed)


@EVERY
def test_greedy_tokens_are_those_of_transformers(name: str, tp: int) -> None:
    model_of(name)
    reference, prompts = reference_of(name), draw_prompts(1, 3, 63, 64, 65, 150)
    params = SamplingParams(max_tokens=64, temperature=0)
    found = run(engine(shared_runner(name, tp)), prompts, params)
    for id, prompt in enumerate(prompts):
        with torch.inference_mode():
            whole = reference.generate(
                torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
            )
        assert found[id, 0] == whole[0, len(prompt) :].tolist()


@EVERY
def test_tokens_are_those_of_the_torch_runner(name: str, tp: int) -> None:
    prompts, params = draw_prompts(2, 9, 21, 70), SamplingParams(max_tokens=12, temperature=1.0, n=2)
    torchs = TorchRunner(model_of(name), page_size=4, num_pages=256, num_states=STATES)
    assert run(engine(shared_runner(name, tp)), prompts, params) == run(engine(torchs), prompts, params)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid-dense"])
def test_a_divided_gguf_file_gives_the_tokens_of_the_torch_runner(name: str, tmp_path: Path) -> None:
    """Though its value heads are tiled, so that a rank holds some of each tile."""
    case = gguf_cases.CASES[name]
    kind = gguf.GGMLQuantizationType.Q8_0
    path = gguf_cases.save(tmp_path / "tiny.gguf", case, gguf_cases.build(case.config), kind)
    described = describe(open_checkpoint(path).config)
    assert isinstance(described, Architecture)
    whole = build_described(described, dtype=torch.float32)
    load_weights(whole, open_checkpoint(path).tensors())
    prompts = [tuple(token % 96 for token in prompt) for prompt in draw_prompts(3, 20, 9)]
    torchs = TorchRunner(whole, page_size=4, num_pages=128, num_states=16)
    divided = jax_runner_of(open_checkpoint(path), tp=2)
    assert run(engine(divided), prompts) == run(engine(torchs), prompts)


# Oracles


def test_every_token_of_a_prompt_counts() -> None:
    """Or the others would not see a state that is lost."""
    [prompt] = draw_prompts(40)
    other = ((prompt[0] + 1) % VOCAB, *prompt[1:])
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=0)

    def score(ids: tuple[int, ...]) -> float:
        core = engine(shared_runner(*QUICK))
        core.add(Request(id=0, prompt_ids=ids, params=params, seed=0))
        [entry] = [entry for step in drain(core) for entry in step.logprobs]
        return entry.logprob

    assert score(prompt) != pytest.approx(score(other), abs=1e-4)


@ONE_OF_EACH
def test_alone_equals_batched(name: str, tp: int) -> None:
    prompts, runner = draw_prompts(3, 8, 21, 40, 5, 13), shared_runner(name, tp)
    assert run(engine(runner), prompts) == cold(runner, prompts)


@pytest.mark.cases(2)
@ONE_OF_EACH
@pytest.mark.parametrize("budget", [1, 3, 7, 17])
def test_whole_equals_chunked(name: str, tp: int, budget: int) -> None:
    prompts, runner = draw_prompts(2, 21, 64), shared_runner(name, tp)
    assert run(engine(runner, budget=budget), prompts) == run(engine(runner), prompts)


@ONE_OF_EACH
def test_a_hit_at_each_snapshot_equals_cold(name: str, tp: int) -> None:
    """Prompts that part from a long one after each of its pages, and then that one again."""
    runner, [whole, *others] = shared_runner(name, tp), draw_prompts(30, *[9] * 7)
    parted = [whole[: 4 * page] + others[page - 1][turn:] for turn in range(2) for page in range(1, 8)]
    prompts = [whole, *parted, whole]
    # Before there is a cache, which another engine on the same runner would overwrite.
    expected = cold(runner, prompts)
    core = engine(runner)
    for id, prompt in enumerate(prompts):
        assert run(core, [prompt], first_id=id) == {(id, 0): expected[id, 0]}
    assert core.scheduler.counters.cache_hits >= 14 * 4


@ONE_OF_EACH
def test_an_answer_fed_back_as_a_prompt_equals_the_same_text_computed_cold(name: str, tp: int) -> None:
    runner, [text, *questions] = shared_runner(name, tp), draw_prompts(20, 5, 6, 7)
    turns = []
    for question in questions:
        turns.append(text + question)
        [answer] = cold(runner, turns[-1:]).values()
        text = turns[-1] + tuple(answer)
    expected, core = cold(runner, turns), engine(runner)
    for id, turn in enumerate(turns):
        assert run(core, [turn], first_id=id) == {(id, 0): expected[id, 0]}
    assert core.scheduler.counters.cache_hits > 0


@ONE_OF_EACH
def test_unpreempted_equals_preempted(name: str, tp: int) -> None:
    prompts, runner = draw_prompts(10, 14, 9, 12), shared_runner(name, tp)
    core = engine(Narrow(runner, num_pages=14))
    assert run(core, prompts) == cold(runner, prompts)
    assert core.scheduler.counters.preemptions > 0


@pytest.mark.cases(2)
@ONE_OF_EACH
@pytest.mark.parametrize("states", [1, 2, 5])
def test_few_slots_change_no_token(name: str, tp: int, states: int) -> None:
    prompts, runner = draw_prompts(10, 14, 9, 12, 30), shared_runner(name, tp)
    core, expected = engine(Narrow(runner, num_states=states)), cold(runner, prompts)
    for _ in range(2):
        assert run(core, prompts) == expected


@ONE_OF_EACH
def test_forked_choices_equal_requests_of_their_own(name: str, tp: int) -> None:
    [prompt], runner = draw_prompts(11), shared_runner(name, tp)
    params = SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=3)
    forked = run(engine(runner), [prompt], params)
    assert len({*map(tuple, forked.values())}) == 3
    assert forked == run(engine(runner, budget=5, prefix_caching=False), [prompt], params)


@ONE_OF_EACH
def test_a_step_ahead_changes_no_token(name: str, tp: int) -> None:
    prompts, runner = draw_prompts(5, 30, 2), shared_runner(name, tp)
    assert run(engine(runner), prompts) == run(engine(Narrow(runner, steps_ahead=0)), prompts)


def captured(runner: JaxRunner, slot: int) -> list[Any]:
    return [np.array(own[:, slot]) for own in jax.tree.leaves(runner._cache.states)]


class Watching(Narrow):
    """Adds captures at chosen offsets to the first chunk of a sequence, into slots that the engine does not know."""

    def __init__(self, runner: JaxRunner, offsets: Sequence[int]) -> None:
        super().__init__(runner, num_states=ROWS)
        self._offsets, self.launch = offsets, self._launch

    def _launch(self, batch: Batch) -> Step:
        slots = {offset: ROWS + number for number, offset in enumerate(self._offsets)}

        def watched(chunk: Chunk) -> Chunk:
            taken = [
                (offset - chunk.start, slots[offset]) for offset in self._offsets if chunk.start < offset <= chunk.end
            ]
            return type(chunk)(chunk.seq, chunk.start, chunk.length, chunk.samples, captures=tuple(taken))

        return self._runner.launch(replace(batch, chunks=tuple(map(watched, batch.chunks))))


@ONE_OF_EACH
def test_a_state_captured_within_a_chunk_is_that_of_a_prompt_that_ends_there(name: str, tp: int) -> None:
    """After any of its tokens, however the prompt is cut; the state itself goes on."""
    runner, [prompt], offsets = shared_runner(name, tp), draw_prompts(30), (1, 2, 5, 16, 29, 30)
    expected = {}
    for offset in offsets:
        core = engine(Narrow(runner, num_states=1), prefix_caching=False)
        run(core, [prompt[:offset]], SamplingParams(max_tokens=1, temperature=0))
        expected[offset] = captured(runner, slot=0)
    for budget in (64, 7, 1):
        core = engine(Watching(runner, offsets), budget=budget, prefix_caching=False)
        assert run(core, [prompt]) == cold(runner, [prompt])
        for number, offset in enumerate(offsets):
            for found, own in zip(captured(runner, ROWS + number), expected[offset], strict=True):
                np.testing.assert_allclose(found, own, atol=1e-5, rtol=1e-5)


# Memory, formats, what is refused


@pytest.mark.cases(4)
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_counted_as_each_rank_holds_them(name: str, tp: int) -> None:
    config = CONFIGS[name]
    placed = PlacedModel.load(describe(config), ModelCheckpoint(savable_model(config), config), tensor_parallel=tp)
    counted = matrix_values(placed.described, placed.cut) + VectorLayout.of(placed.described, placed.cut).total
    assert counted * np.dtype(np.float32).itemsize == placed.rank_bytes


def write(directory: Path, name: str) -> None:
    """A checkpoint of the model."""
    tensors = ModelCheckpoint(savable_model(CONFIGS[name]), CONFIGS[name]).tensors()
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    save_file({key: tensor.contiguous() for key, tensor in tensors}, directory / "model.safetensors")


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_counts_each_devices_states(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    asked = EngineConfig(device="tpu", backend="jax", max_batch_seqs=4, max_batch_tokens=64)
    one, two = (plan(tmp_path, replace(asked, tensor_parallel=ranks), memory=16 << 30) for ranks in (1, 2))
    assert (one.num_states, two.num_states) == (8, 8)
    assert one.state_bytes / 2 <= two.state_bytes < one.state_bytes
    assert one.fits
    assert two.fits


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid"])
def test_the_plan_of_a_cpu_is_what_is_loaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and states of all ranks, where fewer fit than sequences and snapshots could use."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    write(tmp_path, name)
    asked = EngineConfig(backend="jax", device="cpu", max_batch_seqs=4, max_batch_tokens=64, tensor_parallel=2)
    memory = 8 << 30
    kv_memory = 6 * plan(tmp_path, asked, memory=memory, device="cpu").state_bytes
    own = replace(asked, kv_memory=kv_memory)
    planned = plan(tmp_path, own, memory=memory, device="cpu")
    runner = load_jax(open_model(open_checkpoint(tmp_path), own))
    spec = runner.spec
    assert (planned.num_pages, planned.num_states) == (spec.num_pages, spec.num_states)
    assert (planned.state_bytes, planned.num_states) == (spec.state_bytes, 3)
    allocated = sum(array.nbytes for array in jax.tree.leaves(runner._cache))
    assert planned.num_pages * planned.page_bytes + planned.num_states * planned.state_bytes == allocated
    assert 0.9 * kv_memory < allocated <= kv_memory


def test_slots_take_the_memory_that_the_spec_says() -> None:
    runner = shared_runner(*QUICK)
    arrays = jax.tree.leaves(runner._cache.states)
    assert runner.spec.num_states == STATES
    assert sum(own.nbytes for own in arrays) == STATES * runner.spec.state_bytes > 0


def test_states_are_updated_in_place_and_nothing_is_compiled() -> None:
    runner = shared_runner(*QUICK)

    def places() -> list[int]:
        arrays = jax.tree.leaves(runner._cache.states)
        return [own.addressable_shards[0].data.unsafe_buffer_pointer() for own in arrays]

    before = places()
    with compilations() as made:
        run(engine(runner), draw_prompts(9, 40), SamplingParams(max_tokens=5, n=2))
    assert (places(), made) == (before, [])


@pytest.mark.slow
def test_no_program_copies_the_states() -> None:
    runner = jax_runner(CONFIGS["qwen3_5"], model_of("qwen3_5"), states=20_000)
    of_a_layer = max(own.nbytes for own in jax.tree.leaves(runner._cache.states)) // 3
    assert runner.programs.step_bytes() < of_a_layer / 4


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid"])
def test_bfloat16_weights_give_nearly_the_same_log_probabilities(name: str) -> None:
    [prompt] = draw_prompts(20)

    def scores(runner: ModelRunner) -> list[float]:
        core = engine(runner)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1))
        return [entry.logprob for step in drain(core) for entry in step.prompt_logprobs]

    runner = jax_runner(CONFIGS[name], model_of(name), dtype=jnp.bfloat16)
    assert scores(runner) == pytest.approx(scores(shared_runner(name, 1)), abs=0.5)


def test_steps_are_those_of_torch() -> None:
    """The recurrences, beside their plain twins."""
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    for step, twin, read in (
        (delta_step, plain.delta_step, (drawn(2, 3, 5), drawn(2, 3, 5), drawn(2, 3, 7), drawn(2, 3), drawn(2, 3))),
        (ssm_step, plain.ssm_step, (drawn(2, 3, 5), drawn(2, 3, 7), drawn(2, 3, 7), drawn(2, 3))),
    ):
        s = drawn(2, 3, 5, 7)
        new, found = step(jnp.array(s), *map(jnp.array, read))
        changed = torch.tensor(s)
        expected = twin(changed, *map(torch.tensor, read))
        np.testing.assert_allclose(new, changed.numpy(), atol=1e-5)
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_drafts_are_not_taken() -> None:
    assert shared_runner(*QUICK).spec.max_sampled == 0


def test_other_models_with_states_are_refused_by_name() -> None:
    assert {name for name in DIVISIBLE_STATES if refused(DIVISIBLE_STATES[name]) is None} == set(CONFIGS)
    for name, reason in (
        ("nemotron_h", "its layers have a mixer or an MLP, not both"),
        ("falcon_h1", "its layers attend and keep a state at once"),
    ):
        assert reason in (refused(DIVISIBLE_STATES[name]) or "")


def test_a_degree_that_does_not_divide_a_mixer_is_refused_with_those_that_do() -> None:
    with pytest.raises(BadRequest, match=r"4 key heads of .* delta nets do not divide by it. Set it to one of 1, 2, 4"):
        cut(describe(CONFIGS["qwen3_5"]), 8)


def test_adapters_are_refused(tmp_path: Path) -> None:
    model = model_of("qwen3_5")
    adapters = {"a": read_adapter(random_adapter(tmp_path / "a", model))}
    with pytest.raises(Unsupported, match="keep a recurrent state takes no adapters"):
        jax_runner(CONFIGS["qwen3_5"], model, adapters=adapters)
