"""Norms whose weights are part of matrices against the model's own `forward` on unfolded weights."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from dense_context import dense_logits
from test_gpu_runner import GREEDY, SHALLOW, on_cpu, requests, run, tokens
from test_layer_plan import (
    VARIANTS,
    Own,
    Steps,
    all_logits,
    between,
    decoder,
    everything,
    first_and_last,
    nothing,
    some_ids,
)
from tiny_models import random_model
from torch import Tensor, nn

from ostro.engine.core import EngineCore
from ostro.kernels.gpu.norm import add_norm
from ostro.kernels.gpu.tilings import VectorTiling
from ostro.runner.gpu import fused
from ostro.runner.gpu.choices import Choices
from ostro.runner.gpu.folded_norms import fold_norms
from ostro.runner.gpu.layer_plan import layer_plans
from ostro.runner.gpu.quantize import quantize_fp8
from ostro.runner.gpu.runner import GpuRunner
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.lora import Adapters

FOLDED = {
    "gemma",
    "granite",
    "llama",
    "llama, biases",
    "ministral3",
    "mistral",
    "phi3",
    "phi3, half rotated",
    "qwen2",
    "qwen3",
    "smollm3",
}


def vectors(model: Decoder) -> Choices:
    """The vector kernel for up to 4 rows, the tensor cores' for up to 16."""
    tiling = VectorTiling(outs=4, ins=32, warps=4)
    return Choices({product: {4: tiling, **rows} for product, rows in everything(model).table.items()})


@pytest.mark.parametrize(
    ("name", "own"),
    [
        *((name, everything) for name in ("llama", "qwen3", "mistral", "granite")),
        *(("llama, biases", own) for own in (nothing, first_and_last, between, vectors)),
    ],
)
def test_folded_norms_give_the_twins_logits(name: str, own: Own, device: torch.device) -> None:
    ids, model = some_ids(), decoder(name)
    expected = [dense_logits(model, each) for each in ids]
    given = all_logits(Steps(model, device, ids, own=own, folded_norms=True))
    for ours, twins in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, twins, rtol=1e-3, atol=2e-3)


def test_folded_norms_go_together_with_rotation_in_attention(device: torch.device) -> None:
    ids, model = some_ids(), decoder("qwen3")
    expected = [dense_logits(model, each) for each in ids]
    steps = Steps(model, device, ids, own=everything, folded_norms=True, rotates_in_attention=True)
    for ours, twins in zip(all_logits(steps), expected, strict=True):
        torch.testing.assert_close(ours, twins, rtol=1e-3, atol=2e-3)


# The interpreter has no dots of bfloat16.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_16_bit_weights_that_are_rounded_twice_move_logits_little_more_than_once(
    dtype: torch.dtype, device: torch.device
) -> None:
    ids, model = some_ids(), decoder("qwen3")
    expected = [dense_logits(model, each) for each in ids]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    errors = []
    for folded in (False, True):
        given = all_logits(Steps(deepcopy(model), device, ids, own=everything, folded_norms=folded))
        errors.append(torch.cat([(a - b).abs() for a, b in zip(given, expected, strict=True)]).mean())
        assert errors[-1] < 0.1 * torch.cat(expected).abs().mean()
    assert errors[1] < 2 * errors[0]


def test_own_products_need_no_norm_kernels_but_the_first_and_the_last(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(x: Tensor, *args: object, **options: object) -> Tensor:
        calls.append(len(x))
        return add_norm(x, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fused, "add_norm", counted)
    ids, layers = some_ids(), len(layer_plans(decoder("llama")))
    for folded, expected in ((False, 2 * layers + 1), (True, 2)):
        steps = Steps(decoder("llama"), device, ids, own=everything, folded_norms=folded)
        calls.clear()
        steps.logits([(0, 5), (0, 3)])
        assert calls == [8] * expected


def test_a_runner_with_folded_norms_gives_the_cpus_tokens(device: torch.device) -> None:
    asked, model = requests([GREEDY] * 2), random_model(SHALLOW)
    expected = tokens(on_cpu(random_model(SHALLOW), asked))
    model.to(device)
    runner = GpuRunner(model, page_size=16, num_pages=64, max_batch_tokens=64, max_batch_seqs=4, folded_norms=True)
    assert isinstance(model, Decoder)
    assert all(layer.mlp_norm is not None and (layer.mlp_norm.weight == 1).all() for layer in model.layers)
    assert tokens(run(EngineCore(runner), asked)) == expected


def test_models_with_nothing_between_sums_and_rms_norms_fold() -> None:
    assert {name for name in VARIANTS if all(each.can_fold_norms for each in layer_plans(decoder(name)))} == FOLDED
    assert not any(each.can_fold_norms for name in set(VARIANTS) - FOLDED for each in layer_plans(decoder(name)))


@pytest.mark.parametrize("name", ["gemma3_text", "olmo2", "gpt_neox"])
def test_other_models_keep_their_weights_and_their_path(name: str, device: torch.device) -> None:
    ids, model = some_ids(), decoder(name)
    assert_same_weights(model, lambda: Steps(model, device, ids, folded_norms=True))
    plain, asked = (Steps(decoder(name), device, ids, own=everything, folded_norms=folded) for folded in (False, True))
    for ours, others in zip(asked.logits([(0, 5)]), plain.logits([(0, 5)]), strict=True):
        assert torch.equal(ours, others)


def test_nothing_is_folded_where_results_must_not_depend_on_the_batch_or_adapters_add_to_them(
    device: torch.device,
) -> None:
    ids, model = some_ids(), decoder("llama")
    assert_same_weights(model, lambda: Steps(model, device, ids, deterministic=True, folded_norms=True))
    adapters = Adapters(model, {})
    assert_same_weights(model, lambda: Steps(model, device, ids, adapters=adapters, folded_norms=True))


def test_8_bit_weights_are_not_folded() -> None:
    model = random_model({**VARIANTS["llama"], "intermediate_size": 48})
    assert isinstance(model, Decoder)
    quantize_fp8(model)
    assert_same_weights(model, lambda: fold_norms(layer_plans(model)))


def test_folding_leaves_norms_that_only_scale_and_a_model_that_computes_the_same() -> None:
    [ids, _], model = some_ids(), decoder("qwen3")
    expected = dense_logits(model, ids)
    folded = fold_norms(layer_plans(model))
    assert all(each.folded_norms for each in folded)
    for layer in model.layers:
        assert layer.attention_norm is not None
        assert layer.mlp_norm is not None
        assert (layer.attention_norm.weight == 1).all()
        assert (layer.mlp_norm.weight == 1).all()
    torch.testing.assert_close(dense_logits(model, ids), expected, rtol=1e-4, atol=1e-4)
    # Once more, and nothing is left to fold.
    assert_same_weights(model, lambda: fold_norms(layer_plans(model)))


def assert_same_weights(model: nn.Module, after: Callable[[], object]) -> None:
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    after()
    assert all(
        torch.equal(weight.cpu().float(), before[name].cpu().float()) for name, weight in model.named_parameters()
    )
