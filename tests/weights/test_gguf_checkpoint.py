"""Tiny random models are written as GGUF by the converters' conventions and must come back as they were."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from dense_context import dense_logits
from family_case import GGUF_DECODER, Array, interleaved
from gguf_cases import CASES, build, save
from gguf_factory import fuse_experts, write_gguf
from native_models import needs_library
from peft_directory import random_adapter
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ostro.backends.loading import load_runner
from ostro.config import BackendName, EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from ostro.models.registry import FAMILIES
from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights, places_of
from ostro.torch_models.lora import Adapters
from ostro.weights import GgufCheckpoint, open_checkpoint
from ostro.weights.adapter import read_adapter

ARCHITECTURES = [arch for family in FAMILIES if family.gguf for arch in family.gguf.architectures]


def logits(model: transformers.PreTrainedModel, length: int) -> torch.Tensor:
    ids = torch.arange(length)[None] * 7 % 96
    with torch.inference_mode():
        output: torch.Tensor = model(ids).logits
    return output


def open_one(path: Path) -> GgufCheckpoint:
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GgufCheckpoint)
    return checkpoint


def test_there_is_a_case_of_each_architecture() -> None:
    assert {case.arch for case in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.family.gguf_rearranged])
def test_weights_come_back_under_their_own_names_exactly(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = build(case.config)
    loaded = dict(open_one(save(tmp_path / "tiny.gguf", case, model)).tensors())
    expected = revert_weight_conversion(model, model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert loaded.keys() == expected.keys()
    for key, tensor in loaded.items():
        # One is added to and taken from Gemma's norms in 32 bits.
        tolerance = 1e-6 if case.arch.startswith("gemma") and "norm" in key else 0
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=tolerance)


def is_of_transformers(name: str) -> bool:
    """Whether the weights that come back are those of transformers' modules, one by one."""
    return "expert_count" not in CASES[name].metadata and not CASES[name].family.gguf_rearranged


@pytest.mark.parametrize("name", [name for name in CASES if is_of_transformers(name)])
def test_a_model_built_from_the_derived_config_computes_the_same_logits(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = build(case.config)
    checkpoint = open_one(save(tmp_path / "tiny.gguf", case, model))
    rebuilt = build(checkpoint.config)
    assert checkpoint.config["architectures"] == [type(rebuilt).__name__] == [type(model).__name__]
    loaded = {name.replace("embed_out.", "lm_head."): tensor for name, tensor in checkpoint.tensors()}
    missing, unexpected = rebuilt.load_state_dict(loaded, strict=False)
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    rebuilt.tie_weights()
    # Longer than every window and every original context, so that each layer's kind and rotation shows.
    torch.testing.assert_close(logits(rebuilt, 100), logits(model, 100), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if not is_of_transformers(name)])
def test_a_model_with_its_weights_rearranged_computes_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    """Its modules stack the matrices of all experts, and know one order of heads, so that ours are loaded instead."""
    case = CASES[name]
    model = build(case.config)
    checkpoint = open_one(save(tmp_path / "tiny.gguf", case, model))
    ours = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(ours, checkpoint.tensors())
    ids, expected = (torch.arange(100) * 7 % 96).tolist(), logits(model, 100)[0]
    # Recurrent layers are computed in blocks there, and token by token here.
    allowed = 2e-5 * expected.abs().max().item() if case.family.recurrent else 1e-4
    torch.testing.assert_close(dense_logits(ours, ids), expected, rtol=1e-4, atol=allowed)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.family.recurrent])
