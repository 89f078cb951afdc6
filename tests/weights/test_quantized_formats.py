"""Quantised checkpoints: what each format's tensors are decoded and repacked as, and what is refused."""

import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_packers import (
    FORMATS,
    Format,
    Tensors,
    awq,
    float8,
    gptq,
    int_quantized,
    mxfp4,
    nf4,
    pack_quantized,
    words,
    write_quantized,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostro.backends.planning import plan
from ostro.config import EngineConfig
from ostro.errors import BadCheckpoint, ModelError, UnsupportedModel
from ostro.weights import Checkpoint, open_checkpoint
from ostro.weights.arrays import Weight
from ostro.weights.quantized import read_scheme
from ostro.weights.quantized.blocks import DoesNotFit
from ostro.weights.quantized.parts import unpacked
from ostro.weights.quantized.weight import QuantizedWeight

CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MODULE = "model.layers.0.mlp.up_proj."
UP = f"{MODULE}weight"
SINGLE = "model.safetensors"


def matrix(rows: int = 96, columns: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1


def written(
    directory: Path, format: Format, weight: Tensor | None = None, *, num_files: int = 1
) -> tuple[Checkpoint, Tensor]:
    """A checkpoint of one quantised matrix and a norm; and the matrix's twin."""
    tensors = {UP: matrix() if weight is None else weight, "model.norm.weight": torch.ones(64)}
    twin = write_quantized(directory, CONFIG, tensors, format, num_files=num_files)
    return open_checkpoint(directory), twin[UP]


def found(checkpoint: Checkpoint) -> Weight:
    return dict(checkpoint.arrays())[UP]


# --- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_decoded_to_its_twin(name: str, tmp_path: Path) -> None:
    checkpoint, twin = written(tmp_path, FORMATS[name])
    assert {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors()} == {
        UP: (96, 64),
        "model.norm.weight": (64,),
    }
    assert torch.equal(dict(checkpoint.tensors())[UP], twin)
    assert np.array_equal(found(checkpoint).floats(), twin.numpy())
    parts = (slice(8, 40), slice(32, 64))
    sliced = {name: weight.read(parts) for name, weight in checkpoint.slices() if name == UP}
    assert np.array_equal(sliced[UP], twin[parts].numpy())


@pytest.mark.parametrize("name", ["fp8-block", "pack-quantized-zeros", "gptq", "awq", "nf4-nested"])
def test_a_modules_tensors_may_be_in_several_files(name: str, tmp_path: Path) -> None:
    checkpoint, twin = written(tmp_path, FORMATS[name], num_files=3)
    assert torch.equal(dict(checkpoint.tensors())[UP], twin)


@pytest.mark.parametrize("name", FORMATS)
def test_headers_tell_what_the_weight_becomes(name: str, tmp_path: Path) -> None:
    checkpoint, twin = written(tmp_path, FORMATS[name])
    stored = checkpoint.stored()
    header = next(tensor for tensor in stored.tensors if tensor.name == UP)
    weight = found(checkpoint)
    assert isinstance(weight, QuantizedWeight)
    assert (header.shape, header.format, header.repacked) == (twin.shape, FORMATS[name].native, weight.packing.how)
    assert (weight.shape, weight.format) == (header.shape, header.format)
    assert stored.quantization is not None


@pytest.mark.parametrize("name", FORMATS)
def test_repacked_weights_are_exact_or_within_half_a_step(name: str, tmp_path: Path) -> None:
    checkpoint, twin = written(tmp_path, FORMATS[name])
    repacked = torch.from_numpy(found(checkpoint).stored().floats())
    if FORMATS[name].exactly:
        assert torch.equal(repacked, twin)
        return
    steps = twin.reshape(-1, 32).abs().amax(1, keepdim=True) / 127
    # Scales are rounded to float16 besides.
    assert ((repacked - twin).reshape(-1, 32).abs() <= steps * 0.56).all()


@pytest.mark.parametrize(
    ("group", "symmetric", "native", "exactly"),
    [(64, True, "Q4_0", True), (128, True, "Q4_0", True), (64, False, "Q4_1", False), (16, True, "Q8_0", False)],
    ids=["64", "last group smaller", "zero points", "smaller than blocks"],
)
def test_groups_of_other_sizes_are_repacked(
    group: int, symmetric: bool, native: str, exactly: bool, tmp_path: Path
) -> None:
    config = {**FORMATS["gptq"].config, "group_size": group, "sym": symmetric}
    format = Format(config, lambda weight: gptq(weight, group=group, symmetric=symmetric), native)
    checkpoint, twin = written(tmp_path, format, matrix(96, 192))
    weight = found(checkpoint)
    assert weight.format == native
    assert np.array_equal(weight.floats(), twin.numpy())
    off = np.abs(weight.stored().floats() - twin.numpy()).max()
    assert off == 0 if exactly else off < 0.56 / 127 * twin.abs().max().item()


def test_rows_that_are_not_whole_blocks_are_widened(tmp_path: Path) -> None:
    format = Format(FORMATS["gptq"].config, lambda weight: gptq(weight, group=24), "F32")
    checkpoint, twin = written(tmp_path, format, matrix(96, 48))
    weight = found(checkpoint)
    assert weight.format == "F32"
    assert np.array_equal(weight.stored().floats(), twin.numpy())


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def experts(directory: Path, tensors: Tensors) -> Checkpoint:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}))
    save_file({f"{EXPERTS}_{part}": tensor for part, tensor in tensors.items()}, directory / SINGLE)
    return open_checkpoint(directory)


