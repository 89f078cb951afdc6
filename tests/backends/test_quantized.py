"""Models whose weights are kept in 8 or 4 bits, on a CPU."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from every_family import TINY
from model_directory import write_model
from peft_directory import random_adapter
from tiny_models import random_model
from torch import Tensor

from ostro.backends.loading import load_runner, make_runner
from ostro.backends.planning import plan
from ostro.backends.torch.quantize import (
    Bits,
    PackedEmbedding,
    PackedLinear,
    quantize_matrices,
    quantized_on_the_way,
)
from ostro.config import EngineConfig, Quantization
from ostro.devices import DEVICE_KINDS
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.errors import BadCheckpoint, BadRequest, Unsupported
from ostro.kernels.packed_linear import Int4Weight, Int8Weight, widened
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.layers import Matrix
from ostro.torch_models.loading import load_weights, places_of
from ostro.weights import open_checkpoint

BITS: tuple[Bits, ...] = ("int8", "int4")
LLAMA: Mapping[str, object] = {**tiny_models.LLAMA, "hidden_size": 64, "intermediate_size": 96}
GEMMA2: Mapping[str, object] = {**tiny_models.GEMMA2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ALL: Mapping[str, Mapping[str, object]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "architectures": ["Qwen2ForCausalLM"]},
    "gemma2": GEMMA2,
    "olmo2": {**LLAMA, "architectures": ["Olmo2ForCausalLM"]},
    "phi3": {**LLAMA, "architectures": ["Phi3ForCausalLM"]},
    "gpt2": {**TINY["gpt2"], "vocab_size": 64, "n_embd": 64, "n_positions": 512},
}
PROMPTS = [tuple(range(1, 2 + 7 * n)) for n in range(1, 6)]


def generate(
    model: Model, prompts: list[tuple[int, ...]], quantize: Quantization, *, batch_tokens: int = 512
) -> list[list[int]]:
    config = EngineConfig(device="cpu", kv_memory=4 << 20, quantize=quantize, max_batch_tokens=batch_tokens)
    core = EngineCore(make_runner(model, config), prefix_caching=False)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for id, prompt in enumerate(prompts):
        core.add(Request(id=id, prompt_ids=prompt, params=params, seed=0))
    found: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for progress in core.step():
            found[progress.request_id] += progress.token_ids
    return found


def packed(model: Model) -> dict[str, Int8Weight | Int4Weight]:
    return {
        path: module.store
        for path, module in model.named_modules()
        if isinstance(module, PackedLinear | PackedEmbedding)
    }


@pytest.mark.cases(2)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ALL)
def test_alone_equals_batched_and_whole_equals_chunked(family: str, bits: Bits) -> None:
    model = random_model(ALL[family])
    together = generate(model, PROMPTS, bits)
    assert [generate(model, [prompt], bits)[0] for prompt in PROMPTS] == together
    assert generate(model, PROMPTS, bits, batch_tokens=7) == together
    assert len({tuple(tokens) for tokens in together}) > 1


@pytest.mark.cases(4)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ALL)
def test_quantizing_a_model_only_rounds_its_weights(family: str, bits: Bits) -> None:
    model, twin = random_model(ALL[family]), random_model(ALL[family])
    found = generate(model, PROMPTS, bits)
    for path, store in packed(model).items():
        twin.get_submodule(path).get_parameter("weight").data.copy_(widened(store))
    assert generate(twin, PROMPTS, "none") == found


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ALL)
def test_all_matrices_are_packed_and_nothing_else(family: str, bits: Bits) -> None:
    model = random_model(ALL[family])
    matrices = {path for path, module in model.named_modules() if isinstance(module, Matrix)}
    quantize_matrices(model, bits)
    assert packed(model).keys() == matrices
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    in_four = {path for path, store in packed(model).items() if isinstance(store, Int4Weight)}
    in_layers = {path for path in matrices if ".layers." in path or ".h." in path}
    assert in_four == (in_layers if bits == "int4" else set())


def test_rows_that_do_not_divide_into_groups_keep_eight_bits() -> None:
    model = random_model({**LLAMA, "intermediate_size": 50})
    quantize_matrices(model, "int4")
    kinds = {path.rpartition(".")[2]: type(store) for path, store in packed(model).items()}
    assert (kinds["down_proj"], kinds["gate_up_proj"]) == (Int8Weight, Int4Weight)


def test_tied_head_is_the_embedding_still() -> None:
    model = random_model(GEMMA2)
    quantize_matrices(model, "int8")
    assert model.get_submodule("lm_head") is model.get_submodule("model.embed_tokens")


# --- while it is loaded ---------------------------------------------------------------------------------------------


def stored(model: Model) -> Iterator[tuple[str, Tensor]]:
    """As a checkpoint of the model would give its tensors."""
    for name, place in places_of(model).items():
        yield name, (place.memory[0] if place.repeated else place.memory) - place.offset


@pytest.mark.cases(3)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "in reverse"])
def test_packing_while_loading_gives_the_same_weights(family: str, bits: Bits, reverse: bool) -> None:
    source, model = random_model(ALL[family]), build_model(ALL[family], dtype=torch.float32)
    tensors = list(stored(source))
    load_weights(model, quantized_on_the_way(model, tensors[::-1] if reverse else tensors, bits))
    quantize_matrices(source, bits)
    expected, found = packed(source), packed(model)
    assert expected.keys() == found.keys()
    for path, store in expected.items():
        assert torch.equal(widened(found[path]), widened(store)), path
    assert generate(model, PROMPTS, bits) == generate(source, PROMPTS, bits)


def test_matrix_is_packed_as_soon_as_it_is_there() -> None:
    """Else the whole model would be there in float32 once."""
    model = build_model(LLAMA, dtype=torch.float32)
    counts = []

    def watched() -> Iterator[tuple[str, Tensor]]:
        for each in stored(random_model(LLAMA)):
            counts.append(len(packed(model)))
            yield each

    load_weights(model, quantized_on_the_way(model, watched(), "int8"))
    # Embedding, head, and of each of the two layers qkv, o, gate and up, down.
    assert counts == sorted(counts)
    assert counts[-1] >= 8
    assert len(packed(model)) == 10


def test_names_without_the_backbone_are_packed_too() -> None:
    source, model = random_model(GEMMA2), build_model(GEMMA2, dtype=torch.float32)
    bare = ((name.removeprefix("model."), tensor) for name, tensor in stored(source))
    load_weights(model, quantized_on_the_way(model, bare, "int8"))
    assert generate(model, PROMPTS, "int8") == generate(source, PROMPTS, "int8")


def test_tensor_that_comes_twice_is_refused() -> None:
    """Its place was given back after the first."""
    model = build_model(LLAMA, dtype=torch.float32)
    twice = [*stored(random_model(LLAMA)), next(stored(random_model(LLAMA)))]
    with pytest.raises(BadCheckpoint, match="twice"):
        load_weights(model, quantized_on_the_way(model, twice, "int8"))


def test_tensor_that_is_missing_is_named() -> None:
    model = build_model(LLAMA, dtype=torch.float32)
    some = list(stored(random_model(LLAMA)))[:-1]
    with pytest.raises(BadCheckpoint, match="lacks 1 tensors"):
        load_weights(model, quantized_on_the_way(model, some, "int4"))


# --- devices --------------------------------------------------------------------------------------------------------


def test_what_a_device_has_no_kernels_for_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="int4 runs on CPUs only for now; on a GPU use fp8"):
        DEVICE_KINDS["cuda"].check(EngineConfig(quantize="int4"))
    with pytest.raises(BadRequest, match="quantize fp8 needs a GPU; on a CPU use int8 or int4"):
        make_runner(random_model(LLAMA), EngineConfig(quantize="fp8"))
    with pytest.raises(BadRequest, match="kv_dtype fp8 needs a GPU"):
        make_runner(random_model(LLAMA), EngineConfig(kv_dtype="fp8"))


@pytest.mark.parametrize("bits", BITS)
def test_adapters_add_to_weights_in_fewer_bits(bits: Bits, tmp_path: Path) -> None:
    """Each looks at the projections before they are packed, and is attached to what they became."""
    directory = write_model(tmp_path / "model")
    adapter = random_adapter(tmp_path / "adapter", random_model(json.loads((directory / "config.json").read_text())))
    config = EngineConfig(
        model=str(directory), device="cpu", kv_memory=4 << 20, quantize=bits, adapters=(("poet", str(adapter)),)
    )
    core = EngineCore(load_runner(open_checkpoint(directory), config), adapters=config.adapter_names)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for id, name in enumerate((None, "poet")):
        core.add(Request(id=id, prompt_ids=PROMPTS[0], params=params, seed=0, adapter=name))
    found: list[list[int]] = [[], []]
    while core.has_work:
        for progress in core.step():
            found[progress.request_id] += progress.token_ids
    assert found[0] != found[1]
    assert plan(directory, config).weights_bytes > plan(directory, replace(config, adapters=())).weights_bytes
