"""The oracles of models whose layers keep a state, on the native core: equal tokens, and log-probabilities equal to the
last bit, whatever is cut, cached, forked or preempted.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from every_family import RECURRENT, TORCH_ONLY, config_of, some
from guessed_drafts import ReplayedDrafts
from native_models import ModelCheckpoint, native, needs_library, packed, savable_model, stored_in
from test_native_runner import SCORED, SIZES, Gains, ask, drain, run, tokens

from ostro.backends.native.packing import pack
from ostro.backends.native.runner import NativeRunner
from ostro.backends.native.support import native_architecture
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.drafter import MOST_DRAFTS
from ostro.engine.scheduler import Limits
from ostro.kernels.cpu.library import PAGE, instruction_sets, panel_of
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.loading import places_of
from ostro.torch_models.recurrent import GatedDelta, Mamba2
from ostro.weights.arrays import array_of

pytestmark = needs_library

HERE = Path(__file__).parent
NAMES = [name for name in RECURRENT if name not in TORCH_ONLY]
EVERY = pytest.mark.parametrize("name", some(NAMES, "qwen3_5", "lfm2", "granitemoehybrid"))
ISAS = instruction_sets() if needs_library.args[0] is False else []


def model_of(name: str) -> Model:
    """One whose states remember: every token counts for all that follow."""
    model = savable_model(config_of(name, SIZES, max_position_embeddings=512))
    for module in model.modules():
        if isinstance(module, GatedDelta | Mamba2):
            module.decay.weight.data = torch.linspace(-5, -2, len(module.decay.weight))
    return model


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> "_Weights":
    return _Weights(tmp_path_factory.mktemp("packed"))


class _Weights:
    """Each model packed once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[tuple[str, str | None, int], PackedFile] = {}

    def __call__(self, name: str, *, isa: str | None = None, bits: int = 0) -> PackedFile:
        key = (name, isa, bits)
        if key not in self._made:
            config = config_of(name, SIZES, max_position_embeddings=512)
            self._made[key] = packed(config, model_of(name), self.path(*key), isa=isa, bits=bits)
        return self._made[key]

    def path(self, name: str, isa: str | None = None, bits: int = 0) -> Path:
        return self._directory / f"{name}-{isa}-{bits}"


def cold(runner: NativeRunner, *asked: object) -> Gains:
    """Each request alone, from an empty cache."""
    found: Gains = {}
    for each in asked:
        found |= run(runner, each)  # type: ignore[arg-type]
    return found


def caching(weights: PackedFile) -> EngineCore:
    """An engine whose cache no other one writes to."""
    runner = native(weights, pages=256, states=64, budget=256)
    return EngineCore(runner, Limits(max_batch_tokens=256, max_batch_seqs=8))


@pytest.mark.parametrize("isa", ISAS)
@EVERY
def test_tokens_and_scores_are_torchs(name: str, isa: str, weights: _Weights) -> None:
    """On every instruction set, for prompts shorter than a filter's taps and longer than a block of tokens."""
    asked = [ask(id, length, SCORED) for id, length in enumerate((1, 2, 5, 63, 64, 65, 150))]
    torchs = TorchRunner(model_of(name), page_size=16, num_pages=64, num_states=16)
    expected = run(torchs, *asked, budget=256)
    given = run(native(weights(name, isa=isa), isa=isa, budget=256), *asked, budget=256)
    assert tokens(given) == tokens(expected)
    for key, (_, logprobs, scored) in expected.items():
        for ours, theirs in ((given[key][1], logprobs), (given[key][2], scored)):
            assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=2e-3)


@pytest.mark.parametrize("exact", ["in_proj_a", "in_proj_b"])
def test_gates_may_be_stored_in_different_types(exact: str, tmp_path: Path) -> None:
    """The second was read as if it had the first one's type."""
    config = config_of("qwen3_5", SIZES)
    model = savable_model(config)
    tensors = ModelCheckpoint(model, config).tensors()
    mixed = [(name, tensor if exact in name else tensor.bfloat16()) for name, tensor in tensors]
    places = places_of(model)
    for name, tensor in mixed:
        place = places[name]
        stored_in(place).copy_(tensor.float() + place.offset)
    described = native_architecture(describe(config), panel_of(ISAS[0]))
    with (tmp_path / "packed").open("w+b") as file:
        writer = PackedWriter(file, panel_of(ISAS[0]))
        arrays = ((name, array_of(tensor)) for name, tensor in mixed)
        writer.finish(pack(described, arrays, writer, bits=0).to_json())
        weights = PackedFile(file, tmp_path / "packed")
    asked = [ask(id, length, SCORED) for id, length in enumerate((5, 40))]
    expected = run(TorchRunner(model, page_size=16, num_pages=64, num_states=16), *asked)
    assert tokens(run(native(weights), *asked)) == tokens(expected)


@EVERY
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_alone_equals_batched(name: str, bits: int, weights: _Weights) -> None:
    runner = native(weights(name, bits=bits), budget=128)
    asked = [ask(id, length, SCORED) for id, length in enumerate((1, 9, 33, 16, 2, 80, 7))]
    assert run(runner, *asked, budget=128) == cold(runner, *asked)


@EVERY
def test_whole_equals_chunked(name: str, weights: _Weights) -> None:
    runner = native(weights(name, bits=8), budget=128)
    whole = run(runner, ask(1, 100, SCORED), budget=128)
    for budget in (1, 2, 3, 7, 16, 33, 64, 65):
        assert run(runner, ask(1, 100, SCORED), budget=budget) == whole


