"""Steps with prompts that are padded as graphs are: the same tokens as without, whatever the schedule.

In the interpreter the padded step runs directly; on a GPU it is captured.
"""

import pytest
import torch
from every_family import TINY
from native_models import savable_model
from test_gpu_ranks import two_ranks
from test_gpu_runner import CONFIGS, SAMPLED, SHALLOW, Gains, on_cpu, requests, run, tokens
from test_other_models import FAMILIES
from tiny_models import random_model
from triton_device import slow_in_the_interpreter

from ostro.backends.cuda.mixed_graphs import MixedGraphs, max_graph_tokens
from ostro.backends.cuda.projections import PackedLinear
from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.cuda.step_plan import Padding
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.kernels.gpu.packed_words import Packed
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.layers import GatedMLP

GREEDY = SamplingParams(max_tokens=3, temperature=0)
META = torch.device("meta")


def padded_engine(
    model: Model, device: torch.device, *, budget: int = 12, rows: int = 8, deterministic: bool = False
) -> EngineCore:
    runner = GpuRunner(
        model.to(device),
        page_size=16,
        num_pages=256,
        max_batch_tokens=budget,
        max_batch_seqs=rows,
        graph_max_tokens=64,
        deterministic=deterministic,
    )
    return EngineCore(runner)


def mixed(core: EngineCore) -> MixedGraphs:
    assert isinstance(core.runner, GpuRunner)
    return core.runner.part.mixed


def used(core: EngineCore) -> set[Padding]:
    return {padding for _, padding in mixed(core).graphs.made}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        pytest.param("llama", marks=pytest.mark.full),
        *(pytest.param(name, marks=slow_in_the_interpreter) for name in sorted(CONFIGS.keys() - {"gemma2", "llama"})),
    ],
)
def test_greedy_tokens_equal_the_cpus(name: str, device: torch.device) -> None:
    """Prompts that are cut at every length, beside sequences that decode; with and without a window and soft caps."""
    asked = requests([GREEDY] * 3, longest=30)[1:]
    core = padded_engine(random_model(CONFIGS[name]), device)
    expected = tokens(on_cpu(random_model(CONFIGS[name]), asked))
    for _ in range(2):
        # What was met the first time is a graph the second time.
        core.scheduler.kv.clear_cache()
        assert tokens(run(core, asked)) == expected
    assert any(padding.singles for padding in used(core))
    assert any(not padding.singles for padding in used(core))


@pytest.mark.full
def test_sampled_tokens_equal_the_cpus(device: torch.device) -> None:
    asked = requests(SAMPLED)
    core = padded_engine(random_model(SHALLOW), device, budget=24)
    assert tokens(run(core, asked)) == tokens(on_cpu(random_model(SHALLOW), asked))
    assert used(core)


@pytest.mark.full
def test_prompts_are_scored_as_on_the_cpu(device: torch.device) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    asked = [
        Request(id=r.id, prompt_ids=r.prompt_ids, params=params, seed=0, prompt_logprobs_from=1)
        for r in requests([params] * 3, longest=30)
    ]
    expected = on_cpu(random_model(SHALLOW), asked)
    core = padded_engine(random_model(SHALLOW), device)
    for key, (_, _, scored, _) in run(core, asked).items():
        assert [each.token_id for each in scored] == [each.token_id for each in expected[key][2]]
        assert [each.logprob for each in scored] == pytest.approx([e.logprob for e in expected[key][2]], abs=1e-3)
    assert used(core)


@pytest.mark.full
def test_deterministic_outputs_have_the_same_bits_with_padding_and_without(device: torch.device) -> None:
    asked = requests([SamplingParams(max_tokens=3, temperature=1.0, logprobs=0)] * 3, longest=30)
    found: list[Gains] = []
    for most in (64, 0):
        core = padded_engine(random_model(SHALLOW), device, deterministic=True)
        mixed(core).most = most
        found.append(run(core, asked))
        assert bool(used(core)) == bool(most)
    assert found[0] == found[1]