def test_greedy_tokens_of_recurrent_models_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = build(case.config)
    runner = load_runner(
        open_checkpoint(save(tmp_path / "tiny.gguf", case, model)),
        EngineConfig(device="cpu", dtype="float32", kv_memory=4 << 20, backend="torch", threads=1),
    )
    core, prompt = EngineCore(runner), tuple(at * 7 % 96 for at in range(1, 11))
    core.add(Request(id=0, prompt_ids=prompt, params=SamplingParams(max_tokens=64, temperature=0), seed=0))
    ours: list[int] = []
    while core.has_work:
        for gain in core.step():
            ours += gain.token_ids
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )
    assert ours == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.family.recurrent and not case.family.gguf_folded]
)
def test_adapters_made_for_the_hubs_weights_change_the_same(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model, architecture = (
        build(case.config),
        next(each for each in FAMILIES if each.model_type == case.family.model_type).architecture,
    )
    hub = build_model({**case.config, "architectures": [architecture]}, dtype=torch.float32)
    load_weights(hub, revert_weight_conversion(model, model.state_dict()).items())
    checkpoint = open_one(save(tmp_path / "tiny.gguf", case, model))
    ours = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(ours, checkpoint.tensors())
    targets = [each.rpartition(".")[2] for each in case.family.projections]
    directory = random_adapter(tmp_path / "adapter", hub, targets=targets)
    changed = {each.rpartition(".")[2] for each in read_adapter(directory)}
    assert changed == {each for each in targets if any(f".{each}.weight" in key for key in places_of(hub))}
    ids = (torch.arange(40) * 7 % 96).tolist()
    plain, expected = dense_logits(hub, ids), adapted_logits(hub, directory, ids)
    assert (expected - plain).abs().max() > 0.1 * plain.std()
    allowed = 2e-5 * expected.abs().max().item()
    torch.testing.assert_close(adapted_logits(ours, directory, ids), expected, rtol=1e-4, atol=allowed)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_adapters_are_refused_where_a_file_holds_products_of_weights_and_multipliers(
    tmp_path: Path, backend: BackendName
) -> None:
    case = CASES["falcon_h1"]
    checkpoint = open_one(save(tmp_path / "tiny.gguf", case, build(case.config)))
    ours = build_model(checkpoint.config, dtype=torch.float32)
    directory = random_adapter(tmp_path / "adapter", ours, targets=["q_proj"])
    config = EngineConfig(
        device="cpu", kv_memory=4 << 20, backend=backend, threads=1, adapters=(("it", str(directory)),)
    )
    with pytest.raises(UnsupportedModel, match="multiplied by factors that it does not name"):
        load_runner(checkpoint, config)


def test_a_falcon_h1_whose_head_is_its_embedding_is_refused(tmp_path: Path) -> None:
    """Its logits would be larger by a factor that the file does not name."""
    case = CASES["falcon_h1"]
    tied = replace(case, config={**case.config, "tie_word_embeddings": True})
    with pytest.raises(UnsupportedModel, match=r"has no output\.weight"):
        open_checkpoint(save(tmp_path / "tiny.gguf", tied, build(tied.config)))


def test_experts_in_a_space_of_their_own_are_refused(tmp_path: Path) -> None:
    case = CASES["nemotron_h-experts"]
    latent = replace(case, metadata={**case.metadata, "moe_latent_size": 16})
    checkpoint = open_one(save(tmp_path / "tiny.gguf", latent, build(case.config)))
    with pytest.raises(UnsupportedModel, match="'moe_latent_size' is 16"):
        build_model(checkpoint.config, dtype=torch.float32)


def test_a_block_without_any_known_part_is_named(tmp_path: Path) -> None:
    changes = {f"nemotron_h.{key}": value for key, value in CASES["nemotron_h"].metadata.items()}
    with pytest.raises(BadCheckpoint, match="block 0 has none of the tensors ssm_in, attn_q, ffn_gate_inp, ffn_up"):
        open_checkpoint(small(tmp_path / "m.gguf", "nemotron_h", changes=changes))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "mixtral"])
def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path, name: str, kind: str) -> None:
    """As `--fuse-gate-up-exps` of llama.cpp's converter writes them."""
    case, quantize = CASES[name], None if kind == "F32" else gguf.GGMLQuantizationType[kind]
    model = build(case.config)
    apart = open_one(save(tmp_path / "apart.gguf", case, model, quantize))
    fused = open_one(fuse_experts(apart.path, tmp_path / "fused.gguf"))
    expected, given = dict(apart.tensors()), dict(fused.tensors())
    assert given.keys() == expected.keys()
    for key, tensor in given.items():
        assert torch.equal(tensor, expected[key])
    arrays = dict(fused.arrays())
    for key, array in apart.arrays():
        np.testing.assert_array_equal(arrays[key].floats(), array.floats())


def test_gates_and_ups_of_an_odd_number_of_rows_are_refused(tmp_path: Path) -> None:
    changes: dict[str, object] = {"llama.expert_count": 4, "llama.expert_used_count": 2}
    path = small(tmp_path / "m.gguf", changes=changes, extra="blk.0.ffn_gate_up_exps.weight", shape=(4, 3, 64))
    with pytest.raises(BadCheckpoint, match=r"'blk\.0\.ffn_gate_up_exps\.weight' has 3 rows for each expert"):
        open_checkpoint(path)