def test_experts_in_mxfp4_are_decoded_as_stacks(tmp_path: Path) -> None:
    tensors, twin = mxfp4(torch.randn(3, 64, 40, generator=torch.Generator().manual_seed(0)))
    bias = torch.ones(3, 40)
    checkpoint = experts(tmp_path, {**tensors, "bias": bias})
    decoded = dict(checkpoint.tensors())
    assert torch.equal(decoded[EXPERTS], twin)
    assert torch.equal(decoded[f"{EXPERTS}_bias"], bias)
    repacked = dict(checkpoint.arrays())[EXPERTS].stored()
    assert repacked.format == "MXFP4"
    assert np.array_equal(repacked.floats(), twin.numpy())


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("scales", lambda each: each[:, :-1], "scales' has shape"),
        ("scales", Tensor.float, "scales' holds F32"),
        ("blocks", lambda each: each[..., :8], "blocks of 8 bytes instead of 16"),
        ("blocks", lambda each: each[0], "blocks' has shape"),
        ("blocks", lambda each: each[:0], "blocks' is empty"),
    ],
)
def test_damaged_experts_are_named(part: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path) -> None:
    tensors, _ = mxfp4(torch.ones(2, 64, 8))
    checkpoint = experts(tmp_path, {**tensors, part: change(tensors[part]).contiguous()})
    with pytest.raises(BadCheckpoint, match=message):
        list(checkpoint.arrays())


@pytest.mark.parametrize("how", [QuantizedWeight.floats, QuantizedWeight.stored])
def test_an_exponent_that_is_nan_is_refused_by_name(how: Callable[[QuantizedWeight], object], tmp_path: Path) -> None:
    """It was read as another power of two, and the weights became infinite."""
    tensors, _ = mxfp4(torch.ones(2, 64, 8))
    tensors["scales"][-1, -1, -1] = 255
    weight = dict(experts(tmp_path, tensors).arrays())[EXPERTS]
    assert isinstance(weight, QuantizedWeight)
    with pytest.raises(BadCheckpoint, match=r"gate_up_proj_scales' holds NaN"):
        how(weight)


def test_experts_without_scales_are_named(tmp_path: Path) -> None:
    tensors, _ = mxfp4(torch.ones(2, 64, 8))
    del tensors["scales"]
    with pytest.raises(BadCheckpoint, match=r"no tensor '.*gate_up_proj_scales'"):
        list(experts(tmp_path, tensors).arrays())


