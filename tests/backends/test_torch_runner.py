"""The standing oracles on a real model: exact token equality, in fp32, on the CPU."""

from collections.abc import Iterable, Mapping

import pytest
import torch
from dense_context import dense_logits
from tiny_models import GEMMA2, LLAMA, MISTRAL, VOCAB, random_model

from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.scheduler import Limits, Progress
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.weights import Pooling

GREEDY = SamplingParams(max_tokens=12, temperature=0)
LLAMA4: Mapping[str, object] = {
    **LLAMA,
    "architectures": ["Llama4ForCausalLM"],
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 12,
    "floor_scale": 8,
    "no_rope_layers": [1, 0],
}
GEMMA4: Mapping[str, object] = {
    **LLAMA,
    "architectures": ["Gemma4ForCausalLM"],
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
}
CONFIGS = {"gemma4": GEMMA4, "llama": LLAMA, "llama4": LLAMA4, "mistral": MISTRAL, "gemma2": GEMMA2}
FAMILIES = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
LIKE_LLAMA = pytest.mark.parametrize("config", [LLAMA, MISTRAL, GEMMA2], ids=["llama", "mistral", "gemma2"])


def draw_prompts(*lengths: int) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(0, VOCAB, (length,)).tolist() for length in lengths]


def engine(model: Model, *, pages: int = 256, budget: int = 256, prefix_caching: bool = True) -> EngineCore:
    runner = TorchRunner(model, page_size=4, num_pages=pages)
    return EngineCore(runner, Limits(max_batch_tokens=budget), prefix_caching=prefix_caching)


def run(
    core: EngineCore, prompts: Iterable[list[int]], params: SamplingParams = GREEDY, first_id: int = 0
) -> dict[tuple[int, int], list[int]]:
    """Tokens by (request, choice)."""
    for id, prompt in enumerate(prompts, first_id):
        core.add(Request(id=id, prompt_ids=tuple(prompt), params=params, seed=params.seed or 0))
    tokens: dict[tuple[int, int], list[int]] = {}
    for step in drain(core):
        tokens.setdefault((step.request_id, step.choice), []).extend(step.token_ids)
    return tokens


def drain(core: EngineCore) -> Iterable[Progress]:
    while core.has_work:
        yield from core.step()
    core.check_integrity()
    usage = core.scheduler.kv.usage
    assert usage.in_use == 0
    assert usage.free + usage.cached == usage.total