def adapted_logits(model: Model, directory: Path, ids: list[int]) -> torch.Tensor:
    adapters = Adapters(model, {"it": read_adapter(directory)})
    adapters.attach(model)
    assert adapters.begin([(adapters.slot("it"), len(ids))])
    return dense_logits(model, ids)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.family.recurrent])
def test_arrays_hold_the_numbers_of_tensors(tmp_path: Path, name: str, kind: str) -> None:
    case, quantize = CASES[name], None if kind == "F32" else gguf.GGMLQuantizationType[kind]
    checkpoint = open_one(save(tmp_path / "tiny.gguf", case, build(case.config), quantize))
    arrays, tensors = dict(checkpoint.arrays()), dict(checkpoint.tensors())
    assert arrays.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert arrays[key].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(arrays[key].floats(), tensor.float().numpy())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.family.recurrent])
def test_projections_of_recurrent_models_may_be_quantised(tmp_path: Path, name: str, kind: str) -> None:
    case, quantize = CASES[name], gguf.GGMLQuantizationType[kind]
    model = build(case.config)
    expected = dict(open_one(save(tmp_path / "whole.gguf", case, model)).tensors())
    packed = open_one(save(tmp_path / "packed.gguf", case, model, quantize))
    kinds = {weight.name: weight.info.ggml_type for weight in packed.weights}
    assert quantize in {kind for name, kind in kinds.items() if ".layers." in name}
    for key, tensor in packed.tensors():
        if kinds[key] == quantize:
            unpacked = gguf.dequantize(gguf.quants.quantize(expected[key].numpy(), quantize), quantize)
            np.testing.assert_array_equal(tensor.numpy(), unpacked)
    assert scores(packed.path, "torch").isfinite().all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "gpt2"])
def test_quantised_weights_equal_those_that_transformers_unpacks(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = build(case.config)
    path = save(tmp_path / "tiny.gguf", case, model, gguf.GGMLQuantizationType.Q4_1)
    reference = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    loaded = dict(open_one(path).tensors())
    shared = loaded.keys() & reference.keys()
    assert len(shared) >= len(loaded) - 1
    for key in shared:
        torch.testing.assert_close(loaded[key], reference[key].to(loaded[key].dtype), rtol=0, atol=0)


@needs_library
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.family.torch_only])
def test_the_native_core_gives_the_scores_of_torch(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a converter has done to the tensors. In 8 bits activations are rounded, too."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    case, quantize = CASES[name], None if kind == "F32" else gguf.GGMLQuantizationType[kind]
    path = save(tmp_path / "tiny.gguf", case, build(case.config), quantize)
    expected, given = scores(path, "torch"), scores(path, "native")
    assert expected.std() > 0.3, "the test would not see a difference"
    if kind == "F32":
        torch.testing.assert_close(given, expected, atol=2e-3, rtol=0)
    else:
        assert (given - expected).abs().mean() < 0.1 * expected.std()


def scores(path: Path, backend: BackendName) -> torch.Tensor:
    """Log-probabilities of a prompt."""
    runner = load_runner(
        open_checkpoint(path), EngineConfig(device="cpu", kv_memory=4 << 20, backend=backend, threads=1)
    )
    core = EngineCore(runner)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompt = tuple(at * 7 % 96 for at in range(40))
    core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1))
    found: list[float] = []
    while core.has_work:
        for gain in core.step():
            found += [each.logprob for each in gain.prompt_logprobs]
    return torch.tensor(found)


UNPACKED = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "TQ1_0", "MXFP4"),
]