@slow_in_the_interpreter
def test_tokens_of_two_ranks_are_those_of_one(device: torch.device) -> None:
    asked, whole = requests([GREEDY] * 4, longest=30), savable_model(CONFIGS["llama"])
    with two_ranks(CONFIGS["llama"], whole, device, budget=12) as (core, _):
        mixed(core).most = 64
        assert tokens(run(core, asked)) == tokens(on_cpu(whole.to("cpu"), asked))
        assert used(core)


@slow_in_the_interpreter
# NumPy warns where a sigmoid's exponential is infinite, as it may be on a GPU.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", ["hrm_text", "gpt2"])
def test_other_models_give_the_same_tokens(name: str, device: torch.device) -> None:
    """HRM-Text runs its own `forward`, with torch's operations; GPT-2 has learned positions."""
    asked = requests([GREEDY] * 4, longest=30)
    core = padded_engine(random_model(FAMILIES[name]), device)
    assert tokens(run(core, asked)) == tokens(on_cpu(random_model(FAMILIES[name]), asked))
    assert used(core)


def test_a_graph_is_made_for_the_second_step_of_its_size_and_none_for_a_long_step(device: torch.device) -> None:
    graphs = mixed(padded_engine(random_model(SHALLOW), device))
    assert graphs.padding_for(40, 2, 4) is None
    padding = graphs.padding_for(38, 3, 5)
    assert padding is not None
    assert padding.tokens == 64
    assert padding.singles == 8
    assert padding.tiles >= 5
    assert [graphs.padding_for(65, 0, 9) for _ in range(2)] == [None, None]


@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
@pytest.mark.parametrize("singles", [0, 1, 8])
@pytest.mark.parametrize("tiles", [0, 1, 9, 60])
def test_padding_covers_the_step(tokens: int, singles: int, tiles: int, device: torch.device) -> None:
    graphs = mixed(padded_engine(random_model(SHALLOW), device))
    graphs.padding_for(tokens, min(singles, tokens), tiles)
    padding = graphs.padding_for(tokens, min(singles, tokens), tiles)
    assert padding is not None
    assert tokens <= padding.tokens
    assert min(singles, tokens) <= padding.singles <= padding.tokens
    assert tiles <= padding.tiles


def test_small_models_have_larger_graphs() -> None:
    """A large model's steps hide the time that their launches take."""
    small, large = (random_shape(hidden) for hidden in (1024, 4096))
    assert max_graph_tokens(small) == 2048
    assert 512 <= max_graph_tokens(large) <= 1024


def test_only_active_experts_of_a_mixture_count() -> None:
    wide = {"hidden_size": 4096, "moe_intermediate_size": 4096, "num_experts": 64}
    one, two, all_of_them = (
        build_model({**TINY["qwen3_moe"], **wide, "num_experts_per_tok": chosen}, dtype=torch.bfloat16, device=META)
        for chosen in (1, 2, 64)
    )
    assert max_graph_tokens(one) > max_graph_tokens(two) > max_graph_tokens(all_of_them)


def test_packed_weights_count_like_others() -> None:
    model = random_shape(4096)
    plain = max_graph_tokens(model)
    for each in [module for module in model.modules() if isinstance(module, GatedMLP)]:
        outs, ins = each.gate_up_proj.shape
        words, pairs = (torch.empty(outs, number, dtype=torch.int32, device=META) for number in (ins // 8, ins // 128))
        setattr(each, "gate_up_proj", PackedLinear(each.gate_up_proj, Packed(words, pairs, 4, 128, False)))  # noqa: B010
    assert max_graph_tokens(model) == plain


def random_shape(hidden: int) -> Model:
    """Like Qwen3's 0.6B or Llama's 8B, but for the number of layers; without memory."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2 if hidden > 2048 else hidden * 3,
        "num_attention_heads": max(16, hidden // 128),
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    return build_model({**CONFIGS["llama"], **sizes}, dtype=torch.bfloat16, device=META)
