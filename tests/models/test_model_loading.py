"""Loading is strict: every tensor has one place, and every error names its tensor."""

from collections.abc import Mapping

import pytest
import torch
from dense_context import dense_logits
from every_family import TINY
from torch import Tensor

from ostro.errors import BadCheckpoint
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights, places_of

LLAMA, GPT2 = TINY["llama"], TINY["gpt2"]
GEMMA2: Mapping[str, object] = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 4}


def build(config: Mapping[str, object]) -> Model:
    return build_model(config, dtype=torch.float32)


def checkpoint(config: Mapping[str, object]) -> dict[str, Tensor]:
    """Random tensors for all that a config asks for, in names and shapes of the checkpoint."""
    generator = torch.Generator().manual_seed(0)
    places = places_of(build(config))
    return {name: torch.randn(place.shape, generator=generator) for name, place in places.items()}


def loaded(config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Model:
    model = build(config)
    load_weights(model, tensors.items())
    return model


def test_a_checkpoint_holds_projections_apart_and_layers_under_their_published_names() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint(LLAMA).items()}
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (8, 16)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (24, 16)
    assert shapes["lm_head.weight"] == (32, 16)
    assert len(shapes) == 3 + 2 * 9


def test_a_missing_tensor_is_named() -> None:
    tensors = checkpoint(LLAMA)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(BadCheckpoint, match=r"lacks 1 tensors \(model\.layers\.1\.self_attn\.k_proj\.weight\)"):
        loaded(LLAMA, tensors)


def test_many_missing_tensors_are_counted() -> None:
    with pytest.raises(BadCheckpoint, match=r"lacks 21 tensors .*…"):
        loaded(LLAMA, {})


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    tensors = checkpoint(LLAMA)
    tensors["model.norm.weight"] = torch.zeros(15)
    with pytest.raises(BadCheckpoint, match=r"'model\.norm\.weight' has shape \(15,\).*asks for \(16,\)"):
        loaded(LLAMA, tensors)


def test_a_matrix_stored_the_wrong_way_round_is_refused() -> None:
    tensors = checkpoint(GPT2)
    tensors["transformer.h.0.mlp.c_fc.weight"] = tensors["transformer.h.0.mlp.c_fc.weight"].T
    with pytest.raises(BadCheckpoint, match=r"'transformer\.h\.0\.mlp\.c_fc\.weight' has shape \(64, 16\)"):
        loaded(GPT2, tensors)


def test_a_tensor_without_a_place_is_named() -> None:
    tensors = checkpoint(LLAMA)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(4)
    with pytest.raises(BadCheckpoint, match=r"'model\.layers\.0\.self_attn\.q_norm\.weight'"):
        loaded(LLAMA, tensors)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (GPT2, "transformer.h.0.attn.bias"),
        (GPT2, "transformer.h.0.attn.masked_bias"),
        (GPT2, "h.0.attn.bias"),
        (GPT2, "lm_head.weight"),
    ],
)
def test_what_old_checkpoints_carry_besides_weights_is_passed_over(config: Mapping[str, object], name: str) -> None:
    loaded(config, {**checkpoint(config), name: torch.zeros(7)})


@pytest.mark.parametrize(("config", "prefix"), [(LLAMA, "model."), (GPT2, "transformer.")])
def test_names_without_the_backbones_prefix_load_to_the_same_model(config: Mapping[str, object], prefix: str) -> None:
    tensors = checkpoint(config)
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    ids = [1, 2, 3]
    assert torch.equal(dense_logits(loaded(config, bare), ids), dense_logits(loaded(config, tensors), ids))


def test_norm_weights_that_are_stored_less_one_do_not_drift_when_loaded_again() -> None:
    tensors = checkpoint(GEMMA2)
    model = loaded(GEMMA2, tensors)
    once = dense_logits(model, [1, 2, 3])
    load_weights(model, tensors.items())
    assert torch.equal(dense_logits(model, [1, 2, 3]), once)