def write_one_matrix(path: Path, kind: gguf.GGMLQuantizationType, raw: Array) -> Path:
    """A Llama whose embedding is these packed blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in GGUF_DECODER.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", UNPACKED)
def test_every_packed_type_unpacks_as_in_the_reference(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Over a million values, so that more than one chunk is unpacked, the last of them short.
    raw = np.random.default_rng(0).integers(0, 256, (4200, 256 // block * size), dtype=np.uint8)
    # No infinite or undefined scales: halves of moderate exponent wherever one may lie.
    raw &= 0x3B
    path = write_one_matrix(tmp_path / "one.gguf", kind, raw)
    ((_, tensor),) = open_one(path).tensors()
    assert tensor.dtype == torch.float32
    np.testing.assert_array_equal(tensor.numpy(), gguf.dequantize(raw, kind))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)],
)
def test_floats_keep_the_type_they_are_stored_in(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    values = torch.randn(96, 64).to(dtype)
    raw = values.view(torch.uint8).numpy()
    path = write_one_matrix(tmp_path / "one.gguf", gguf.GGMLQuantizationType[kind], raw)
    ((name, tensor),) = open_one(path).tensors()
    assert name == "model.embed_tokens.weight"
    assert torch.equal(tensor, values)
    assert tensor.dtype == dtype


def test_the_raw_blocks_are_what_the_file_stores(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = np.random.default_rng(0).integers(0, 100, (96, 68), dtype=np.uint8)
    checkpoint = open_one(write_one_matrix(tmp_path / "one.gguf", kind, raw))
    ((_, array),) = checkpoint.arrays()
    assert (array.format, array.shape) == ("Q8_0", (96, 64))
    np.testing.assert_array_equal(array.stored().raw, raw)


def test_mxfp4_is_kept_as_stored(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.MXFP4
    raw = np.random.default_rng(0).integers(0, 256, (96, 34), dtype=np.uint8)
    raw[:, ::17] %= 252
    checkpoint = open_one(write_one_matrix(tmp_path / "one.gguf", kind, raw))
    ((_, array),) = checkpoint.arrays()
    assert [each.format for each in checkpoint.stored().tensors] == [array.format] == ["MXFP4"]
    expected = gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(array.floats(), expected)
    np.testing.assert_array_equal(array.stored().raw, raw)


def test_an_mxfp4_exponent_that_is_nan_is_refused_by_name(tmp_path: Path) -> None:
    raw = np.full((96, 34), 100, np.uint8)
    raw[-1, 17] = 255
    ((_, array),) = open_one(write_one_matrix(tmp_path / "one.gguf", gguf.GGMLQuantizationType.MXFP4, raw)).arrays()
    with pytest.raises(BadCheckpoint, match=r"'token_embd\.weight' holds NaN"):
        array.stored()


@needs_library
def test_gpt_oss_with_experts_in_mxfp4_runs_natively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    case = CASES["gpt_oss"]
    path = save(tmp_path / "tiny.gguf", case, build(case.config), gguf.GGMLQuantizationType.MXFP4)
    expected, given = scores(path, "torch"), scores(path, "native")
    assert (given - expected).abs().mean() < 0.1 * expected.std()


def test_a_type_that_cannot_be_unpacked_is_named_with_its_tensor(tmp_path: Path) -> None:
    raw = np.zeros((96, 64), dtype=np.int8)
    path = write_one_matrix(tmp_path / "one.gguf", gguf.GGMLQuantizationType.I8, raw)
    with pytest.raises(UnsupportedModel, match=r"'token_embd\.weight' .* type I8"):
        list(open_one(path).tensors())


def test_interleaving_in_the_factory_is_what_the_rotation_needs() -> None:
    """Guards the test's own converter: rows 0 1 2 3 of a head must be stored as 0 2 1 3."""
    np.testing.assert_array_equal(interleaved(np.arange(8), heads=2), [0, 2, 1, 3, 4, 6, 5, 7])


def test_stopping_early_ends_the_unpacking_threads(tmp_path: Path) -> None:
    case = CASES["llama"]
    tensors = open_one(save(tmp_path / "tiny.gguf", case, build(case.config))).tensors()
    next(tensors)
    assert hasattr(tensors, "close")
    tensors.close()
    assert list(tensors) == []


