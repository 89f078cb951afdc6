import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from encoder_directory import WIDE, reference, write_encoder
from every_family import CASES, MIXTURES, TINY, family_of_case
from family_case import EXPERT_SIZES, GRANITE_SCALES, SIZES
from fault_proxy import Fault, FaultProxy
from gguf_factory import write_tiny_gguf
from hypothesis import given
from hypothesis import strategies as st
from model_directory import write_model
from native_models import needs_library
from object_stores import ObjectStore, running_store
from peft_directory import random_adapter
from safetensors.torch import load_file, save_file

from ostro.backends.loading import load_runner
from ostro.backends.native.encoder import NativeEncoderRunner
from ostro.backends.planning import plan
from ostro.backends.torch.runner import TorchRunner
from ostro.config import BackendName, Device, EngineConfig, KVDType, Quantization
from ostro.engine.request import Request
from ostro.engine_process.handle import EngineHandle
from ostro.errors import BadCheckpoint, BadRequest, ModelNotFound, Unsupported, UnsupportedModel
from ostro.kernels.packed_linear import Int4Weight, Int8Weight
from ostro.models.family import Family
from ostro.models.registry import FAMILIES, describe
from ostro.sampling_params import SamplingParams
from ostro.sources import base
from ostro.sources.store import ModelStore
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import places_of
from ostro.torch_models.lora import Adapters
from ostro.weights import GgufCheckpoint, open_checkpoint
from ostro.weights.adapter import read_adapter

