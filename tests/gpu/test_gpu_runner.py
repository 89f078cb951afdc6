"""The GPU's runner against the CPU's, in fp32: the same tokens, whatever the schedule and however they are sampled."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import mean

import pytest
import torch
from scripted_grammar import ScriptedGrammars, scripted
from tiny_models import GEMMA2, LLAMA, MISTRAL, VOCAB, random_model
from triton_device import DEVICE, slow_in_the_interpreter

from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.cuda.shared_prefixes import PrefixLimits
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.runner import TokenLogprob
from ostro.engine.scheduler import Limits
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.weights import Pooling

QWEN3: Mapping[str, object] = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
CONFIGS = {
    "llama": {**LLAMA, "head_dim": 16},
    "qwen3": QWEN3,
    "mistral": {**MISTRAL, "head_dim": 16},
    "gemma2": {**GEMMA2, "head_dim": 16},
}
# The interpreter takes milliseconds for what a GPU does in none: there the same tests are shorter.
ON_GPU = DEVICE.type == "cuda"
# What happens after the layers needs no more than one of them.
SHALLOW: Mapping[str, object] = {**QWEN3, "num_hidden_layers": 2 if ON_GPU else 1}
GREEDY = SamplingParams(max_tokens=8 if ON_GPU else 3, temperature=0)
Gains = dict[tuple[int, int], tuple[list[int], list[TokenLogprob], list[TokenLogprob], str | None]]


def requests(
    params: Iterable[SamplingParams], *, shared: int = 0, longest: int = 30 if ON_GPU else 12
) -> list[Request]:
    torch.manual_seed(2)
    head = torch.randint(0, VOCAB, (shared,)).tolist()
    made = []
    for id, each in enumerate(params):
        prompt = head + torch.randint(0, VOCAB, (1 + (id * 7) % longest,)).tolist()
        made.append(Request(id=id, prompt_ids=tuple(prompt), params=each, seed=id))
    return made


def on_cpu(model: Model, asked: list[Request]) -> Gains:
    return run(EngineCore(TorchRunner(model, page_size=4, num_pages=512), Limits(max_batch_tokens=256)), asked)


def on_gpu(
    model: Model, device: torch.device, asked: list[Request], *, pages: int = 256, budget: int = 64, rows: int = 8
) -> tuple[Gains, EngineCore]:
    core = gpu_engine(model, device, pages=pages, budget=budget, rows=rows)
    return run(core, asked), core


def gpu_engine(
    model: Model,
    device: torch.device,
    *,
    pages: int = 256,
    budget: int = 64,
    rows: int = 8,
    limits: PrefixLimits | None = None,
) -> EngineCore:
    runner = GpuRunner(
        model.to(device),
        page_size=16,
        num_pages=pages,
        max_batch_tokens=budget,
        max_batch_seqs=rows,
        prefix_limits=limits,
    )
    return EngineCore(runner)


def run(core: EngineCore, asked: list[Request]) -> Gains:
    for request in asked:
        constraint = request.constraint
        core.add(request, None if constraint is None else ScriptedGrammars(VOCAB).prepare(constraint))
    gains: Gains = {(r.id, choice): ([], [], [], None) for r in asked for choice in range(r.params.n)}
    while core.has_work:
        for gain in core.step():
            tokens, logprobs, scored, _ = gains[gain.request_id, gain.choice]
            gains[gain.request_id, gain.choice] = (
                tokens + gain.token_ids,
                logprobs + gain.logprobs,
                scored + gain.prompt_logprobs,
                gain.error,
            )
        core.check_integrity()
    assert core.scheduler.kv.usage.in_use == 0
    return gains


def tokens(gains: Gains) -> dict[tuple[int, int], list[int]]:
    return {key: gain[0] for key, gain in gains.items()}


# In the interpreter each takes seconds: there, in `make test`, one with and one without a window and soft caps.
@pytest.mark.parametrize(
    "name",
    [name if name in ("llama", "gemma2") else pytest.param(name, marks=slow_in_the_interpreter) for name in CONFIGS],
)
def test_greedy_tokens_equal_the_cpus(name: str, device: torch.device) -> None:
    asked = requests([GREEDY] * (6 if ON_GPU else 3))
    expected = on_cpu(random_model(CONFIGS[name]), asked)
    given, _ = on_gpu(random_model(CONFIGS[name]), device, asked, budget=12)
    assert tokens(given) == tokens(expected)


LENGTH = 6 if ON_GPU else 2
SAMPLED = [
    SamplingParams(max_tokens=LENGTH, temperature=1.0),
    SamplingParams(max_tokens=LENGTH, temperature=0.7, top_k=5),
    SamplingParams(max_tokens=LENGTH, temperature=1.3, top_p=0.8),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, min_p=0.1),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, top_n_sigma=0.8, frequency_penalty=1.5),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, n=3),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, n=2, frequency_penalty=1.5),
    SamplingParams(max_tokens=LENGTH + 2, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(max_tokens=LENGTH, temperature=0, logit_bias={3: 2.5, 5: -100.0}),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, min_tokens=1, stop_token_ids=tuple(range(0, VOCAB, 3))),
    SamplingParams(max_tokens=LENGTH, temperature=1.0, logprobs=3),
    SamplingParams(max_tokens=LENGTH, temperature=0, logprobs=0, logit_bias={3: 2.5}),
]


@pytest.mark.parametrize("rows", [3, 16] if ON_GPU else [8])
def test_sampled_tokens_equal_the_cpus(device: torch.device, rows: int) -> None:
    asked = requests(SAMPLED)
    expected = on_cpu(random_model(SHALLOW), asked)
    given, _ = on_gpu(random_model(SHALLOW), device, asked, rows=rows)
    assert tokens(given) == tokens(expected)
    for key, (_, logprobs, _, _) in expected.items():
        assert [each.token_id for each in given[key][1]] == [each.token_id for each in logprobs]
        assert [each.rank for each in given[key][1]] == [each.rank for each in logprobs]
        assert [each.logprob for each in given[key][1]] == pytest.approx([each.logprob for each in logprobs], abs=1e-3)


# Pairs of tokens, with three that are forced after each.
STRUCTURE = {0: dict.fromkeys(range(10, 30), 1), 1: {30: 2, 31: 2}, 2: {40: 3}, 3: {41: 4}, 4: {42: 0}}
# Free until a token of the first half of the vocabulary.
THINKING = {0: dict.fromkeys(range(VOCAB // 2), 1), 1: dict.fromkeys(range(40, 50), 1)}


@pytest.mark.full
def test_constrained_rows_draw_as_on_the_cpu_beside_free_ones(device: torch.device) -> None:
    params = [
        SamplingParams(max_tokens=LENGTH + 1, temperature=1.0),
        SamplingParams(max_tokens=LENGTH + 1, temperature=0),
        SamplingParams(max_tokens=LENGTH + 1, temperature=1.0, n=2, top_p=0.9, logprobs=2),
        SamplingParams(max_tokens=LENGTH + 1, temperature=1.0, top_n_sigma=0.7, logit_bias={12: 3.0}),
        SamplingParams(max_tokens=LENGTH + 4, temperature=1.0, frequency_penalty=1.5, logprobs=1),
        SamplingParams(max_tokens=LENGTH + 4, temperature=0.8, top_k=7),
        SamplingParams(max_tokens=LENGTH + 1, temperature=1.0),
    ]
    structures = [None, *[scripted(STRUCTURE)] * 3, *[scripted(STRUCTURE, jump_forward=True)] * 2]
    asked = [
        replace(request, constraint=structure)
        for request, structure in zip(requests(params), [*structures, scripted(THINKING, free=(0,))], strict=True)
    ]
    expected = on_cpu(random_model(SHALLOW), asked)
    given, core = on_gpu(random_model(SHALLOW), device, asked)
    assert tokens(given) == tokens(expected)
    assert core.scheduler.counters.forced_tokens > 0
    for key, (_, logprobs, _, error) in expected.items():
        assert error is None
        assert [(each.token_id, each.rank) for each in given[key][1]] == [(e.token_id, e.rank) for e in logprobs]
        assert [each.logprob for each in given[key][1]] == pytest.approx([each.logprob for each in logprobs], abs=1e-3)


@slow_in_the_interpreter
def test_graphs_with_and_without_masks_take_turns(device: torch.device) -> None:
    core = gpu_engine(random_model(SHALLOW), device, rows=2)
    for structures in ([None, None], [scripted(STRUCTURE), None], [None, None], [scripted(STRUCTURE)] * 2):
        params = [SamplingParams(max_tokens=5, temperature=1.0, logprobs=0 if each else None) for each in structures]
        asked = [replace(request, constraint=each) for request, each in zip(requests(params), structures, strict=True)]
        assert tokens(run(core, asked)) == tokens(on_cpu(random_model(SHALLOW), asked))


@pytest.mark.full
def test_words_that_are_banned_by_what_stands_before_them(device: torch.device) -> None:
    [plain] = requests([GREEDY])
    free = tokens(on_cpu(random_model(SHALLOW), [plain]))[0, 0]
    asked = [Request(id=0, prompt_ids=plain.prompt_ids, params=GREEDY, seed=0, bad_word_ids=((free[0], free[1]),))]
    expected = on_cpu(random_model(SHALLOW), asked)
    given, _ = on_gpu(random_model(SHALLOW), device, asked)
    assert tokens(given) == tokens(expected) != {(0, 0): free}


@slow_in_the_interpreter
def test_steps_of_one_size_alternate_between_graph_and_separate_sampling(device: torch.device) -> None:
    """Graphs share memory: what one has left must be read as its own, whichever was captured last."""
    apart = SamplingParams(max_tokens=6, temperature=0, logit_bias={3: 2.5}, logprobs=1)
    within = [SamplingParams(max_tokens=6, temperature=1.0), SamplingParams(max_tokens=6, temperature=1.0, top_k=5)]
    core = gpu_engine(random_model(SHALLOW), device, rows=1)
    for params in (apart, *within, apart, *within, apart):
        asked = requests([params])
        expected, given = on_cpu(random_model(SHALLOW), asked), run(core, asked)
        assert tokens(given) == tokens(expected)
        for ours, theirs in zip(given[0, 0][1], expected[0, 0][1], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@slow_in_the_interpreter
def test_preempted_and_shared_sequences_give_the_same_tokens(device: torch.device) -> None:
    asked = requests([SamplingParams(max_tokens=16, temperature=1.0)] * 3, shared=17)
    expected = on_cpu(random_model(QWEN3), asked)
    given, core = on_gpu(random_model(QWEN3), device, asked, pages=4, budget=48, rows=3)
    assert tokens(given) == tokens(expected)
    assert core.scheduler.counters.preemptions > 0
    assert core.scheduler.counters.cache_hits > 0


def num_prefix_items(runner: GpuRunner) -> int:
    """Prefix work items of the latest step that shared prefixes."""
    prefix = runner.part.attention.scratch.prefix
    return 0 if prefix is None else int(prefix.count)


ANY_PREFIX = PrefixLimits(rows=2, tokens=64, saved=1)
SHARING = [*[SamplingParams(max_tokens=LENGTH + 1, temperature=1.0)] * 2, SamplingParams(max_tokens=LENGTH, n=2)]


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=slow_in_the_interpreter)])
def test_rows_that_read_a_prefix_together_give_the_same_tokens(name: str, device: torch.device) -> None:
    """With other rows beside them, in steps with prompts and in steps without, and among choices of one request."""
    # Every other layer of Gemma-2 has a window.
    config = {**CONFIGS[name], "num_hidden_layers": 2 if name == "gemma2" else 1}
    asked = requests(SHARING, shared=80) + [replace(each, id=each.id + 10) for each in requests(SHARING[:1])]
    expected = on_cpu(random_model(config), asked)
    core = gpu_engine(random_model(config), device, budget=100, limits=ANY_PREFIX)
    assert tokens(run(core, asked)) == tokens(expected)
    assert isinstance(core.runner, GpuRunner)
    assert num_prefix_items(core.runner) > 0


def test_prompts_are_scored_as_on_the_cpu(device: torch.device) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    asked = [
        Request(id=r.id, prompt_ids=r.prompt_ids, params=params, seed=0, prompt_logprobs_from=1)
        for r in requests([params] * (4 if ON_GPU else 2))
    ]
    expected = on_cpu(random_model(SHALLOW), asked)
    given, _ = on_gpu(random_model(SHALLOW), device, asked, budget=16)
    for key, (_, _, scored, _) in expected.items():
        assert [(s.token_id, s.rank, [t for t, _ in s.top]) for s in given[key][2]] == [
            (s.token_id, s.rank, [t for t, _ in s.top]) for s in scored
        ]
        assert [each.logprob for each in given[key][2]] == pytest.approx([each.logprob for each in scored], abs=1e-3)


@pytest.mark.full
def test_embeddings_equal_the_cpus(device: torch.device) -> None:
    pooling = Pooling("mean", normalize=False)
    request = Request(id=0, prompt_ids=tuple(range(30)), params=SamplingParams(max_tokens=0), seed=0, task=Task.EMBED)
    vectors = []
    for make in (TorchRunner, GpuRunner):
        model = random_model(SHALLOW)
        runner = make(
            model.to(device) if make is GpuRunner else model,
            page_size=16,
            num_pages=64,
            max_batch_tokens=12,
            max_batch_seqs=4,
            pooling=pooling,
        )
        core = EngineCore(runner)
        core.add(request)
        while core.has_work:
            for gain in core.step():
                vectors.append(gain.pooled)
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-3)


def test_row_whose_logits_are_not_finite_fails_alone(device: torch.device) -> None:
    model = random_model(SHALLOW)
    model.get_parameter("model.embed_tokens.weight").data[7] = float("nan")
    asked = [
        Request(id=0, prompt_ids=(1, 2, 7), params=GREEDY, seed=0),
        Request(id=1, prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=1, temperature=0), seed=0),
    ]
    given, _ = on_gpu(model, device, asked)
    assert given[0, 0][3] is not None
    assert given[1, 0][3] is None


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no 8-bit floats")
def test_keys_and_values_in_8_bits_score_a_prompt_nearly_as_well(device: torch.device) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompt = tuple(torch.randint(0, VOCAB, (200,)).tolist())
    request = Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1)
    scores = []
    for kv_dtype in (None, torch.float8_e4m3fn):
        runner = GpuRunner(
            random_model(QWEN3).to(device),
            page_size=16,
            num_pages=64,
            max_batch_tokens=32,
            max_batch_seqs=4,
            kv_dtype=kv_dtype,
        )
        [gain] = run(EngineCore(runner), [request]).values()
        scores.append(torch.tensor([each.logprob for each in gain[2]]))
    difference = (scores[0] - scores[1]).abs()
    assert 0 < difference.mean() < 0.3


@pytest.mark.skipif(not ON_GPU, reason="the interpreter multiplies bfloat16 as if it were integers")
# torch's notice of a CPU without bfloat16 instructions.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", CONFIGS)
def test_16_bit_logits_stray_from_32_bits_no_further_than_the_cpus_do(name: str, device: torch.device) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompt = tuple(torch.randint(0, VOCAB, (100,)).tolist())
    request = Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1)
    [expected] = on_cpu(random_model(CONFIGS[name]), [request]).values()
    rounded = random_model(CONFIGS[name])
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    [twins] = on_cpu(rounded, [request]).values()
    [given] = on_gpu(rounded, device, [request])[0].values()
    # These weights are wide apart, so that rounding to 8 bits of mantissa shows more than in a trained model.
    ours, theirs = (
        mean(abs(a.logprob - b.logprob) for a, b in zip(each[2], expected[2], strict=True)) for each in (given, twins)
    )
    assert ours < 1.5 * theirs