def split(path: Path, parts: int) -> list[Path]:
    """The file's tensors spread over several files, as llama.cpp's splitter names and marks them."""
    reader = gguf.GGUFReader(path)
    shards = []
    for number in range(parts):
        shard = path.with_name(f"tiny-{number + 1:05}-of-{parts:05}.gguf")
        writer = gguf.GGUFWriter(shard, "llama")
        if number == 0:
            for key, value in CASES["llama"].metadata.items():
                (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        for tensor in reader.tensors[number::parts]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        shards.append(shard)
    return shards


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    case = CASES["llama"]
    (tmp_path / "whole").mkdir()
    return save(tmp_path / "whole" / "tiny.gguf", case, build(case.config))


@pytest.mark.parametrize("named", [0, 2])
def test_a_split_model_opens_by_any_of_its_files(whole: Path, named: int) -> None:
    shards = split(whole, 3)
    checkpoint = open_one(shards[named])
    assert checkpoint.files == shards
    loaded = dict(checkpoint.tensors())
    expected = dict(open_one(whole).tensors())
    assert checkpoint.name == "tiny"
    assert checkpoint.tokenizer_path == shards[0]
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_a_split_model_with_a_missing_file_says_which(whole: Path) -> None:
    shards = split(whole, 3)
    shards[1].unlink()
    with pytest.raises(ModelNotFound, match=r"tiny-00002-of-00003\.gguf is missing"):
        open_checkpoint(shards[0])


def test_a_renamed_part_of_a_split_model_is_refused(whole: Path) -> None:
    shards = split(whole, 3)
    part = shards[0].rename(whole.with_name("renamed.gguf"))
    with pytest.raises(BadCheckpoint, match="one of 3 files"):
        open_checkpoint(part)


def test_a_directory_with_one_gguf_opens_and_with_two_asks_which(whole: Path) -> None:
    assert open_one(whole.parent).path == whole
    whole.with_name("other.gguf").write_bytes(whole.read_bytes())
    with pytest.raises(ModelNotFound, match=r"several models \(other\.gguf, tiny\.gguf\)"):
        open_checkpoint(whole.parent)


def small(
    path: Path,
    arch: str = "llama",
    *,
    changes: dict[str, object] | None = None,
    extra: str = "",
    shape: tuple[int, ...] = (4,),
) -> Path:
    """A file with an embedding and metadata only. A change to None leaves the key out; `extra` names a tensor more."""
    metadata = {f"{arch}.{key}": value for key, value in GGUF_DECODER.items()} | (changes or {})
    tensors: dict[str, Array] = {"token_embd.weight": np.zeros((96, 64), np.float32)}
    if extra:
        tensors[extra] = np.zeros(shape, np.float32)
    return write_gguf(path, arch, {key: value for key, value in metadata.items() if value is not None}, tensors)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    known = ", ".join(sorted(ARCHITECTURES))
    with pytest.raises(UnsupportedModel, match=f"'mamba' model; .* {known}"):
        open_checkpoint(small(tmp_path / "m.gguf", "mamba"))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'blk\.0\.odd\.weight', which Ostro does not know for llama"):
        open_checkpoint(small(tmp_path / "m.gguf", extra="blk.0.odd.weight"))


def test_a_block_number_of_thousands_of_digits_is_an_unknown_tensor(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="which Ostro does not know for llama"):
        open_checkpoint(small(tmp_path / "m.gguf", extra=f"blk.{'9' * 5000}.attn_q.weight"))


def test_a_mixture_of_experts_in_a_family_without_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        open_checkpoint(small(tmp_path / "m.gguf", "qwen3", changes={"qwen3.expert_count": 8}))


@pytest.mark.parametrize("shape", [(4, 64), (4, 96, 64, 2), (5000, 1, 32)])
def test_experts_that_are_not_a_stack_of_matrices_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    changes: dict[str, object] = {"llama.expert_count": 4, "llama.expert_used_count": 2}
    path = small(tmp_path / "m.gguf", changes=changes, extra="blk.0.ffn_up_exps.weight", shape=shape)
    with pytest.raises(BadCheckpoint, match=r"'blk\.0\.ffn_up_exps\.weight' has shape"):
        open_checkpoint(path)


def test_head_counts_that_differ_between_layers_are_refused(tmp_path: Path) -> None:
    same = small(tmp_path / "same.gguf", changes={"llama.attention.head_count_kv": [2, 2, 2]})
    assert open_one(same).config["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedModel, match=r"varies attention\.head_count_kv"):
        open_checkpoint(small(tmp_path / "varied.gguf", changes={"llama.attention.head_count_kv": [2, 4, 2]}))


def test_layers_without_attention_are_refused_where_they_keep_no_state(tmp_path: Path) -> None:
    changes: dict[str, object] = {"qwen3.attention.head_count_kv": [2, 0, 2]}
    with pytest.raises(UnsupportedModel, match="layers without attention, which Ostro does not support for qwen3"):
        open_checkpoint(small(tmp_path / "m.gguf", "qwen3", changes=changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lfm2.attention.head_count_kv": [0, 2]}, "KV heads of 2 layers, but has 3"),
        ({"lfm2.attention.head_count_kv": [0, -2, 0]}, "whole numbers as attention.head_count_kv"),
        ({"lfm2.nextn_predict_layers": 3}, "of its 3 blocks, 3 would guess tokens ahead"),
    ],
)
def test_senseless_layers_are_named(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadCheckpoint, match=said):
        open_checkpoint(small(tmp_path / "m.gguf", "lfm2", changes={"lfm2.shortconv.l_cache": 3, **changes}))


@pytest.mark.parametrize("rate", [0.5, 0.0, float("nan")])
def test_a_decay_that_would_not_decay_is_named(tmp_path: Path, rate: float) -> None:
    case = CASES["qwen3_5"]
    model = build(case.config)
    converted = replace(case, converted=lambda name, array: decay_of(rate, name, case.converted(name, array)))
    checkpoint = open_one(save(tmp_path / "m.gguf", converted, model))
    with pytest.raises(BadCheckpoint, match=r"layers\.0\.linear_attn\.A_log"):
        load_weights(build_model(checkpoint.config, dtype=torch.float32), checkpoint.tensors())


def decay_of(rate: float, name: str, made: Array | Mapping[str, Array]) -> Array | Mapping[str, Array]:
    return made if isinstance(made, Mapping) or "A_log" not in name else np.full_like(made, rate)


@pytest.mark.parametrize(("key", "value"), [("block_count", None), ("block_count", "three"), ("context_length", 1.5)])
def test_missing_or_senseless_metadata_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(BadCheckpoint, match=rf"m\.gguf should give .* as {key}"):
        open_checkpoint(small(tmp_path / "m.gguf", changes={f"llama.{key}": value}))


def test_a_file_without_an_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    with pytest.raises(BadCheckpoint, match=r"a text as general\.architecture"):
        open_checkpoint(path)


def test_decimal_metadata_reads_as_its_authors_wrote_it(tmp_path: Path) -> None:
    assert open_one(small(tmp_path / "m.gguf")).config["rms_norm_eps"] == 1e-5


def test_a_chat_model_also_stops_at_the_ends_of_turns_in_its_template(tmp_path: Path) -> None:
    tokens = [f"t{number}" for number in range(90)] + ["<|end|>", "<|im_end|>", "<|endoftext|>"]
    ids: dict[str, object] = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 92,
        "tokenizer.ggml.tokens": tokens,
    }
    chat = small(tmp_path / "chat.gguf", changes=ids | {"tokenizer.chat_template": "{{ m }}<|end|>"})
    base = small(tmp_path / "base.gguf", changes=ids)
    assert open_one(chat).generation_config == {"bos_token_id": 1, "eos_token_id": [92, 90]}
    assert open_one(base).generation_config == {"bos_token_id": 1, "eos_token_id": 92}


def test_the_end_of_a_message_does_not_end_a_turn_of_several(tmp_path: Path) -> None:
    """As of gpt-oss, whose reasoning is a message of its own."""
    tokens = [f"t{number}" for number in range(90)] + ["<|end|>", "<|return|>", "<|call|>"]
    template = "{{ m }}<|end|>{{ m }}<|call|>{{ m }}<|return|>"
    metadata: dict[str, object] = {"tokenizer.ggml.tokens": tokens, "tokenizer.chat_template": template}
    chat = small(tmp_path / "chat.gguf", changes=metadata | {"tokenizer.ggml.eos_token_id": 91})
    assert open_one(chat).generation_config["eos_token_id"] == [91, 92]


def test_recommended_sampling_reads_as_generation_config_has_it(tmp_path: Path) -> None:
    asked: dict[str, object] = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    path = small(tmp_path / "m.gguf", changes={f"general.sampling.{name}": value for name, value in asked.items()})
    config = open_one(path).generation_config
    assert SamplingDefaults.read(config, source="m") == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1
    )


@pytest.mark.parametrize(("kind", "mode"), [(1, "mean"), (2, "cls"), (3, "lasttoken")])
def test_an_embedding_model_says_how_it_pools(tmp_path: Path, kind: int, mode: str) -> None:
    pooling = open_one(small(tmp_path / "m.gguf", changes={"llama.pooling_type": kind})).pooling
    assert pooling is not None
    assert (pooling.mode, pooling.normalize) == (mode, True)
    assert open_one(small(tmp_path / "plain.gguf")).pooling is None
