"""Quantised checkpoints on a GPU: what stays small, what it means, and what a runner makes of it."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from dense_context import dense_logits
from native_models import ModelCheckpoint, savable_model
from peft_directory import random_adapter
from quantized_packers import FORMATS, write_quantized
from torch import Tensor
from triton_device import DEVICE

from ostro.backends.cuda.projections import Fp8Linear, PackedLinear
from ostro.backends.cuda.quantized_loading import load_quantized
from ostro.backends.cuda.quantized_weights import kept_weights
from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.planning import plan
from ostro.backends.torch.devices import weight_formats
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner
from ostro.errors import BadCheckpoint
from ostro.kernels.gpu.fp8 import widened as widened_fp8
from ostro.kernels.gpu.packed_words import widened
from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models.build import build_model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.layers import Linear, Projection
from ostro.torch_models.loading import load_weights
from ostro.torch_models.lora import Adapters
from ostro.weights import open_checkpoint
from ostro.weights.adapter import read_adapter

CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# The interpreter takes its time.
SMALL = {**CONFIG, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"head_dim": 32}
ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
ON_A_GPU = EngineConfig(device="cuda", kv_memory=4 << 20)
WIDENED = ("pack-quantized-order", "gptq-order", "nf4", "nf4-nested")
# Scales that are not float16 numbers are rounded to it, and blocks of 8-bit floats to one scale per output.
ROUNDED = {"fp8-block": 0.07}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return dict(ModelCheckpoint(savable_model(CONFIG), CONFIG).tensors())


def loaded(path: Path, dtype: torch.dtype = DTYPE, device: torch.device = DEVICE) -> Decoder:
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config, dtype=dtype, device=torch.device("meta"))
    assert isinstance(model, Decoder)
    load_quantized(model, checkpoint, dtype, device)
    return model


def twin_of(tensors: Mapping[str, Tensor], config: Mapping[str, object] = CONFIG) -> Decoder:
    model = build_model(config, dtype=torch.float32)
    load_weights(model, tensors.items())
    assert isinstance(model, Decoder)
    return model


def projections(model: Decoder) -> dict[str, Linear]:
    layers = (module for layer in model.layers for module in (layer.mixer, layer.mlp) if module is not None)
    return {name: child for each in layers for name, child in each.named_children() if isinstance(child, Linear)}


def meant(linear: Linear) -> Tensor:
    """The weight in float32."""
    if isinstance(linear, PackedLinear):
        return widened(linear.packed_weight).cpu()
    if isinstance(linear, Fp8Linear):
        return widened_fp8(linear.weight, linear.scale).cpu()
    return linear.weight.float().cpu()


def scores(runner: ModelRunner, prompt: tuple[int, ...]) -> list[float]:
    core = EngineCore(runner)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=0, prompt_logprobs=0)
    core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1))
    found: list[float] = []
    while core.has_work:
        for gain in core.step():
            assert gain.error is None
            found += [each.logprob for each in gain.prompt_logprobs + gain.logprobs]
    return found


@pytest.mark.cases(9)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_means_on_the_gpu_what_the_file_means(
    name: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    twin = projections(twin_of(write_quantized(tmp_path, CONFIG, weights, FORMATS[name])))
    found = projections(loaded(tmp_path, torch.float32))
    expected = Linear if name in WIDENED else Fp8Linear if name.startswith(("fp8", "float")) else PackedLinear
    for path, linear in found.items():
        assert isinstance(linear, expected), path
        assert isinstance(linear, Projection) == (name in WIDENED)
        plain = twin[path].weight
        near = ROUNDED.get(name, 2**-10) * plain.abs().amax(1, keepdim=True)
        assert ((meant(linear) - plain).abs() <= near).all(), path


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "length"),
    [
        *(("gptq-zeros", 5), ("fp8-row", 1)),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("gptq-one-group", 1), ("int-quantized", 5), ("fp8-row", 5))
        ),
    ],
)
def test_scores_are_those_of_the_dequantised_twin(name: str, length: int, tmp_path: Path) -> None:
    tensors = dict(ModelCheckpoint(savable_model(SMALL), SMALL).tensors())
    twin = twin_of(write_quantized(tmp_path, SMALL, tensors, FORMATS[name]), SMALL)
    prompt = tuple(range(3, 3 + length))
    expected = scores(TorchRunner(twin, page_size=16, num_pages=8), prompt)
    runner = GpuRunner(loaded(tmp_path), page_size=16, num_pages=8, max_batch_tokens=32, max_batch_seqs=2)
    assert runner.spec.precision.startswith({"gptq": "int4", "int": "int8", "fp8": "fp8"}[name.split("-")[0]])
    near = 0.01
    if ON_GPU and name.startswith("fp8") and length > 1:
        # The inputs of several rows are rounded to 8 bits, too.
        near = 1.0
    elif ON_GPU:
        # In bfloat16, what its rounding does to the twin.
        rounded = scores(TorchRunner(twin.bfloat16(), page_size=16, num_pages=8), prompt)
        near = 0.1 + 2 * max(abs(ours - theirs) for ours, theirs in zip(rounded, expected, strict=True))
    assert scores(runner, prompt) == pytest.approx(expected, abs=near)


METADATA: Mapping[str, object] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 64,
    "llama.attention.value_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
MATRICES = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256, "ffn_gate": 256, "ffn_up": 256}
# Where a block has its float16 numbers.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,)}


def blocks(kind: str, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Any bytes are codes of some weight, but for the factors."""
    draw = np.random.default_rng(rows)
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = draw.integers(0, 256, (rows * columns // size, width), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        raw[:, at : at + 2] = draw.normal(0, 0.002, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def write_blocks(path: Path, kinds: Mapping[str, str], *, stacked: str | None = None) -> Path:
    """A model of one layer with these types of matrices. One that is `stacked` has a third dimension."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in METADATA.items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, int(str(value)))
    ones, embedding = np.ones(256, np.float32), np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, ones)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, embedding)
    for name, rows in {**MATRICES, "ffn_down": 256}.items():
        kind = kinds.get(name, kinds[""])
        raw = blocks(kind, rows, 256)[None] if name == stacked else blocks(kind, rows, 256)
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "bits", "group"),
    [
        ("Q4_0", 4, 32),
        ("Q4_1", 4, 32),
        ("Q4_K", 4, 32),
        ("Q5_0", 8, 32),
        ("Q5_1", 8, 32),
        ("Q5_K", 8, 32),
        ("Q6_K", 8, 16),
        ("Q8_0", 8, 32),
    ],
)
def test_gguf_blocks_stay_packed(kind: str, bits: int, group: int, tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "model.gguf", {"": kind})
    twin = projections(twin_of(dict(open_checkpoint(path).tensors())))
    for name, linear in projections(loaded(path, torch.float32)).items():
        assert isinstance(linear, PackedLinear)
        assert (linear.packed_weight.bits, linear.packed_weight.group) == (bits, group)
        plain = twin[name].weight
        assert ((meant(linear) - plain).abs() <= 2**-10 * plain.abs().max()).all()


def test_parts_of_different_types_get_a_form_that_holds_both(tmp_path: Path) -> None:
    """As in files of the kind Q4_K_M, whose values have more bits than queries and keys."""
    path = write_blocks(tmp_path / "model.gguf", {"": "Q4_K", "attn_v": "Q6_K", "ffn_up": "Q4_0", "ffn_down": "Q3_K"})
    found, twin = projections(loaded(path, torch.float32)), projections(twin_of(dict(open_checkpoint(path).tensors())))
    forms = {
        name: linear.packed_weight[2:] if isinstance(linear, PackedLinear) else None for name, linear in found.items()
    }
    assert forms == {
        "qkv_proj": (8, 16, True),
        "o_proj": (4, 32, True),
        "gate_up_proj": (4, 32, True),
        "down_proj": None,
    }
    for name, linear in found.items():
        plain = twin[name].weight
        assert ((meant(linear) - plain).abs() <= 2**-10 * plain.abs().max()).all()


@pytest.mark.parametrize("name", ["gptq", "awq", "int-quantized", "fp8-block", "gptq-one-group", "nf4"])
def test_plans_count_what_is_loaded(name: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    write_quantized(tmp_path, CONFIG, weights, FORMATS[name])
    check_plan(tmp_path)


def test_plans_count_parts_of_different_types_as_they_are_joined(tmp_path: Path) -> None:
    check_plan(write_blocks(tmp_path / "model.gguf", {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q3_K"}))


def test_blocks_that_are_not_a_matrix_are_planned_as_widened(tmp_path: Path) -> None:
    """Their number of dimensions was not looked at, and planning crashed."""
    kept, widened = (
        plan(write_blocks(tmp_path / f"{stacked}.gguf", {"": "Q4_0"}, stacked=stacked), ON_A_GPU, memory=1 << 30)
        for stacked in (None, "ffn_down")
    )
    assert widened.weights_bytes - kept.weights_bytes == 256 * 256 * 2 - 256 * (128 + 256 // 32 * 4)


def check_plan(path: Path) -> None:
    model = loaded(path, torch.bfloat16)
    found = plan(path, ON_A_GPU, memory=1 << 30)
    held = [*model.parameters(), *(each for name, each in model.named_buffers() if "frequencies" not in name)]
    assert found.weights_bytes == sum(each.nbytes for each in held)
    assert found.precision.startswith(f"{' and '.join(weight_formats(model))} weights")


@pytest.mark.parametrize(
    "settings", [{"deterministic": True}, {"tensor_parallel": 2}, {"quantize": "fp8"}, {"dtype": "float32"}]
)
def test_settings_whose_kernels_need_other_weights_widen_them(
    settings: Mapping[str, object], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    write_quantized(tmp_path, CONFIG, weights, FORMATS["gptq"])
    config = EngineConfig(device="cuda", kv_memory=4 << 20, **settings)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(tmp_path)
    described = describe(checkpoint.config)
    assert isinstance(described, Architecture)
    assert not kept_weights(checkpoint.stored(), described, config)
    found = plan(tmp_path, config, memory=1 << 30)
    assert found.stored_as == "GPTQ, 4 bits in groups of 32; widened"
    plain = plan(tmp_path, ON_A_GPU, memory=1 << 30)
    assert plain.stored_as == "GPTQ, 4 bits in groups of 32; kept as int4 in groups of 32"


@pytest.mark.parametrize("name", ["gptq", "fp8-row"])
def test_adapters_add_to_quantised_projections(name: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    twin = twin_of(write_quantized(tmp_path / "base", CONFIG, weights, FORMATS[name]))
    directory = random_adapter(tmp_path / "adapter", twin)
    ours = loaded(tmp_path / "base", torch.float32, torch.device("cpu"))
    expected, found = (adapted_logits(model, directory) for model in (twin, ours))
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def adapted_logits(model: Decoder, directory: Path) -> Tensor:
    """By the model's own `forward`, which is the plain twin of the fused kernels."""
    adapters = Adapters(model, {"it": read_adapter(directory)})
    adapters.attach(model)
    ids = [3, 1, 4]
    adapters.begin([(adapters.slot("it"), len(ids))])
    return dense_logits(model, ids)


def test_scales_beyond_float16_are_widened(weights: dict[str, Tensor], tmp_path: Path) -> None:
    large = {name: tensor * 1e9 if "down_proj" in name else tensor for name, tensor in weights.items()}
    twin = projections(twin_of(write_quantized(tmp_path, CONFIG, large, FORMATS["pack-quantized"])))
    found = projections(loaded(tmp_path, torch.float32))
    assert isinstance(found["o_proj"], PackedLinear)
    assert isinstance(found["down_proj"], Projection)
    assert torch.equal(meant(found["down_proj"]), twin["down_proj"].weight)


def test_missing_or_misshapen_tensors_are_named(weights: dict[str, Tensor], tmp_path: Path) -> None:
    some = {name: tensor for name, tensor in weights.items() if "k_proj" not in name}
    write_quantized(tmp_path / "a", CONFIG, some, FORMATS["gptq"])
    with pytest.raises(BadCheckpoint, match=r"lacks 1 tensors.*k_proj"):
        loaded(tmp_path / "a")
    wrong = {name: tensor[:64] if "k_proj" in name else tensor for name, tensor in weights.items()}
    write_quantized(tmp_path / "b", CONFIG, wrong, FORMATS["gptq"])
    with pytest.raises(BadCheckpoint, match=r"k_proj.*\(64, 256\).*\(128, 256\)"):
        loaded(tmp_path / "b")
