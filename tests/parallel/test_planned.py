"""A plan for several devices counts what each of them holds."""

from collections.abc import Mapping

import pytest
import torch
from divided_models import FAMILIES, ThreadGroup, divided
from native_models import ModelCheckpoint, savable_model

from ostro.config import EngineConfig
from ostro.errors import BadRequest
from ostro.planning import plan
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import places_of

GIB = 1 << 30
LLAMA_70B: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "olmo2", "phi3"])
def test_weights_are_those_of_a_rank(family: str, ranks: int) -> None:
    config = FAMILIES[family]
    whole = savable_model(config)
    asked = EngineConfig(device="cuda", dtype="float32", tensor_parallel=ranks)
    planned = plan(ModelCheckpoint(whole, config), asked, memory=16 * GIB)
    [part, *_] = divided(config, whole, ThreadGroup(ranks))
    assert planned.weights_bytes == sum(parameter.nbytes for parameter in part.parameters())
    assert planned.devices == ranks
    assert planned.parameters == sum(place.shape.numel() for place in places_of(whole).values())


def test_a_70b_model_on_eight_gpus_takes_what_the_docs_say() -> None:
    model = build_model(LLAMA_70B, dtype=torch.bfloat16, device=torch.device("meta"))
    asked = EngineConfig(device="cuda", tensor_parallel=8)
    planned = plan(ModelCheckpoint(model, LLAMA_70B), asked, memory=80 * 10**9)
    assert planned.weights_bytes == pytest.approx(17.64e9, rel=0.01)
    assert planned.page_bytes == planned.page_size * 80 * 2 * 128 * 2
    assert planned.num_pages * planned.page_size == pytest.approx(1.2e6, rel=0.05)
    assert planned.fits


def test_a_number_that_does_not_divide_is_refused_while_planning() -> None:
    config = FAMILIES["llama"]
    with pytest.raises(BadRequest, match="8 attention heads do not divide by it"):
        plan(
            ModelCheckpoint(savable_model(config), config),
            EngineConfig(device="cuda", tensor_parallel=3),
            memory=GIB,
        )
