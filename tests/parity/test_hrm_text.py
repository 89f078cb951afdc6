"""HRM-Text from files of transformers, through the engine: its cycles' keys and values in pages of their own."""

from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
import transformers
from dense_context import dense_logits
from every_family import config_of
from tiny_models import LLAMA

from ostro.backends.torch.quantize import quantize_matrices, quantized_on_the_way
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights
from ostro.torch_models.lora import Adapters
from ostro.weights import open_checkpoint
from ostro.weights.adapter import read_adapter

SLOTS = 2 * 2 * (3 + 1)
NEW_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
Tokens = dict[int, list[int]]


def random_ids(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator).tolist() for length in lengths]


SHARED, *TAILS = random_ids(24, 1, 3, 17)
PROMPTS = [*random_ids(1, 4, 5, 31), SHARED, *(SHARED + tail for tail in TAILS)]


@pytest.fixture(scope="module")
def reference() -> Iterator[transformers.PreTrainedModel]:
    values = config_of("hrm_text", {**LLAMA, "rms_norm_eps": 1e-6})
    settings = {key: value for key, value in values.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model("hrm_text", **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        yield model


@pytest.fixture(scope="module")
def directory(reference: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hrm_text")
    reference.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def generated(reference: transformers.PreTrainedModel) -> Tokens:
    """What transformers generates from the prompts alone, without token types."""
    return {
        id: reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for id, prompt in enumerate(PROMPTS)
    }


def load(directory: Path) -> Model:
    checkpoint = open_checkpoint(directory)
    model = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(model, checkpoint.tensors())
    return model


def engine(model: Model, *, pages: int = 256, budget: int = 256) -> EngineCore:
    return EngineCore(TorchRunner(model, page_size=4, num_pages=pages), Limits(max_batch_tokens=budget))


def run(core: EngineCore, prompts: dict[int, list[int]]) -> Tokens:
    for id, prompt in prompts.items():
        core.add(Request(id=id, prompt_ids=tuple(prompt), params=GREEDY, seed=0))
    tokens: Tokens = {id: [] for id in prompts}
    while core.has_work:
        for step in core.step():
            tokens[step.request_id] += step.token_ids
    core.check_integrity()
    usage = core.scheduler.kv.usage
    assert usage.in_use == 0
    assert usage.free + usage.cached == usage.total
    return tokens


def test_every_run_of_a_layer_has_its_own_keys_and_values_in_every_page(directory: Path) -> None:
    model = load(directory)
    runner = TorchRunner(model, page_size=4, num_pages=8)
    assert model.shape.num_layers == SLOTS
    assert runner.spec.pages_bytes == SLOTS * 2 * 4 * 8 * (4 * 8) * 4
    run(EngineCore(runner), {0: SHARED[:3]})
    stored = {tuple(keys[0, :, 0].flatten().tolist()) for keys in runner.cache}
    assert len(stored) == SLOTS


def test_together_and_cached_equals_transformers(directory: Path, generated: Tokens) -> None:
    core = engine(load(directory))
    assert run(core, dict(enumerate(PROMPTS))) == generated
    assert core.scheduler.counters.cache_hits >= 3 * len(SHARED)


@pytest.mark.full
def test_alone_equals_transformers(directory: Path, generated: Tokens) -> None:
    model = load(directory)
    for id, prompt in enumerate(PROMPTS):
        assert run(engine(model), {id: prompt}) == {id: generated[id]}


@pytest.mark.full
@pytest.mark.parametrize("budget", [3, *(pytest.param(budget, marks=pytest.mark.full) for budget in (1, 8))])
def test_chunked_equals_transformers(directory: Path, generated: Tokens, budget: int) -> None:
    assert run(engine(load(directory), budget=budget), dict(enumerate(PROMPTS))) == generated


@pytest.mark.full
def test_preempted_equals_transformers(directory: Path, generated: Tokens) -> None:
    core = engine(load(directory), pages=24)
    assert run(core, dict(enumerate(PROMPTS))) == generated
    assert core.scheduler.counters.preemptions > 0


def test_a_prompt_without_token_types_is_causal_in_transformers_too(reference: transformers.PreTrainedModel) -> None:
    """The mask that is not served is the one that token types ask for, of a model with `prefix_lm`."""
    assert reference.config.prefix_lm
    ids = torch.tensor([PROMPTS[-1]])
    whole = reference(ids).logits
    torch.testing.assert_close(reference(ids[:, :20]).logits, whole[:, :20], atol=1e-4, rtol=0)
    assert (reference(ids, token_type_ids=torch.ones_like(ids)).logits - whole).abs().max() > 0.1


def test_an_adapter_of_peft_takes_part_in_every_cycle(directory: Path, tmp_path: Path) -> None:
    ids = PROMPTS[3]
    base = transformers.AutoModelForCausalLM.from_pretrained(directory)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        expected = tuned.eval()(torch.tensor([ids])).logits[0]
    model = load(directory)
    plain = dense_logits(model, ids)
    adapters = Adapters(model, {"it": read_adapter(tmp_path / "adapter")})
    adapters.attach(model)
    adapters.begin([(adapters.slot("it"), len(ids))])
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(dense_logits(model, ids), expected, atol=1e-4, rtol=0)


def test_weights_quantized_while_loading_equal_weights_quantized_later(directory: Path) -> None:
    whole = load(directory)
    ids = PROMPTS[3]
    plain = dense_logits(whole, ids)
    quantize_matrices(whole, "int8")
    checkpoint = open_checkpoint(directory)
    model = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(model, quantized_on_the_way(model, checkpoint.tensors(), "int8"))
    assert torch.equal(dense_logits(model, ids), dense_logits(whole, ids))
    assert 0 < (dense_logits(model, ids) - plain).abs().mean() < 0.1 * plain.std()