def test_a_block_larger_than_the_weight_takes_no_more_memory(tmp_path: Path) -> None:
    """Scales were once repeated as often as the config said: gigabytes of them."""
    config = {"quant_method": "fp8", "weight_block_size": [10**8, 16]}
    checkpoint, twin = written(tmp_path, Format(config, lambda weight: float8(weight, (96, 16)), "Q8_0"))
    tracemalloc.start()
    values = found(checkpoint).floats()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(values, twin.numpy())
    assert peak < 1 << 20


def test_scales_that_are_powers_of_two_are_read(tmp_path: Path) -> None:
    """As DeepSeek's later checkpoints have them: exponents plus 127."""
    weight, exponents = matrix().to(torch.float8_e4m3fn), torch.arange(120, 132, dtype=torch.uint8).reshape(3, 4)
    twin = weight.float() * (exponents.float() - 127).exp2().repeat_interleave(32, 0).repeat_interleave(16, 1)
    parts = {"weight": weight, "weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}
    checkpoint, _ = written(tmp_path, Format(FORMATS["fp8-block"].config, lambda _: (parts, twin), "Q8_0"))
    assert torch.equal(dict(checkpoint.tensors())[UP], twin)


def test_weights_that_are_not_quantised_are_left_as_they_are(tmp_path: Path) -> None:
    weight = matrix().to(torch.bfloat16)
    plain = Format(FORMATS["fp8-block"].config, lambda _: ({"weight": weight}, weight), "BF16")
    checkpoint, _ = written(tmp_path, plain)
    assert found(checkpoint).format == "BF16"
    assert torch.equal(dict(checkpoint.tensors())[UP], weight)


def test_zero_points_that_the_config_denies_are_used(tmp_path: Path) -> None:
    lying = Format(FORMATS["gptq"].config, lambda weight: gptq(weight, symmetric=False), "Q4_1")
    checkpoint, twin = written(tmp_path, lying)
    assert found(checkpoint).format == "Q4_1"
    assert torch.equal(dict(checkpoint.tensors())[UP], twin)


def test_scales_beyond_float16_are_not_repacked(tmp_path: Path) -> None:
    checkpoint, twin = written(tmp_path, FORMATS["int-quantized"], matrix() * 1e9)
    assert torch.equal(dict(checkpoint.tensors())[UP], twin)
    with pytest.raises(DoesNotFit, match="too large for float16"):
        found(checkpoint).stored()


@given(
    st.sampled_from([4, 8]),
    st.integers(1, 5).flatmap(lambda rows: st.integers(1, 40).map(lambda columns: (rows, columns))),
    st.integers(0, 2**32 - 1),
)
def test_words_are_unpacked_as_they_were_packed(bits: int, shape: tuple[int, int], seed: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << bits, shape))
    assert np.array_equal(unpacked(words(codes, bits).numpy(), bits)[:, : shape[1]], codes.numpy())


_SIZES = {
    "gptq": (lambda weight: gptq(weight, symmetric=False, order=True), 8, 8),
    "awq": (awq, 8, 1),
    "pack-quantized": (lambda weight: pack_quantized(weight, group=None), 1, 1),
    "int-quantized": (int_quantized, 1, 1),
    "fp8-block": (lambda weight: float8(weight, (32, 16)), 1, 1),
    "nf4": (nf4, 2, 1),
}


@pytest.mark.full
@settings(max_examples=60)
@given(st.sampled_from(sorted(_SIZES)), st.integers(1, 12), st.integers(1, 80), st.integers(0, 1000))
def test_any_sizes_are_decoded(
    tmp_path_factory: pytest.TempPathFactory, name: str, rows: int, columns: int, seed: int
) -> None:
    pack, row_multiple, column_multiple = _SIZES[name]
    weight = matrix(rows * row_multiple, columns * column_multiple, seed)
    checkpoint, twin = written(tmp_path_factory.mktemp("sizes"), Format(FORMATS[name].config, pack, ""), weight)
    assert np.array_equal(found(checkpoint).floats(), twin.numpy())
    repacked = found(checkpoint).stored().floats()
    assert np.abs(repacked - twin.numpy()).max() <= 0.56 / 127 * np.abs(twin.numpy()).max()