@EVERY
def test_threads_change_nothing(name: str, weights: _Weights) -> None:
    asked = [ask(id, length, SCORED) for id, length in enumerate((40, 3))]
    alone = run(native(weights(name), threads=1), *asked)
    for threads in (2, 3, 7):
        assert run(native(weights(name), threads=threads), *asked) == alone


@EVERY
def test_a_hit_at_each_snapshot_equals_cold(name: str, weights: _Weights) -> None:
    """Prompts that part from a long one after each of its pages, and then that one again."""
    core, alone = caching(weights(name, bits=8)), native(weights(name, bits=8), budget=256)
    whole = ask(1, 6 * PAGE + 5, SamplingParams(max_tokens=20, temperature=0, logprobs=1))
    drain(core, whole)
    for turn in range(2):
        for page in range(1, 7):
            length = page * PAGE
            other = ask(10 * turn + page + 10, 30, whole.params)
            parted = replace(other, prompt_ids=(*whole.prompt_ids[:length], *other.prompt_ids))
            assert drain(core, parted) == run(alone, parted, budget=256)
    assert core.scheduler.counters.cache_hits >= 6 * PAGE
    assert drain(core, ask(1, len(whole.prompt_ids), whole.params)) == run(alone, whole, budget=256)


@EVERY
def test_an_answer_fed_back_as_a_prompt_equals_the_same_text_computed_cold(name: str, weights: _Weights) -> None:
    core, alone = caching(weights(name)), native(weights(name), budget=256)
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=1)
    request = ask(0, 40, params)
    for turn in range(1, 5):
        gains = drain(core, request)
        assert gains == run(alone, request, budget=256)
        [(answer, *_)] = gains.values()
        question = ask(turn, 7, params)
        request = replace(question, prompt_ids=(*request.prompt_ids, *answer, *question.prompt_ids))
    assert core.scheduler.counters.cache_hits > 0


@EVERY
@pytest.mark.parametrize("pages", [7, 9, 11])
def test_unpreempted_equals_preempted(name: str, pages: int, weights: _Weights) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, logprobs=2, prompt_logprobs=0)
    asked = [ask(id, length, params) for id, length in enumerate((10, 14, 9, 31))]
    core = EngineCore(native(weights(name), pages=pages), Limits(max_batch_tokens=64, max_batch_seqs=8))
    assert drain(core, *asked) == cold(native(weights(name)), *asked)
    assert core.scheduler.counters.preemptions > 0


@EVERY
@pytest.mark.parametrize("states", [1, 2, 5])
def test_few_slots_change_nothing(name: str, states: int, weights: _Weights) -> None:
    asked = [ask(id, length, SCORED) for id, length in enumerate((30, 44, 9, 32, 50))]
    core = EngineCore(native(weights(name), states=states), Limits(max_batch_tokens=64, max_batch_seqs=8))
    expected = cold(native(weights(name)), *asked)
    assert drain(core, *asked) == expected
    assert drain(core, *asked) == expected


@EVERY
def test_forked_choices_equal_those_computed_alone(name: str, weights: _Weights) -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=1.0, logprobs=1)
    forked = run(native(weights(name)), ask(1, 37, params))
    assert len({*map(tuple, tokens(forked).values())}) == 3
    assert forked == run(native(weights(name)), ask(1, 37, params), budget=5)


@EVERY
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(name: str, temperature: float, threads: int, weights: _Weights) -> None:
    """However many of them are right; also of sequences that are preempted or end meanwhile."""
    params = SamplingParams(max_tokens=40, temperature=temperature, logprobs=1)
    asked = [ask(id, length, params) for id, length in enumerate((1, 14, 33, 20))]
    without = cold(native(weights(name)), *asked)
    limits = Limits(max_batch_tokens=64, max_batch_seqs=8)
    for pages, accuracy in ((64, 0.0), (64, 0.6), (64, 1.0), (9, 0.8)):
        drafts = ReplayedDrafts(tokens(without), accuracy=accuracy, most=MOST_DRAFTS)
        core = EngineCore(native(weights(name), pages=pages, threads=threads), limits, speculation=drafts)
        for _ in range(2):
            assert drain(core, *asked) == without
        counters = core.scheduler.counters
        assert counters.drafted_tokens > 0
        assert (counters.accepted_tokens > 0) == (accuracy > 0)
        assert (counters.preemptions > 0) == (pages < 64)


@EVERY
def test_slots_take_the_memory_that_the_spec_says(name: str, weights: _Weights) -> None:
    runner = native(weights(name), pages=8, states=3)
    spec = runner.spec
    assert 8 * runner.page_bytes + 3 * spec.state_bytes == spec.pages_bytes
    assert spec.state_bytes == 4 * runner.program.spec.state_floats > 0


def test_slots_that_are_not_used_take_no_memory(weights: _Weights) -> None:
    """There are as many as sequences and snapshots may need, and a small machine has no room for all of them."""
    runner = native(weights("qwen3_5"), states=1)
    path = os.pathsep.join((str(HERE), str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": path}
    program = f"""
import resource
from pathlib import Path
from native_models import native
from test_native_runner import GREEDY, ask, run
from ostro.kernels.cpu.packed_file import PackedFile

path = Path({str(weights.path("qwen3_5"))!r})
weights = PackedFile(path.open("rb"), path)
run(native(weights, states=1), ask(1, 20, GREEDY))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(native(weights, states={(1 << 30) // runner.spec.state_bytes}), ask(1, 20, GREEDY))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 10