def dense_greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(dense_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.cases(2)
@FAMILIES
def test_paged_generation_equals_a_dense_cacheless_loop(config: Mapping[str, object]) -> None:
    model = random_model(config, max_seq_len=512)
    prompts = draw_prompts(1, 4, 5, 17, 30)
    tokens = run(engine(model), prompts)
    for id, prompt in enumerate(prompts):
        assert tokens[id, 0] == dense_greedy(model, prompt, 12)


@LIKE_LLAMA
def test_alone_equals_batched(config: Mapping[str, object]) -> None:
    model = random_model(config, max_seq_len=512)
    prompts = draw_prompts(3, 8, 21, 40, 5, 13)
    together = run(engine(model), prompts)
    for id, prompt in enumerate(prompts):
        assert run(engine(model), [prompt], first_id=id) == {(id, 0): together[id, 0]}


@LIKE_LLAMA
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_whole_equals_chunked(config: Mapping[str, object], budget: int) -> None:
    model = random_model(config, max_seq_len=512)
    prompts = draw_prompts(3, 21, 40)
    assert run(engine(model, budget=budget), prompts) == run(engine(model), prompts)


@pytest.mark.full
@pytest.mark.parametrize(("config", "budget"), [(GEMMA4, 5), (LLAMA4, 8)], ids=["gemma4", "llama4"])
def test_whole_equals_chunked_in_models_that_torch_alone_runs(config: Mapping[str, object], budget: int) -> None:
    model = random_model(config, max_seq_len=512)
    prompts = draw_prompts(3, 21, 40)
    assert run(engine(model, budget=budget), prompts) == run(engine(model), prompts)


@pytest.mark.cases(3)
@FAMILIES
def test_cold_equals_prefix_hit(config: Mapping[str, object]) -> None:
    model = random_model(config, max_seq_len=512)
    [shared, *tails] = draw_prompts(30, 3, 9)
    prompts = [shared + tail for tail in tails] + [shared]
    core = engine(model)
    run(core, [shared], first_id=100)
    warm = run(core, prompts)
    assert core.scheduler.counters.cache_hits >= 3 * 28
    assert warm == run(engine(model, prefix_caching=False), prompts)


@pytest.mark.cases(3)
@FAMILIES
def test_unpreempted_equals_preempted(config: Mapping[str, object]) -> None:
    model = random_model(config, max_seq_len=512)
    prompts = draw_prompts(10, 14, 9, 12)
    core = engine(model, pages=14)
    assert run(core, prompts) == run(engine(model), prompts)
    assert core.scheduler.counters.preemptions > 0


@FAMILIES
def test_pages_take_the_memory_that_the_spec_says(config: Mapping[str, object]) -> None:
    runner = TorchRunner(random_model(config, max_seq_len=512), page_size=4, num_pages=8)
    assert sum(stack.nbytes for stack in runner.cache.stacks) == runner.spec.pages_bytes


@pytest.mark.parametrize("length", [8, 11])
def test_forked_choices_equal_requests_of_their_own(length: int) -> None:
    """With the same seed a choice draws what it would draw if its prompt had been computed for it alone."""
    model = random_model()
    [prompt] = draw_prompts(length)
    params = SamplingParams(n=5, max_tokens=12, temperature=1.0, seed=3)
    core = engine(model)
    forked = run(core, [prompt], params)
    assert core.scheduler.counters.computed_tokens == length + 5 * 11
    starved = run(engine(model, pages=9), [prompt], params)
    assert starved == forked
    assert len({tuple(tokens) for tokens in forked.values()}) == 5


@pytest.mark.parametrize("budget", [5, 256])
def test_prompt_logprobs_are_the_dense_models_own(budget: int) -> None:
    model = random_model()
    [prompt] = draw_prompts(23)
    core = engine(model, budget=budget)
    run(core, [prompt], first_id=100)
    core.add(
        Request(
            id=0,
            prompt_ids=tuple(prompt),
            params=SamplingParams(max_tokens=0, prompt_logprobs=3),
            seed=0,
            prompt_logprobs_from=1,
        )
    )
    scored = [logprob for step in drain(core) for logprob in step.prompt_logprobs]
    dense = dense_logits(model, prompt).log_softmax(-1)
    assert [entry.token_id for entry in scored] == prompt[1:]
    for position, entry in enumerate(scored):
        assert entry.logprob == pytest.approx(dense[position, entry.token_id].item(), abs=1e-4)
        assert entry.rank == 1 + int((dense[position] > dense[position, entry.token_id]).sum())
        assert [token for token, _ in entry.top] == dense[position].topk(3).indices.tolist()


def test_scoring_from_a_position_reuses_the_prefix_before_it() -> None:
    model = random_model()
    [prompt] = draw_prompts(40)
    core = engine(model)
    run(core, [prompt[:32]], first_id=100)
    before = core.scheduler.counters.computed_tokens
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    core.add(Request(id=0, prompt_ids=tuple(prompt), params=params, seed=0, prompt_logprobs_from=33))
    scored = [logprob for step in drain(core) for logprob in step.prompt_logprobs]
    assert core.scheduler.counters.computed_tokens - before == 8
    dense = dense_logits(model, prompt).log_softmax(-1)
    expected = [dense[at - 1, prompt[at]].item() for at in range(33, 40)]
    assert [entry.logprob for entry in scored] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("budget", [4, 256])
def test_pooled_vectors_do_not_depend_on_chunks_or_the_cache(mode: str, budget: int) -> None:
    model = random_model()
    [prompt] = draw_prompts(18)
    runner = TorchRunner(model, page_size=4, num_pages=64, pooling=Pooling(mode, normalize=False))  # type: ignore[arg-type]
    core = EngineCore(runner, Limits(max_batch_tokens=budget))
    vectors = []
    for id in range(2):
        params = SamplingParams(max_tokens=0)
        core.add(Request(id=id, prompt_ids=tuple(prompt), params=params, seed=0, task=Task.EMBED))
        [last] = [step for step in drain(core) if step.finish_reason]
        assert last.pooled is not None
        vectors.append(torch.tensor(last.pooled))
    hidden = hidden_states(model, prompt)
    expected = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[mode]
    for vector in vectors:
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def hidden_states(model: Model, ids: list[int]) -> torch.Tensor:
    from dense_context import DenseContext

    hidden: torch.Tensor = model(torch.tensor(ids), torch.arange(len(ids)), DenseContext())
    return hidden


def test_a_row_of_nan_fails_alone() -> None:
    """One sequence's logits are spoiled; its neighbours must not notice."""
    model = random_model()
    prompts = draw_prompts(6, 7, 8)
    clean = run(engine(model), prompts)
    poisoned = 63
    embedding = next(model.parameters()).data
    embedding[poisoned] = float("nan")
    prompts = [[token % poisoned for token in prompt] for prompt in prompts]
    clean = run(engine(model), prompts)
    core = engine(model)
    for id, prompt in enumerate([*prompts, [*prompts[0], poisoned]]):
        core.add(Request(id=id, prompt_ids=tuple(prompt), params=GREEDY, seed=0))
    steps = list(drain(core))
    [failed] = [step for step in steps if step.error]
    assert failed.request_id == 3
    for id in range(3):
        assert [token for step in steps if step.request_id == id for token in step.token_ids] == clean[id, 0]