MIB, GIB = 1 << 20, 1 << 30
LLAMA: Mapping[str, object] = {
    **TINY["llama"],
    "vocab_size": 16000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
GPT2: Mapping[str, object] = {
    **TINY["gpt2"],
    "vocab_size": 20000,
    "n_embd": 640,
    "n_layer": 6,
    "n_head": 10,
    "n_positions": 1024,
    "tie_word_embeddings": True,
}
GEMMA2: Mapping[str, object] = {
    **tiny_models.GEMMA2,
    "vocab_size": 64000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
}
OLMO3: Mapping[str, object] = {**LLAMA, "architectures": ["Olmo3ForCausalLM"], "sliding_window": 512}
GRANITE: Mapping[str, object] = {**LLAMA, **GRANITE_SCALES, "architectures": ["GraniteForCausalLM"]}
OLMOE: Mapping[str, object] = {
    **LLAMA,
    "architectures": ["OlmoeForCausalLM"],
    "intermediate_size": 288,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
GPT_NEOX: Mapping[str, object] = {**LLAMA, "architectures": ["GPTNeoXForCausalLM"]}
SERVED = EngineConfig(device="cpu", kv_memory=16 * MIB, serving=True)
ON_TORCH = replace(SERVED, backend="torch")


def write_checkpoint(directory: Path, config: Mapping[str, object], dtype: torch.dtype) -> Path:
    """Random weights, under the names that the family's checkpoints have."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {name: place.shape for name, place in places_of(build_model(config, dtype=torch.float32)).items()}
    # The same numbers again and again: drawing a hundred million takes seconds.
    drawn = torch.randn(min(1 << 20, max(map(torch.Size.numel, shapes.values())))).mul_(0.02).to(dtype)
    save_file({name: repeated(drawn, shape) for name, shape in shapes.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def repeated(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return values.repeat(-(-shape.numel() // len(values)))[: shape.numel()].reshape(shape).contiguous()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


# --- against engines ------------------------------------------------------------------------------------------------


async def measured(config: EngineConfig, *, prompt: Sequence[int] = (), choices: int = 1) -> tuple[int, int]:
    """Most bytes that an engine process was given until it was ready, and those that it holds after a request."""
    handle = EngineHandle(config)
    handle.start()
    try:
        await handle.settled()
        # Not the engine's own word: what `getrusage` calls the most begins with what this process holds.
        peak = in_status(handle.pid, "VmHWM")
        if prompt:
            params = SamplingParams(max_tokens=1 if choices == 1 else 2, n=choices)
            async for _ in handle.submit(Request(id=1, prompt_ids=tuple(prompt), params=params, seed=0)):
                pass
        return peak, in_status(handle.pid, "VmRSS")
    finally:
        await handle.stop()


def in_status(pid: int | None, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def agree(planned: int, found: int) -> None:
    assert planned == pytest.approx(found, rel=0.1), f"planned {planned / MIB:.0f} MiB, found {found / MIB:.0f}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (LLAMA, torch.bfloat16),
        pytest.param(GPT2, torch.float32, marks=pytest.mark.slow),
        pytest.param(GEMMA2, torch.float16, marks=pytest.mark.slow),
        pytest.param(OLMOE, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["llama", "gpt2", "gemma2", "olmoe"],
)
def test_plan_agrees_with_what_an_engine_takes_on_torch(
    config: Mapping[str, object], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bar 5: within a tenth, whatever the family, the number format and whether the head is tied."""
    directory = write_checkpoint(tmp_path, config, dtype)
    found = plan(directory, ON_TORCH)
    # Experts have no second layout to outweigh the mapped file.
    assert found.peak_bytes == found.total_bytes or config is OLMOE
    # All pages in one sequence: what the plan promises includes them.
    prompt = range(found.num_pages * found.page_size - 1) if config is GPT2 else ()
    peak, now = asyncio.run(measured(replace(ON_TORCH, model=str(directory)), prompt=prompt))
    agree(found.peak_bytes, peak)
    agree(found.total_bytes, now)


@pytest.mark.slow
def test_plan_agrees_with_what_two_ranks_take(tmp_path: Path) -> None:
    """The engine's own figure, too, is that of both processes."""
    directory = write_checkpoint(tmp_path, LLAMA, torch.bfloat16)
    config = replace(ON_TORCH, tensor_parallel=2)
    found = plan(directory, config)

    async def resident() -> int:
        handle = EngineHandle(replace(config, model=str(directory)))
        handle.start()
        try:
            await handle.settled()
            assert handle.info is not None
            return handle.info.resident_bytes
        finally:
            await handle.stop()

    agree(found.total_bytes - found.kv_bytes, asyncio.run(resident()))


@pytest.mark.slow
def test_plan_agrees_for_the_default_model_on_torch() -> None:
    agree(plan(None, ON_TORCH).total_bytes, asyncio.run(measured(ON_TORCH))[0])


@pytest.mark.slow
def test_plan_agrees_for_weights_in_fewer_bits_on_torch(tmp_path: Path) -> None:
    """And they do take fewer: what is left over from loading in float32 would show."""
    directory = write_checkpoint(tmp_path, LLAMA, torch.bfloat16)
    config = replace(ON_TORCH, model=str(directory), quantize="int8")
    found, whole = plan(directory, config), plan(directory, ON_TORCH)
    peak, now = asyncio.run(measured(config, prompt=range(200)))
    agree(found.peak_bytes, peak)
    agree(found.total_bytes, now)
    assert now < whole.total_bytes / 2


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For packed weights of models that are gone with the test."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@needs_library
@pytest.mark.parametrize(
    ("config", "dtype", "quantize"),
    [
        (LLAMA, torch.bfloat16, "none"),
        pytest.param(GPT2, torch.float32, "none", marks=pytest.mark.slow),
        pytest.param(GEMMA2, torch.float16, "none", marks=pytest.mark.slow),
        pytest.param(OLMO3, torch.bfloat16, "none", marks=pytest.mark.slow),
        pytest.param(GRANITE, torch.bfloat16, "none", marks=pytest.mark.slow),
        pytest.param(GPT_NEOX, torch.float16, "none", marks=pytest.mark.slow),
        pytest.param(LLAMA, torch.bfloat16, "int8", marks=pytest.mark.slow),
        pytest.param(OLMOE, torch.bfloat16, "int8", marks=pytest.mark.slow),
    ],
    ids=["llama", "gpt2", "gemma2", "olmo3", "granite", "gpt_neox", "llama-int8", "olmoe-int8"],
)
def test_plan_agrees_with_what_an_engine_takes_natively(
    config: Mapping[str, object], dtype: torch.dtype, quantize: Quantization, tmp_path: Path, own_cache: Path
) -> None:
    """When the weights are packed, and once they are, with all pages in use and many rows of logits."""
    directory = write_checkpoint(tmp_path / "model", config, dtype)
    engine = replace(SERVED, quantize=quantize, threads=2)
    found = plan(directory, engine)
    assert found.backend.startswith("native")
    served = replace(engine, model=str(directory))
    first, _ = asyncio.run(measured(served))
    assert first < 1.1 * found.peak_bytes
    # Tokens from all over the vocabulary: of a mapped embedding only what is read is there.
    vocab, choices = describe(config).shape.vocab_size, found.num_pages // 2
    length = min(found.max_seq_len, choices * found.page_size) - 2
    prompt = [at * (vocab - 1) // length for at in range(length)]
    peak, now = asyncio.run(measured(served, prompt=prompt, choices=choices))
    assert peak <= 1.1 * found.total_bytes
    agree(found.total_bytes, now)


@needs_library
def test_plan_counts_the_whole_of_an_encoders_longest_text(tmp_path: Path, own_cache: Path) -> None:
    """It counted max_batch_tokens, however long a text may be, and no scores."""
    positions = {"max_position_embeddings": 5000}
    directory = write_encoder(tmp_path / "model", reference({**WIDE["bert"], **positions}))
    planned, taken = [], []
    for length in (1000, 5000):
        engine = EngineConfig(device="cpu", backend="native", threads=2, max_batch_tokens=64, max_seq_len=length)
        runner = load_runner(open_checkpoint(directory), engine)
        assert isinstance(runner, NativeEncoderRunner)
        program = runner.program
        # A head's keys and values, and scores of 12 rows.
        heads = 4 * length * (2 * program.spec.head_dim + 12)
        taken.append(sum(program.buffer(at).nbytes for at in range(len(program.spec.buffers))) + 2 * heads)
        planned.append(plan(directory, engine).total_bytes)
    assert planned[1] - planned[0] == taken[1] - taken[0]


@pytest.mark.full
@needs_library
def test_plan_agrees_for_the_default_model() -> None:
    config = replace(SERVED, threads=2)
    found = plan(None, config)
    asyncio.run(measured(config))
    agree(found.total_bytes, asyncio.run(measured(config, prompt=range(300), choices=20))[1])


# --- against the loader ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_weights_are_counted_as_they_are_kept(quantize: Quantization, tmp_path: Path) -> None:
    config = {**tiny_models.LLAMA, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
    directory = write_checkpoint(tmp_path, config, torch.float16)
    engine = EngineConfig(device="cpu", kv_memory=MIB, quantize=quantize, backend="torch")
    model = make_model(directory, engine)
    kept = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *stores(model))}
    found = plan(directory, engine)
    assert found.weights_bytes - found.second_layout_bytes == sum(kept.values())
    assert found.parameters == sum(tensor.numel() for tensor in build_model(config, dtype=torch.float32).parameters())
    spec = load_runner(open_checkpoint(directory), engine).spec
    assert (found.backend, found.precision) == (spec.backend, spec.precision)


@pytest.mark.parametrize(
    ("backend", "quantize"),
    [
        ("torch", "none"),
        pytest.param("native", "none", marks=needs_library),
        pytest.param("native", "int4", marks=needs_library),
    ],
)
def test_only_active_experts_of_a_mixture_are_counted(
    backend: BackendName, quantize: Quantization, tmp_path: Path
) -> None:
    """The count is that of a model with only the active experts."""
    config = {**TINY["qwen3_moe"], "vocab_size": 500, "hidden_size": 192, "head_dim": 32}
    config |= {"moe_intermediate_size": 96, "num_experts": 10, "num_experts_per_tok": 3, "num_hidden_layers": 4}
    engine = EngineConfig(device="cpu", kv_memory=MIB, quantize=quantize, backend=backend)
    found = plan(write_checkpoint(tmp_path / "all", config, torch.float16), engine)
    few = plan(write_checkpoint(tmp_path / "few", {**config, "num_experts": 3}, torch.float16), engine)
    assert found.active_parameters == pytest.approx(few.parameters, rel=0.01)
    assert found.active_bytes == pytest.approx(few.active_bytes, rel=0.02)
    assert few.active_bytes == few.weights_bytes - few.second_layout_bytes
    assert few.active_parameters == few.parameters < found.parameters


NATIVE: Mapping[str, object] = {
    **tiny_models.GEMMA2,
    **EXPERT_SIZES,
    "vocab_size": 500,
    "hidden_size": 192,
    "intermediate_size": 328,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
RECURRENT_CONFIGS = {
    case.model_type: {"num_hidden_layers": 2, **case.settings(SIZES), "hidden_act": "silu"}
    for case in CASES.values()
    if case.recurrent
}
"""What says which layers keep a state, and how large it is."""
BIASED: Mapping[str, object] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}


SHAPES: Mapping[str, tuple[Mapping[str, object], torch.dtype, Quantization]] = {
    "float32": ({}, torch.float32, "none"),
    "int8": ({}, torch.float16, "int8"),
    "biases": (BIASED, torch.bfloat16, "int4"),
    "odd": ({"num_hidden_layers": 1, "hidden_size": 196}, torch.float16, "int4"),
    "heads": ({"head_dim": 24}, torch.float32, "none"),
    "rotary": ({"head_dim": 16, "partial_rotary_factor": 0.25}, torch.float32, "none"),
    "activation": ({"hidden_act": "relu", "hidden_activation": "relu"}, torch.float32, "none"),
}


def shapes_of_families() -> Iterator[object]:
    """In `make test`, two or three shapes of each family, and every shape in a third of the families."""
    for at, family in enumerate(FAMILIES):
        for number, (name, shape) in enumerate(SHAPES.items()):
            marks = [] if (at + number) % 3 == 0 else [pytest.mark.full]
            yield pytest.param(family, *shape, marks=marks, id=f"{name}-{family.model_type}")


@needs_library
@pytest.mark.parametrize(("family", "changes", "dtype", "quantize"), list(shapes_of_families()))
def test_native_model_is_recognised_and_counted_as_packed(
    family: Family,
    changes: Mapping[str, object],
    dtype: torch.dtype,
    quantize: Quantization,
    tmp_path: Path,
    own_cache: Path,
) -> None:
    """Every family either runs natively, as was planned, or on torch for the reason that was planned."""
    config = {**NATIVE, **changes, "architectures": [family.architecture]}
    if family.model_type == "gpt2":
        config = {**TINY["gpt2"], "vocab_size": 500, "n_embd": 192, "n_head": 6, "tie_word_embeddings": True}
    if (own := RECURRENT_CONFIGS.get(family.model_type)) is not None:
        config = {**config, **own}
    directory = write_checkpoint(tmp_path / "model", config, dtype)
    engine = EngineConfig(device="cpu", kv_memory=MIB, quantize=quantize, serving=True)
    try:
        found = plan(directory, engine)
    except Unsupported as error:
        assert family in map(family_of_case, MIXTURES)
        with pytest.raises(Unsupported, match=re.escape(error.message)):
            load_runner(open_checkpoint(directory), engine)
        return
    runner = load_runner(open_checkpoint(directory), engine)
    spec = runner.spec
    assert (found.backend, found.precision) == (spec.backend, spec.precision)
    assert (found.num_pages, found.num_states, found.state_bytes) == (spec.num_pages, spec.num_states, spec.state_bytes)
    assert found.kv_bytes + found.num_states * found.state_bytes == spec.pages_bytes
    packed = list(own_cache.glob("packed/*/weights.ostro"))
    if packed:
        assert found.weights_bytes == pytest.approx(packed[0].stat().st_size, rel=0.01)
        return
    told = []
    for ask in (plan, lambda path, engine: load_runner(open_checkpoint(path), engine)):
        with pytest.raises(Unsupported) as refused:
            ask(directory, replace(engine, backend="native"))
        told.append(str(refused.value))
    assert told[0] == told[1]


@needs_library
@pytest.mark.parametrize("kv_dtype", ["auto", "float32", "float16", "int8"])
@pytest.mark.parametrize(("kv_memory", "limit"), [(MIB, None), (None, 2 * MIB), (None, None)])
def test_native_pages_are_as_many_as_a_runner_gets(
    kv_dtype: KVDType, kv_memory: int | None, limit: int | None, tmp_path: Path, own_cache: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model", NATIVE, torch.float32)
    engine = EngineConfig(device="cpu", kv_memory=kv_memory, kv_memory_limit=limit, kv_dtype=kv_dtype, max_batch_seqs=4)
    found, spec = plan(directory, engine), load_runner(open_checkpoint(directory), engine).spec
    assert (found.num_pages, found.precision) == (spec.num_pages, spec.precision)


@pytest.mark.full
@needs_library
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_gguf_is_counted_at_its_own_precision(
    quantize: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks stay as the file has them, whatever is asked for floats."""
    checkpoint = open_checkpoint(None)
    # From here on: what is packed goes with the test.
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path))
    engine = replace(SERVED, quantize=quantize)
    found, spec = plan(checkpoint, engine), load_runner(checkpoint, engine).spec
    assert (found.backend, found.precision) == (spec.backend, spec.precision)
    assert found.precision == "Q4_1 and Q8_0 weights, float32 keys and values"
    [packed] = ModelStore().packed()
    assert found.weights_bytes == pytest.approx(packed.size, rel=0.01)
    assert found.weights_bytes < 1.1 * checkpoint.path.stat().st_size


@needs_library
def test_settings_that_only_one_backend_takes(tmp_path: Path, own_cache: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", NATIVE, torch.float32)
    wider = EngineConfig(device="cpu", page_size=32, kv_memory=MIB)
    assert (
        plan(directory, wider).backend == load_runner(open_checkpoint(directory), wider).spec.backend == "torch (cpu)"
    )
    for engine in (replace(wider, kv_dtype="float16"), replace(wider, backend="native")):
        for ask in (plan, lambda path, engine: load_runner(open_checkpoint(path), engine)):
            with pytest.raises(Unsupported, match=r"needs the native core|page_size is 32, and native kernels take 16"):
                ask(directory, engine)


def make_model(directory: Path, config: EngineConfig) -> Model:
    runner = load_runner(open_checkpoint(directory), config)
    assert isinstance(runner, TorchRunner)
    return runner.model


def stores(model: Model) -> Iterator[torch.Tensor]:
    for module in model.modules():
        match getattr(module, "store", None):
            case Int8Weight(values, scales):
                yield from (values, scales)
            case Int4Weight(values, scales, minima):
                yield from (values, scales, minima)


def test_gguf_is_counted_as_it_is_unpacked(tmp_path: Path) -> None:
    found = plan(None, ON_TORCH, memory=64 * GIB)
    checkpoint = open_checkpoint(None)
    assert isinstance(checkpoint, GgufCheckpoint)
    values = sum(torch.Size(weight.info.shape).numel() for weight in checkpoint.weights)
    assert (found.parameters, found.weights_bytes - found.second_layout_bytes) == (values, values * 4)


def test_pickle_is_counted_by_its_size_and_the_configs_dtype(tmp_path: Path) -> None:
    config = {**LLAMA, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
    shapes = {name: place.shape for name, place in places_of(build_model(config, dtype=torch.float32)).items()}
    torch.save({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, tmp_path / "m.pt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = sum(shape.numel() for shape in shapes.values())
    assert plan(tmp_path / "m.pt", SERVED).parameters == pytest.approx(values, rel=0.01)


def test_tied_head_and_old_buffers_are_not_counted(tmp_path: Path) -> None:
    config = {**tiny_models.LLAMA, "tie_word_embeddings": True}
    directory = write_checkpoint(tmp_path, config, torch.float32)
    before = plan(directory, SERVED).parameters
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(tiny_models.VOCAB, 32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, directory / "model.safetensors")
    assert plan(directory, SERVED).parameters == before


def test_adapters_are_counted_as_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zeros that stand around the Bs of a fused projection were left out, and `~` was not understood."""
    directory = write_checkpoint(tmp_path / "base", tiny_models.LLAMA, torch.float32)
    model = make_model(directory, SERVED)
    random_adapter(tmp_path / "all", model)
    random_adapter(tmp_path / "some", model, rank=2, targets=("q_proj", "up_proj", "o_proj"))
    monkeypatch.setenv("HOME", str(tmp_path))
    named = (("all", "~/all"), ("some", str(tmp_path / "some")))
    kept = Adapters(model, {name: read_adapter(path) for name, path in named}).nbytes
    plain, adapted = (plan(directory, replace(SERVED, adapters=adapters)) for adapters in ((), named))
    assert adapted.weights_bytes - plain.weights_bytes == kept


# --- elsewhere ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gs", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    with running_store(request.param) as store:
        yield store


@pytest.fixture
def proxy(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    proxy = FaultProxy(store.url)
    for name, value in (store.environment(proxy.url) | {"OSTRO_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


def split_in_two(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{number % 2 + 1:05}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("num_files", [1, 2])
def test_model_in_a_store_is_planned_without_its_weights(
    store: ObjectStore, proxy: FaultProxy, tmp_path: Path, num_files: int
) -> None:
    """It was downloaded first."""
    config = {**LLAMA, "vocab_size": 4000, "hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 2}
    directory = write_checkpoint(tmp_path / "m", config, torch.bfloat16)
    if num_files == 2:
        split_in_two(directory)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    reference = store.put_model(f"planned-{num_files}/m", {**files, "tokenizer.json": bytes(MIB)})
    here, there = (plan(str(model), SERVED, memory=8 * GIB) for model in (directory, reference))
    assert there == replace(here, model=f"planned-{num_files}/m")
    assert 0 < proxy.num_bytes < sum(map(len, files.values())) / 20
    assert not list((tmp_path / "cache").rglob("*"))


@pytest.mark.full
def test_one_gguf_file_in_a_store_is_planned_by_its_header(
    store: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    file = write_tiny_gguf(tmp_path / "q4.gguf", padding=1 << 16)
    reference = store.put_model("quantised", {"q4.gguf": file.read_bytes(), "q8.gguf": b"GGUF", "q4.txt": b"q"})
    here, there = (plan(model, SERVED, memory=8 * GIB) for model in (file, f"{reference}/q4.gguf"))
    assert there == replace(here, model="quantised/q4")
    assert proxy.num_bytes < file.stat().st_size / 10
    with pytest.raises(ModelNotFound, match=r"several models \(q4\.gguf, q8\.gguf\)"):
        plan(reference, SERVED)


def test_cached_model_of_a_store_is_planned_without_it(store: ObjectStore, proxy: FaultProxy, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", tiny_models.LLAMA, torch.float32)
    reference = store.put_model("cached/m", {path.name: path.read_bytes() for path in directory.iterdir()})
    open_checkpoint(reference, progress=False)
    proxy.close()
    assert plan(reference, SERVED).parameters == plan(directory, SERVED).parameters


@pytest.mark.full
def test_problems_of_a_remote_model_are_reported_by_its_address(store: ObjectStore, proxy: FaultProxy) -> None:
    with pytest.raises(ModelNotFound, match=r"There is nothing at \w+://models/nowhere"):
        plan(f"{store.scheme}://models/nowhere", SERVED)
    half = store.put_model("half", {"config.json": json.dumps(tiny_models.LLAMA).encode()})
    with pytest.raises(ModelNotFound, match=f"^{half} holds no weights that Ostro reads"):
        plan(half, SERVED)
    damaged = store.put_model("bad", {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": bytes(99)})
    with pytest.raises(BadCheckpoint, match=f"^{damaged}/model.safetensors is damaged"):
        plan(damaged, SERVED)


def test_broken_connections_do_not_change_a_plan(
    store: ObjectStore, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "FIRST_WAIT_SECONDS", 0.01)
    directory = write_checkpoint(tmp_path / "m", tiny_models.LLAMA, torch.float32)
    reference = store.put_model("flaky/m", {path.name: path.read_bytes() for path in directory.iterdir()})
    for fault in (Fault.TRUNCATED, Fault.RESET, Fault.STATUS_503):
        proxy.fail(fault)
    assert plan(reference, SERVED).parameters == plan(directory, SERVED).parameters
    assert not proxy.faults_left


# --- what fits ------------------------------------------------------------------------------------------------------


@given(
    memory=st.integers(1, 64 * GIB),
    kv_memory=st.none() | st.integers(1 << 20, 8 * GIB),
    page_size=st.sampled_from([1, 16, 64]),
    seqs=st.integers(1, 300),
)
def test_reported_fit_holds(tiny: Path, memory: int, kv_memory: int | None, page_size: int, seqs: int) -> None:
    config = EngineConfig(device="cpu", kv_memory=kv_memory, page_size=page_size, max_batch_seqs=seqs)
    found = plan(tiny, config, memory=memory)
    assert found.total_bytes == found.weights_bytes + found.kv_bytes + found.other_bytes <= found.peak_bytes
    assert found.kv_bytes == found.num_pages * found.page_bytes
    for fit in found.sequences:
        assert fit.sequences <= seqs
        assert fit.sequences * -(-fit.length // page_size) <= found.num_pages
        assert fit.length <= found.max_seq_len
    if kv_memory is None:
        assert found.kv_bytes < 0.4 * memory + found.page_bytes
    if found.fits:
        assert found.sequences[-1].length == found.max_seq_len
        assert found.sequences[-1].sequences > 0


def test_more_memory_never_fits_less(tiny: Path) -> None:
    pages = [plan(tiny, EngineConfig(device="cpu"), memory=mib * MIB).num_pages for mib in (20, 300, 310, 400, 8000)]
    assert pages == sorted(pages)
    assert (pages[0], pages[-1]) == (0, 64 * 256 // 16)


def test_short_memory_takes_no_second_layout(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, {**LLAMA, "num_hidden_layers": 1}, torch.float32)
    ample, short = (plan(directory, ON_TORCH, memory=memory) for memory in (16 * GIB, GIB // 2))
    assert ample.second_layout_bytes > 0.9 * ample.weights_bytes / 2
    assert short.second_layout_bytes == 0
    # While it is loaded the mapped file counts too.
    assert short.peak_bytes > short.total_bytes


@pytest.mark.parametrize(("device", "memory"), [("cpu", 16 * GIB), ("cuda", 80 * GIB)])
def test_keys_and_values_may_be_limited_and_take_less_if_less_is_of_use(
    tiny: Path, device: Device, memory: int
) -> None:
    free, limited, ample = (
        plan(tiny, EngineConfig(kv_memory_limit=limit), memory=memory, device=device) for limit in (None, MIB, 40 * GIB)
    )
    assert limited.kv_bytes <= MIB < free.kv_bytes
    if device == "cpu":
        assert ample.kv_bytes == free.kv_bytes


def test_on_a_gpu_a_steps_rows_of_experts_are_counted(tmp_path: Path) -> None:
    config = {**TINY["qwen3_moe"], "moe_intermediate_size": 96, "hidden_size": 32}
    config |= {"num_experts": 10}
    few, many = (
        plan(
            write_checkpoint(tmp_path / str(chosen), {**config, "num_experts_per_tok": chosen}, torch.float16),
            EngineConfig(device="cuda", max_batch_tokens=4096),
            memory=80 * GIB,
        )
        for chosen in (1, 9)
    )
    # What 8 further experts compute per token: inner rows, and rows of the stream, in 16 bits.
    assert many.other_bytes - few.other_bytes == 4096 * 8 * (96 + 32) * 2


def test_gpu_that_is_not_here(tiny: Path) -> None:
    config = EngineConfig(device="cuda")
    found = plan(tiny, config, memory=141 * GIB)
    assert (found.device, found.page_size, found.max_batch_seqs) == ("cuda", 64, 256)
    assert found.weights_bytes == found.parameters * 2
    assert 0.85 * 141 * GIB < found.total_bytes <= 0.9 * 141 * GIB
    eight = plan(tiny, replace(config, kv_dtype="fp8", quantize="fp8"), memory=141 * GIB)
    assert eight.page_bytes * 2 == found.page_bytes
    assert eight.weights_bytes < found.weights_bytes
    assert not plan(tiny, config, memory=GIB).fits
    assert plan(tiny, replace(config, kv_memory=64 * MIB), memory=80 * GIB).kv_bytes <= 64 * MIB
    tiers = plan(tiny, replace(config, kv_host_memory=32 * GIB), memory=141 * GIB)
    assert tiers.host_bytes - found.host_bytes == 32 * GIB


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(device="cuda"), "no GPU that Ostro could use"),
        (EngineConfig(device="cpu", dtype="bfloat16"), "does not run on a CPU"),
        (EngineConfig(device="cuda", tensor_parallel=2), "2 GPUs that Ostro could use were not found here"),
        (EngineConfig(device="tpu"), "no TPU that Ostro could use"),
        (EngineConfig(device="cpu", quantize="fp8"), "needs a GPU"),
        (EngineConfig(device="cpu", kv_dtype="fp8"), "needs a GPU"),
        (EngineConfig(device="cpu", kv_memory=1), "at least one page"),
        (EngineConfig(device="cpu", max_seq_len=300), "knows only 256 positions"),
    ],
)
def test_plan_refuses_what_loading_would_refuse(
    tiny: Path, config: EngineConfig, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BadRequest, match=message):
        plan(tiny, config)


def test_int8_on_a_gpu_is_refused_by_name(tiny: Path) -> None:
    with pytest.raises(Unsupported, match=r"quantize int8 runs on CPUs only.*use fp8"):
        plan(tiny, EngineConfig(device="cuda", quantize="int8"), memory=GIB)


def test_models_that_cannot_be_served_are_not_planned(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        plan(tmp_path / "nowhere", SERVED)
    write_checkpoint(tmp_path, tiny_models.LLAMA, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({**tiny_models.LLAMA, "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        plan(tmp_path, SERVED)


@pytest.mark.full
def test_no_torch_is_imported(tiny: Path) -> None:
    """The API process plans, and must stay small and quick."""
    code = (
        "import sys; from ostro.backends.planning import plan; from ostro.config import EngineConfig;"
        f"plan({str(tiny)!r}, EngineConfig(device='cpu')); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