# --- what is refused ------------------------------------------------------------------------------------------------


def damaged(directory: Path, name: str, change: Callable[[Tensors], object]) -> Checkpoint:
    """A checkpoint whose tensors, by the ends of their names, were changed."""
    written(directory, FORMATS[name])
    tensors = load_file(directory / SINGLE)
    own = {key.removeprefix(MODULE): tensors.pop(key) for key in list(tensors) if key.startswith(MODULE)}
    change(own)
    save_file(tensors | {MODULE + key: value.contiguous() for key, value in own.items()}, directory / SINGLE)
    return open_checkpoint(directory)


def put(**parts: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    """Changes parts; in their names two underscores stand for a dot."""

    def change(tensors: Tensors) -> None:
        for part, how in parts.items():
            name = part.replace("__", ".")
            tensors[name] = how(tensors[name])

    return change


def state(**fields: object) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        name = "weight.quant_state.bitsandbytes__nf4"
        told = json.loads(bytes(tensors[name].tolist())) | fields
        tensors[name] = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)

    return change


def raw_state(text: bytes) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)

    return change


def without(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(part)


def nan(tensor: Tensor) -> Tensor:
    tensor.view(-1)[-1] = torch.nan
    return tensor


_DAMAGE: Mapping[str, tuple[str, Callable[[Tensors], object], str]] = {
    "fp8 without scales": ("fp8-block", without("weight_scale_inv"), "no tensor '.*weight_scale_inv' beside"),
    "fp8 with few scales": ("fp8-block", put(weight_scale_inv=lambda each: each[:-1]), "weight_scale_inv' has shape"),
    "fp8 scales of no numbers": ("fp8-block", put(weight_scale_inv=Tensor.int), "weight_scale_inv' holds I32"),
    "fp8 with NaN": ("fp8-row", put(weight_scale=nan), "weight_scale' holds NaN"),
    "fp8 of three dimensions": ("fp8-row", put(weight=lambda each: each[None]), "weight' has shape"),
    "fp8 that is int8": ("fp8-row", put(weight=lambda each: each.view(torch.int8)), "weight' holds I8"),
    "int8 without scales": ("int-quantized", without("weight_scale"), "no tensor '.*weight_scale'"),
    "int8 zeros of another shape": (
        "int-quantized-zeros",
        put(weight_zero_point=lambda each: each[:-1]),
        "weight_zero_point' has shape",
    ),
    "packed shape of other rows": (
        "pack-quantized",
        put(weight_shape=lambda each: each * 2),
        "weight_shape' says .*, but there are 96 rows",
    ),
    "packed shape that is huge": (
        "pack-quantized",
        put(weight_shape=lambda _: torch.tensor([96, 2**62])),
        "weight_packed' has 8 words a row",
    ),
    "packed shape that is negative": (
        "pack-quantized",
        put(weight_shape=lambda _: torch.tensor([96, -64])),
        "weight_shape' says",
    ),
    "packed groups that do not divide": (
        "pack-quantized",
        put(weight_scale=lambda each: each[:, [0, 1, 0]]),
        "3 groups, which do not divide 64 columns",
    ),
    "packed scales of few rows": ("pack-quantized", put(weight_scale=lambda each: each[:9]), "weight_scale' holds"),
    "packed order out of range": (
        "pack-quantized-order",
        put(weight_g_idx=lambda each: each + 1),
        "weight_g_idx' names groups from 1 to 2, but there are 2",
    ),
    "gptq order out of range": ("gptq-order", put(g_idx=lambda each: each - 1), "g_idx' names groups from -1"),
    "gptq order of other inputs": ("gptq-order", put(g_idx=lambda each: each[:-8]), "qweight' has 8 words"),
    "gptq without zeros": ("gptq", without("qzeros"), "no tensor '.*qzeros'"),
    "gptq without scales": ("gptq", without("scales"), "no tensor '.*scales'"),
    "gptq with zeros of other outputs": ("gptq", put(qzeros=lambda each: each[:, :-1]), "qzeros' has shape"),
    "gptq with scales of other outputs": ("gptq", put(scales=lambda each: each[:, :-1]), "scales' has shape"),
    "gptq with groups that do not divide": (
        "gptq",
        put(scales=lambda each: each[[0, 1, 0]], qzeros=lambda each: each[[0, 1, 0]]),
        "scales' has 3 groups for 64 inputs",
    ),
    "gptq of floats": ("gptq", put(qweight=Tensor.float), "qweight' holds F32"),
    "gptq that is empty": ("gptq", put(qweight=lambda each: each[:, :0]), "qweight' is empty"),
    "awq with zeros of other groups": ("awq", put(qzeros=lambda each: each[:1]), "qzeros' has shape"),
    "awq without zeros": ("awq", without("qzeros"), "no tensor '.*qzeros'"),
    "awq of 64 bits": ("awq", put(qweight=Tensor.long), "qweight' holds I64"),
    "nf4 without its state": (
        "nf4",
        without("weight.quant_state.bitsandbytes__nf4"),
        "no tensor '.*quant_state.bitsandbytes__nf4'",
    ),
    "nf4 without absmax": ("nf4", without("weight.absmax"), "no tensor '.*weight.absmax'"),
    "nf4 with few absmax": ("nf4", put(weight__absmax=lambda each: each[:-1]), "weight.absmax' has shape"),
    "nf4 of a huge shape": ("nf4", state(shape=[10**8, 10**8]), "weight' holds 6144 codes"),
    "nf4 of a shape that is none": ("nf4", state(shape=[-1, True]), "'shape' must be an integer"),
    "nf4 of three dimensions": ("nf4", state(shape=[2, 48, 64]), "'shape' is .*, but it must be a list of two"),
    "nf4 of blocks of nothing": ("nf4", state(blocksize=0), "'blocksize' must be"),
    "nf4 of other blocks": ("nf4", state(blocksize=128), "weight.absmax' has shape"),
    "nf4 with an endless offset": ("nf4-nested", state(nested_offset=10**400), "'nested_offset' must be a number"),
    "nf4 without a nested map": ("nf4-nested", without("weight.nested_quant_map"), "no tensor '.*nested_quant_map'"),
    "nf4 with other nested blocks": ("nf4-nested", state(nested_blocksize=8), "nested_absmax' has shape"),
    "nf4 whose state is no JSON": ("nf4", raw_state(b"\xff{"), "holds no JSON object"),
    "nf4 whose state is a list": ("nf4", raw_state(b"[1]"), "holds no JSON object"),
    "nf4 whose state is deep": ("nf4", raw_state(b"[" * 4000), "holds no JSON object"),
    "nf4 whose state is long": ("nf4", raw_state(b" " * 5000 + b"{}"), "holds no JSON object"),
    "8 bits without row scales": ("bnb-8", without("SCB"), "no tensor '.*quant_state"),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_damaged_tensor_is_named(damage: str, tmp_path: Path) -> None:
    name, change, message = _DAMAGE[damage]
    checkpoint = damaged(tmp_path, name, change)
    with pytest.raises(BadCheckpoint, match=message):
        list(checkpoint.arrays())


def test_a_part_that_is_there_twice_is_named(tmp_path: Path) -> None:
    written(tmp_path, FORMATS["gptq"])
    tensors = load_file(tmp_path / SINGLE)
    twice = tensors[f"{MODULE}scales"].clone()
    save_file(tensors | {f"{MODULE.removeprefix('model.')}scales": twice}, tmp_path / SINGLE)
    with pytest.raises(BadCheckpoint, match=r"scales' twice"):
        list(open_checkpoint(tmp_path).arrays())


_GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quantised with hqq, .* Use the original model"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantised with modelopt's NVFP4"),
        ({}, "quantised with an unknown method"),
        ({"quant_method": "gptq", "bits": 3}, "quantised with GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ in the layout marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "GPTQ in the layout marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ with 4 bits in the layout gemv"),
        ({"quant_method": "awq", "bits": 8}, "AWQ with 8 bits"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": _GROUPS},
            "format nvfp4-pack-quantized",
        ),
        ({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": _GROUPS}, "with 4 bits"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": None}}},
            "compressed-tensors, but not its weights",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            },
            "several bit widths",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": _GROUPS,
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparsity format sparse-24-bitmask",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": _GROUPS,
                "transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}},
            },
            "transforms of activations",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
            "numbers of type bfloat16",
        ),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(config: Mapping[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_scheme(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "must be an object"),
        ({"quant_method": 3}, "'quant_method' must be a string"),
        ({"quant_method": "gptq"}, "no 'bits'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "'group_size' must be"),
        ({"quant_method": "gptq", "bits": 4, "sym": "yes"}, "'sym' must be true or false"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "'weight_block_size'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "'weight_block_size' must be"),
        ({"quant_method": "compressed-tensors"}, "no 'config_groups'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}, "format": "pack-quantized"}, "'a' must be"),
        ({"quant_method": "bitsandbytes"}, "'load_in_4bit'"),
    ],
)
def test_a_config_that_is_wrong_is_named(config: object, message: str) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        read_scheme(config)


def test_errors_of_the_config_name_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{tmp_path}.*'bits'"):
        written(tmp_path, Format({"quant_method": "gptq"}, gptq, ""))


def test_families_whose_matrices_are_transposed_are_refused(tmp_path: Path) -> None:
    """A square matrix would be read the wrong way round without notice."""
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 64, "n_embd": 64, "n_layer": 1}
    config |= {"n_head": 4, "n_positions": 64}
    write_quantized(tmp_path, config, {"h.layers.0.attn.c_proj.weight": matrix(64, 64)}, FORMATS["gptq"])
    checkpoint = open_checkpoint(tmp_path)
    for read in (checkpoint.stored, checkpoint.arrays):
        with pytest.raises(UnsupportedModel, match=r"stores matrices as \[in, out\]"):
            read()


@pytest.mark.parametrize("name", ["experts.gate_up_proj", "experts.0.gate_proj.weight"], ids=["stack", "apart"])
def test_quantised_experts_of_stacks_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """They were called tensors of another model, and a plan took them to fit."""
    config = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "vocab_size": 64, "hidden_size": 32}
    config |= {"intermediate_size": 16, "intermediate_size_mlp": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1}
    config |= {
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "quantization_config": {"quant_method": "fbgemm_fp8"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensor = f"model.layers.0.feed_forward.{name}"
    shape = (4, 32, 32) if name.endswith("gate_up_proj") else (16, 32)
    found = {tensor: torch.zeros(shape).to(torch.float8_e4m3fn), f"{tensor}_scale": torch.ones(*shape[:-1], 1)}
    save_file(found, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path)
    for read in (checkpoint.stored, checkpoint.arrays):
        with pytest.raises(UnsupportedModel, match=rf"{name}.*experts are quantised in a way"):
            read()
    with pytest.raises(UnsupportedModel, match="experts are quantised in a way"):
        plan(tmp_path, EngineConfig(device="cpu"), memory=1 << 32)


def test_pickles_are_refused(tmp_path: Path) -> None:
    written(tmp_path, FORMATS["gptq"])
    torch.save(load_file(tmp_path / SINGLE), tmp_path / "pytorch_model.bin")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(UnsupportedModel, match=r"quantised weights in pickles\. Convert them"):
        open_checkpoint(tmp_path)
