"""A plan for several devices counts what each of them holds."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from divided_models import FAMILIES, ThreadGroup, divided
from every_family import DIVISIBLE_STATES
from native_models import ModelCheckpoint, savable_model

from ostro import devices as backends
from ostro.backends.backend import open_model
from ostro.backends.planning import plan
from ostro.backends.torch import part as torch_part
from ostro.backends.torch.part import TorchPart
from ostro.backends.torch.planning import host_parts
from ostro.backends.torch.step_plan import Forward
from ostro.config import EngineConfig
from ostro.devices import Memory
from ostro.errors import BadRequest, Unsupported
from ostro.kernels.paged_attention import Piece
from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from ostro.torch_models.build import build_model
from ostro.torch_models.layers import Matrix
from ostro.torch_models.loading import places_of
from ostro.weights.stored import Stored

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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", DIVISIBLE_STATES)
def test_weights_pages_and_states_of_all_ranks_take_what_is_planned(name: str, ranks: int) -> None:
    config = DIVISIBLE_STATES[name]
    whole = savable_model(config)
    asked = EngineConfig(device="cpu", backend="torch", tensor_parallel=ranks)
    opened, described = open_model(ModelCheckpoint(whole, config), asked), describe(config)
    assert isinstance(described, Architecture)
    planned = host_parts(opened, described, Memory(GIB, GIB))
    models = divided(config, whole, ThreadGroup(ranks))
    parts = [TorchPart(each, page_size=opened.resolved.page_size, num_pages=3, num_states=2) for each in models]
    assert sum(part.states.nbytes for part in parts) == 2 * planned.state > 0
    assert sum(stack.nbytes for part in parts for stack in part.cache.stacks) == 3 * planned.page
    # Norms of heads are stored once.
    places = [place for each in models for place in places_of(each).values() if place.repeated]
    repeated = sum(place.memory[1:].nbytes for place in places)
    assert sum(each.nbytes for model in models for each in model.parameters()) - repeated == planned.weights


def test_states_are_not_divided_over_gpus() -> None:
    config = DIVISIBLE_STATES["qwen3_5"]
    checkpoint = ModelCheckpoint(savable_model(config), config)
    with pytest.raises(Unsupported, match="a recurrent state is not divided over GPUs"):
        plan(checkpoint, EngineConfig(device="cuda", tensor_parallel=2), memory=16 * GIB)


def test_auto_is_one_gpu_for_a_model_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "count_gpus", lambda: 4)
    config = DIVISIBLE_STATES["qwen3_5"]
    asked = EngineConfig(device="cuda", tensor_parallel="auto")
    assert plan(ModelCheckpoint(savable_model(config), config), asked, memory=16 * GIB).devices == 1


@pytest.mark.full
def test_a_70b_model_on_eight_gpus_takes_what_the_docs_say() -> None:
    model = build_model(LLAMA_70B, dtype=torch.bfloat16, device=torch.device("meta"))
    asked = EngineConfig(device="cuda", tensor_parallel=8)
    planned = plan(ModelCheckpoint(model, LLAMA_70B), asked, memory=80 * 10**9)
    assert planned.weights_bytes == pytest.approx(17.64e9, rel=0.01)
    assert planned.page_bytes == planned.page_size * 80 * 2 * 128 * 2
    assert planned.num_pages * planned.page_size == pytest.approx(1.2e6, rel=0.05)
    assert planned.fits


@pytest.mark.parametrize(("devices", "ranks"), [(1, 1), (4, 4), (7, 4)])
def test_auto_is_planned_for_as_many_gpus_as_the_model_divides_over(
    devices: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "count_gpus", lambda: devices)
    config = FAMILIES["llama"]
    checkpoint = ModelCheckpoint(savable_model(config), config)
    found = plan(checkpoint, EngineConfig(device="cuda", tensor_parallel="auto"), memory=16 * GIB)
    assert found == plan(checkpoint, EngineConfig(device="cuda", tensor_parallel=ranks), memory=16 * GIB)
    assert (found.devices, ", 4 devices" in found.backend) == (ranks, ranks == 4)


def test_auto_is_one_device_where_other_settings_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "count_gpus", lambda: 4)
    config = FAMILIES["llama"]
    checkpoint = ModelCheckpoint(savable_model(config), config)
    for asked in (
        EngineConfig(device="cuda", tensor_parallel="auto", deterministic=True),
        EngineConfig(device="cpu", tensor_parallel="auto"),
        EngineConfig(device="cpu", backend="torch", tensor_parallel="auto"),
    ):
        assert plan(checkpoint, asked, memory=16 * GIB).devices == 1


def test_auto_needs_gpus_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "count_gpus", lambda: 0)
    config = FAMILIES["llama"]
    with pytest.raises(BadRequest, match=r"no GPU here to count.*--tensor-parallel 8"):
        plan(
            ModelCheckpoint(savable_model(config), config),
            EngineConfig(device="cuda", tensor_parallel="auto"),
            memory=GIB,
        )


def test_a_number_that_does_not_divide_is_refused_while_planning() -> None:
    config = FAMILIES["llama"]
    with pytest.raises(BadRequest, match="8 attention heads do not divide by it"):
        plan(
            ModelCheckpoint(savable_model(config), config),
            EngineConfig(device="cuda", tensor_parallel=3),
            memory=GIB,
        )


def test_every_rank_has_a_process_on_the_host() -> None:
    config = FAMILIES["llama"]
    checkpoint = ModelCheckpoint(savable_model(config), config)
    one, four = (plan(checkpoint, EngineConfig(device="cuda", tensor_parallel=n), memory=16 * GIB) for n in (1, 4))
    assert four.host_bytes == 4 * one.host_bytes


class PackedCheckpoint(ModelCheckpoint):
    """The same model, as if its weights were stored in 8 bits."""

    def stored(self) -> Stored:
        plain = super().stored()
        return replace(plain, tensors=[replace(each, format="Q8_0") for each in plain.tensors])


def test_every_rank_on_a_cpu_unpacks_whole_tensors() -> None:
    config = {**FAMILIES["llama"], "vocab_size": 1 << 16}
    described = describe(config)
    assert isinstance(described, Architecture)
    plain = ModelCheckpoint(build_model(config, dtype=torch.float32, device=torch.device("meta")), config)
    packed = PackedCheckpoint(plain.model, config)
    largest = max(tensor.values for tensor in plain.stored().tensors) * 4
    found = []
    for ranks in (1, 2, 4):
        asked = EngineConfig(device="cpu", backend="torch", tensor_parallel=ranks)
        peaks = [host_parts(open_model(each, asked), described, Memory(GIB, GIB)).peak for each in (packed, plain)]
        found.append(peaks[0] - peaks[1])
    assert found[0] > largest
    assert found == [found[0], 2 * found[0], 4 * found[0]]


@pytest.mark.parametrize(("ranks", "packs"), [(1, True), (2, False)])
def test_a_second_layout_is_kept_if_there_is_memory_for_all_ranks(
    ranks: int, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = savable_model(FAMILIES["llama"])
    matrices = [module for module in model.modules() if isinstance(module, Matrix)]
    # A quarter of what is free suffices for one rank and a half.
    monkeypatch.setattr(torch_part, "free_memory", lambda: 6 * sum(matrix.weight.nbytes for matrix in matrices))
    part = TorchPart(model, page_size=4, num_pages=8, ranks=ranks)
    part.forward(Forward([1, 2], [Piece(offset=0, start=0, length=2, pages=[0])]))
    assert {matrix.packed is not None for matrix in matrices} == {packs}
