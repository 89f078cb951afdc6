"""The native runner against torch's, and against itself: the oracles hold to the last bit."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from every_family import config_of, native_configs, some, with_variants_in_full
from family_case import Config
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import native, needs_library, packed, savable_model
from tiny_models import LLAMA, VOCAB

from ostro.backends.native.runner import NativeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.runner import NOT_FINITE, ModelRunner, TokenLogprob
from ostro.engine.scheduler import Limits
from ostro.kernels.cpu.library import Cells, instruction_sets
from ostro.kernels.cpu.packed_file import PackedFile
from ostro.sampling_params import SamplingParams
from ostro.weights import Pooling

pytestmark = needs_library

SIZES: Config = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
WIDE = config_of("llama", SIZES)
ODD: Mapping[str, Config] = {
    # Nothing that divides by a panel, but for what must.
    "odd": {**WIDE, "intermediate_size": 70, "mlp_bias": True, "tie_word_embeddings": True},
    "odd-rotation": {**WIDE, "architectures": ["Phi3ForCausalLM"], "head_dim": 48, "partial_rotary_factor": 0.75},
    "odd-experts": config_of("gpt_oss", SIZES, intermediate_size=22, num_local_experts=7),
    "odd-stored-experts": config_of("qwen3_moe", SIZES, moe_intermediate_size=22, decoder_sparse_step=2),
}
CONFIGS: Mapping[str, Config] = {**native_configs(SIZES), **ODD}
# One with each part that kernels have.
WITH_PARTS = ("llama", "qwen3", "gemma2", "gpt2", "gpt_oss", "olmo2", "olmoe", "qwen2_moe")
# 8 and 4 bits move what random weights give; whether the oracles hold is seen by them as well.
BITS = {"float32": 0, "int8": 8, "int4": 4}
GREEDY = SamplingParams(max_tokens=8, temperature=0)
SCORED = SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=0)
Gains = dict[tuple[int, int], tuple[list[int], list[TokenLogprob], list[TokenLogprob]]]


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
            path = self._directory / f"{name}-{isa}-{bits}"
            self._made[key] = packed(CONFIGS[name], savable_model(CONFIGS[name]), path, isa=isa, bits=bits)
        return self._made[key]


def prompt(id: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(id)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


def ask(id: int, length: int, params: SamplingParams = GREEDY, *, seed: int | None = None) -> Request:
    return Request(
        id=id,
        prompt_ids=prompt(id if seed is None else seed, length),
        params=params,
        seed=id if seed is None else seed,
        prompt_logprobs_from=None if params.prompt_logprobs is None else 1,
    )


def run(runner: ModelRunner, *asked: Request, budget: int = 64, rows: int = 8, caching: bool = False) -> Gains:
    core = EngineCore(runner, Limits(max_batch_tokens=budget, max_batch_seqs=rows), prefix_caching=caching)
    return drain(core, *asked)


def drain(core: EngineCore, *asked: Request) -> Gains:
    for request in asked:
        core.add(request)
    gains: Gains = {(each.id, choice): ([], [], []) for each in asked for choice in range(each.params.n)}
    while core.has_work:
        for gain in core.step():
            assert gain.error is None
            tokens, logprobs, scored = gains[gain.request_id, gain.choice]
            tokens += gain.token_ids
            logprobs += gain.logprobs
            scored += gain.prompt_logprobs
        core.check_integrity()
    assert core.scheduler.kv.usage.in_use == 0
    return gains


def torchs(name: str) -> TorchRunner:
    model = savable_model(CONFIGS[name])
    return TorchRunner(model, page_size=16, num_pages=64, num_states=16 if model.states else 0)


def tokens(gains: Gains) -> dict[tuple[int, int], list[int]]:
    return {key: gain[0] for key, gain in gains.items()}


@pytest.mark.parametrize("name", [*with_variants_in_full(native_configs(SIZES)), *ODD])
def test_tokens_and_scores_are_torchs(name: str, weights: _Weights) -> None:
    asked = [ask(id, length, SCORED) for id, length in enumerate((1, 5, 17, 40))]
    expected = run(torchs(name), *asked)
    given = run(native(weights(name)), *asked)
    assert tokens(given) == tokens(expected)
    for key, (_, logprobs, scored) in expected.items():
        for ours, theirs in ((given[key][1], logprobs), (given[key][2], scored)):
            assert [each.token_id for each in ours] == [each.token_id for each in theirs]
            assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=2e-3)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "olmoe"])
@pytest.mark.parametrize("isa", instruction_sets() if needs_library.args[0] is False else [])
def test_every_instruction_set_gives_torchs_tokens(isa: str, name: str, weights: _Weights) -> None:
    asked = [ask(id, length) for id, length in enumerate((3, 30))]
    expected = run(torchs(name), *asked)
    assert tokens(run(native(weights(name, isa=isa), isa=isa), *asked)) == tokens(expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", some(WITH_PARTS, "llama", "gpt_oss"))
def test_alone_equals_batched(name: str, bits: str, weights: _Weights) -> None:
    runner = native(weights(name, bits=BITS[bits]))
    asked = [ask(id, length, SCORED) for id, length in enumerate((1, 9, 33, 16, 2, 50, 7))]
    together = run(runner, *asked)
    for each in asked:
        assert run(runner, each)[each.id, 0] == together[each.id, 0]


@pytest.mark.full
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", some(("llama", "mistral", "gemma3", "mixtral"), "gemma3", "mixtral"))
def test_whole_equals_chunked(name: str, bits: str, weights: _Weights) -> None:
    runner = native(weights(name, bits=BITS[bits]))
    whole = run(runner, ask(1, 60, SCORED))
    for budget in (1, 2, 3, 7, 16, 33):
        assert run(runner, ask(1, 60, SCORED), budget=budget) == whole


@pytest.mark.parametrize("cells", Cells)
def test_cold_equals_hit(cells: Cells, weights: _Weights) -> None:
    runner = native(weights("llama", bits=8), cells=cells)
    core = EngineCore(runner, Limits(max_batch_tokens=64, max_batch_seqs=8))
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=2)
    cold = drain(core, ask(1, 50, params))
    before = core.scheduler.kv.usage
    warm = drain(core, ask(2, 50, params, seed=1))
    assert warm[2, 0] == cold[1, 0]
    assert before.cached > 0


@pytest.mark.parametrize("cells", [Cells.FLOAT16, Cells.INT8])
def test_fewer_bits_of_keys_and_values_cost_little(cells: Cells, weights: _Weights) -> None:
    asked = ask(1, 60, SCORED)
    exact, given = (run(native(weights("llama"), cells=each), asked)[1, 0] for each in (Cells.FLOAT32, cells))
    off = [abs(a.logprob - b.logprob) for a, b in zip(exact[2], given[2], strict=True)]
    assert 0 < max(off) < (0.05 if cells is Cells.FLOAT16 else 0.5)


SAMPLED = [
    SamplingParams(max_tokens=5, temperature=1.0),
    SamplingParams(max_tokens=5, temperature=0.7, top_k=5),
    SamplingParams(max_tokens=5, temperature=1.3, top_p=0.8),
    SamplingParams(max_tokens=5, temperature=1.0, top_k=20, top_p=0.7),
    SamplingParams(max_tokens=5, temperature=1.0, min_p=0.1),
    SamplingParams(max_tokens=5, temperature=0.9, top_p=0.9, min_p=0.2),
    SamplingParams(max_tokens=5, temperature=1.0, n=3),
    SamplingParams(max_tokens=5, temperature=1.0, frequency_penalty=1.5),
    SamplingParams(max_tokens=5, temperature=0, logit_bias={3: 2.5, 5: -100.0}),
    SamplingParams(max_tokens=5, temperature=1.0, min_tokens=3, stop_token_ids=tuple(range(0, VOCAB, 3))),
    SamplingParams(max_tokens=5, temperature=1e-5),
    SamplingParams(max_tokens=5, temperature=2.0, top_k=1),
]


def test_sampled_tokens_are_torchs(weights: _Weights) -> None:
    asked = [ask(id, 3 + id, params) for id, params in enumerate(SAMPLED)]
    expected = run(TorchRunner(savable_model(CONFIGS["qwen3"]), page_size=16, num_pages=256), *asked, rows=16)
    given = run(native(weights("qwen3"), rows=16, pages=256), *asked, rows=16)
    assert tokens(given) == tokens(expected)


@pytest.mark.full
def test_draws_have_the_distribution_of_the_model(weights: _Weights) -> None:
    """Many seeds on one prompt: shares of tokens within five deviations of what log-probabilities say."""
    runner = native(weights("llama"), rows=64, pages=512)
    count, params = 4096, SamplingParams(max_tokens=1, temperature=1.0)
    scores = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    top = run(runner, ask(1, 12, scores))[1, 0][1][0].top
    found = run(
        runner, *(Request(id=i, prompt_ids=prompt(1, 12), params=params, seed=i) for i in range(count)), rows=64
    )
    drawn = torch.bincount(torch.tensor([gain[0][0] for gain in found.values()]), minlength=VOCAB)
    for token, logprob in top:
        share = 2.718281828459045**logprob
        assert abs(drawn[token].item() - share * count) <= 5 * (share * (1 - share) * count) ** 0.5 + 1


@pytest.mark.full
@settings(max_examples=25)
@given(data=st.data())
def test_random_schedules_give_every_request_what_it_gets_alone(data: st.DataObject, weights: _Weights) -> None:
    """Few pages, so that sequences are preempted; small budgets; shared beginnings; arrivals in between."""
    runner = native(weights("qwen3", bits=8), pages=data.draw(st.integers(14, 30)))
    params = [SamplingParams(max_tokens=9, temperature=t, n=n) for t, n in ((0, 1), (1.0, 1), (0.8, 2))]
    made = [
        ask(id, data.draw(st.integers(1, 60)), data.draw(st.sampled_from(params)), seed=data.draw(st.integers(0, 2)))
        for id in range(data.draw(st.integers(1, 6)))
    ]
    core = EngineCore(runner, Limits(max_batch_tokens=data.draw(st.integers(1, 40)), max_batch_seqs=4))
    together: dict[tuple[int, int], list[int]] = {}
    waiting = list(made)
    while waiting or core.has_work:
        if waiting and (not core.has_work or data.draw(st.booleans())):
            core.add(waiting.pop())
        for gain in core.step():
            assert gain.error is None
            together.setdefault((gain.request_id, gain.choice), []).extend(gain.token_ids)
    for each in made:
        for key, found in tokens(run(runner, each)).items():
            assert together[key] == found


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_vectors_are_torchs(mode: str, weights: _Weights) -> None:
    pooling = Pooling(mode=mode, normalize=False)  # type: ignore[arg-type]
    asked = [
        Request(id=id, prompt_ids=prompt(id, length), params=SamplingParams(max_tokens=1), seed=0, task=Task.EMBED)
        for id, length in enumerate((1, 20, 45))
    ]

    def vectors(runner: ModelRunner) -> list[list[float]]:
        core = EngineCore(runner, Limits(max_batch_tokens=32, max_batch_seqs=8))
        for each in asked:
            core.add(each)
        found = {}
        while core.has_work:
            for gain in core.step():
                if gain.pooled is not None:
                    found[gain.request_id] = gain.pooled
        return [list(found[each.id]) for each in asked]

    torchs = TorchRunner(savable_model(CONFIGS["llama"]), page_size=16, num_pages=64, pooling=pooling)
    for ours, theirs in zip(vectors(native(weights("llama"), pooling=pooling)), vectors(torchs), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_a_sequence_that_overflows_fails_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = savable_model(WIDE)
    model.get_parameter("model.embed_tokens.weight").data[VOCAB - 1] = float("inf")
    model.get_parameter("lm_head.weight").data[VOCAB - 1] = 0.0
    runner = native(packed(WIDE, model, tmp_path / "w"), pages=8)
    good = Request(id=1, prompt_ids=tuple(range(20)), params=GREEDY, seed=0)
    bad = Request(id=2, prompt_ids=(VOCAB - 1,) * 40, params=GREEDY, seed=0)
    alone = tokens(run(runner, good))
    core = EngineCore(runner, Limits(max_batch_tokens=64, max_batch_seqs=8), prefix_caching=False)
    for each in (bad, good):
        core.add(each)
    found: dict[int, list[int]] = {1: [], 2: []}
    errors: dict[int, str | None] = {}
    while core.has_work:
        for gain in core.step():
            found[gain.request_id] += gain.token_ids
            errors[gain.request_id] = gain.error
    assert errors[2] == NOT_FINITE
    assert errors[1] is None
    assert found[1] == alone[1, 0]
    # The same pages again, which hold what is no number beyond a sequence's end.
    assert tokens(run(runner, good)) == alone


@pytest.mark.parametrize("name", ["gemma2", "olmoe"])
def test_threads_change_nothing(name: str, weights: _Weights) -> None:
    asked = [ask(id, length, SCORED) for id, length in enumerate((4, 33))]
    one, three = (run(native(weights(name, bits=4), threads=threads), *asked) for threads in (1, 3))
    assert one == three


def test_it_says_what_it_runs(weights: _Weights) -> None:
    runner: NativeRunner = native(weights("llama", bits=4))
    assert runner.program.spec.precision == "int4, int8"
    assert runner.isa == instruction_sets()[0]
