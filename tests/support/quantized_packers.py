"""Weights packed by hand as quantised checkpoints store them, each with what it is to be decoded as. Knows no reader.

A packer returns the tensors of one module, by the ends of their names, and its twin: the matrix in float32.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Packed = tuple[Tensors, Tensor]
Packer = Callable[[Tensor], Packed]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Any sixteen numbers in order would do: the file brings its own.
NF4 = torch.tensor(
    [
        -1,
        -0.6962,
        -0.5251,
        -0.3949,
        -0.2844,
        -0.1848,
        -0.0911,
        0,
        0.0796,
        0.1609,
        0.2461,
        0.3379,
        0.4407,
        0.5626,
        0.723,
        1,
    ]
)
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes of a row in 32-bit words, the first in the lowest bits; the last word is filled with zeros."""
    per_word = 32 // bits
    values = np.zeros((len(codes), -(-codes.shape[1] // per_word) * per_word), np.uint32)
    values[:, : codes.shape[1]] = codes.numpy()
    shifted = values.reshape(len(codes), -1, per_word) << (np.arange(per_word, dtype=np.uint32) * np.uint32(bits))
    return torch.from_numpy(np.bitwise_or.reduce(shifted, axis=-1).view(np.int32))


@dataclass(frozen=True)
class Coded:
    """A matrix on an integer grid."""

    codes: Tensor
    """Unsigned codes."""
    zeros: Tensor
    """[out, groups], unsigned."""
    scales: Tensor
    groups: Tensor
    """Group of each column."""

    @property
    def twin(self) -> Tensor:
        zeros, scales = self.zeros[:, self.groups], self.scales.float()[:, self.groups]
        return (self.codes - zeros).float() * scales


def coded(
    matrix: Tensor,
    *,
    bits: int = 4,
    group: int | None = None,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    order: bool = False,
    least_zero: int = 0,
) -> Coded:
    """Rounds a matrix to a grid. With `order`, groups take columns from all over the matrix."""
    rows, columns = matrix.shape
    group = group or columns
    groups = torch.arange(columns) // group
    if order:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(3))]
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    num_groups = int(groups.max()) + 1
    zeros, scales = torch.full((rows, num_groups), middle), torch.empty(rows, num_groups)
    for number in range(num_groups):
        part = matrix[:, groups == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, number] = torch.maximum(-low, high) / (middle - 0.5)
        else:
            scales[:, number] = (high - low) / top
            zeros[:, number] = (-low / scales[:, number]).round().clamp(least_zero, top).long()
    scales = scales.to(dtype)
    codes = (matrix / scales.float()[:, groups]).round().long() + zeros[:, groups]
    return Coded(codes.clamp(0, top), zeros, scales, groups)


def gptq(
    matrix: Tensor,
    *,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    v2: bool = False,
    order: bool = False,
) -> Packed:
    found = coded(matrix, bits=bits, group=group, symmetric=symmetric, order=order, least_zero=0 if v2 else 1)
    tensors = {
        "qweight": words(found.codes, bits).T.contiguous(),
        "qzeros": words(found.zeros.T - (0 if v2 else 1), bits),
        "scales": found.scales.T.contiguous(),
        "g_idx": found.groups.int(),
    }
    return tensors, found.twin


def awq(matrix: Tensor, *, group: int = 32) -> Packed:
    found = coded(matrix, group=group, symmetric=False)

    def packed(codes: Tensor) -> Tensor:
        """[…, out] in words of eight."""
        placed = torch.empty_like(codes).reshape(len(codes), -1, 8)
        for column, nibble in enumerate(AWQ_NIBBLES):
            placed[:, :, nibble] = codes.reshape(len(codes), -1, 8)[:, :, column]
        return words(placed.reshape(codes.shape), 4)

    tensors = {"qweight": packed(found.codes.T), "qzeros": packed(found.zeros.T), "scales": found.scales.T.contiguous()}
    return tensors, found.twin


def pack_quantized(
    matrix: Tensor,
    *,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Packed:
    found = coded(matrix, bits=bits, group=group, symmetric=symmetric, order=order, dtype=dtype)
    tensors = {
        "weight_packed": words(found.codes, bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(found.zeros.T, bits).T.contiguous()
    if order:
        tensors["weight_g_idx"] = found.groups.int()
    return tensors, found.twin


def int_quantized(matrix: Tensor, *, symmetric: bool = True, group: int | None = None) -> Packed:
    found = coded(matrix, bits=8, group=group, symmetric=symmetric, dtype=torch.bfloat16)
    tensors = {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
    return tensors, found.twin


def float8(
    matrix: Tensor, tile: tuple[int, int], *, name: str = "weight_scale_inv", shape: tuple[int, ...] | None = None
) -> Packed:
    """A scale for each tile of rows and columns; `shape` is how they are stored."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % tile[1], 0, -rows % tile[0]))
    tiles = padded.reshape(len(padded) // tile[0], tile[0], -1, tile[1])
    scales = tiles.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[:rows, :columns]
    values = (matrix / spread).to(torch.float8_e4m3fn)
    stored = scales if shape is None else scales.reshape(shape)
    return {"weight": values, name: stored}, values.float() * spread


def per_row(matrix: Tensor) -> Packed:
    return float8(matrix, (1, matrix.shape[1]), name="weight_scale")


def per_tensor(matrix: Tensor) -> Packed:
    tensors, twin = float8(matrix, (matrix.shape[0], matrix.shape[1]), name="weight_scale", shape=())
    return {**tensors, "input_scale": torch.tensor(0.5)}, twin


def nf4(matrix: Tensor, *, nested: bool = False, block: int = 64) -> Packed:
    flat = matrix.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
    absmax = blocks.abs().amax(1)
    state: dict[str, object] = {
        "quant_type": "nf4",
        "blocksize": block,
        "shape": list(matrix.shape),
        "dtype": "float32",
    }
    tensors: Tensors = {}
    if nested:
        outer = absmax.reshape(-1) - absmax.mean()
        table = torch.linspace(-1, 1, 256)
        grouped = torch.nn.functional.pad(outer, (0, -len(outer) % 256)).reshape(-1, 256)
        peaks = grouped.abs().amax(1)
        codes = (outer / peaks.repeat_interleave(256)[: len(outer)])[:, None].sub(table).abs().argmin(1)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": absmax.mean().item()}
        absmax = table[codes] * peaks.repeat_interleave(256)[: len(outer)] + absmax.mean()
        tensors |= {
            "weight.absmax": codes.to(torch.uint8),
            "weight.nested_absmax": peaks,
            "weight.nested_quant_map": table,
        }
    else:
        tensors["weight.absmax"] = absmax
    scales = absmax.repeat_interleave(block)[: len(flat)]
    codes = (flat / scales)[:, None].sub(NF4).abs().argmin(1)
    pairs = codes.reshape(-1, 2)
    tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
    tensors["weight.quant_map"] = NF4.clone()
    told = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(told), dtype=torch.uint8)
    return tensors, (NF4[codes] * scales).reshape(matrix.shape)


def int8_rows(matrix: Tensor) -> Packed:
    """bitsandbytes' 8 bits."""
    peaks = matrix.abs().amax(1)
    codes = (matrix * 127 / peaks[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": peaks}, codes.float() * (peaks / 127)[:, None]


def mxfp4(stack: Tensor) -> Packed:
    """[experts, in, out], as checkpoints have it that are not quantised."""
    blocks = stack.swapaxes(1, 2).reshape(len(stack), stack.shape[2], -1, 32)
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil().clamp(-100, 100)
    scaled = blocks / exponents.exp2()[..., None]
    codes = scaled[..., None].sub(E2M1).abs().argmin(-1)
    twin = (E2M1[codes] * exponents.exp2()[..., None]).reshape(len(stack), stack.shape[2], -1).swapaxes(1, 2)
    pairs = codes.reshape(*codes.shape[:-1], 16, 2)
    octets = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    return {"blocks": octets, "scales": (exponents + 127).to(torch.uint8)}, twin.contiguous()


@dataclass(frozen=True)
class Format:
    config: Mapping[str, object]
    """quantization_config"""
    pack: Packer
    native: str
    """The native core's packed format for it."""
    exactly: bool = False
    """Whether that packing is lossless."""


def _compressed(format: str, weights: Mapping[str, object]) -> Mapping[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def _gptq(**settings: object) -> Mapping[str, object]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, **settings}


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

FORMATS: Mapping[str, Format] = {
    "fp8-block": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 16]}, lambda matrix: float8(matrix, (32, 16)), "Q8_0"
    ),
    "fp8-tensor": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, per_tensor, "Q8_0"),
    "fp8-row": Format({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, per_row, "Q8_0"),
    "float-quantized": Format(_compressed("float-quantized", _FLOAT8), per_row, "Q8_0"),
    "int-quantized": Format(_compressed("int-quantized", _INT8), int_quantized, "Q8_0", exactly=True),
    "int-quantized-zeros": Format(
        _compressed("int-quantized", {**_INT8, "symmetric": False}),
        lambda matrix: int_quantized(matrix, symmetric=False),
        "Q8_0",
    ),
    "pack-quantized": Format(_compressed("pack-quantized", _INT4), pack_quantized, "Q4_0", exactly=True),
    "pack-quantized-zeros": Format(
        _compressed("pack-quantized", {**_INT4, "symmetric": False}),
        lambda matrix: pack_quantized(matrix, symmetric=False),
        "Q4_1",
    ),
    "pack-quantized-order": Format(
        _compressed("pack-quantized", {**_INT4, "actorder": "group"}),
        lambda matrix: pack_quantized(matrix, order=True),
        "Q8_0",
    ),
    "pack-quantized-8": Format(
        _compressed("pack-quantized", {**_INT8, "num_bits": 8}),
        lambda matrix: pack_quantized(matrix, bits=8, group=None),
        "Q8_0",
        exactly=True,
    ),
    "gptq": Format(_gptq(), gptq, "Q4_0", exactly=True),
    "gptq-zeros": Format(_gptq(sym=False), lambda matrix: gptq(matrix, symmetric=False), "Q4_1"),
    "gptq-v2": Format(
        _gptq(sym=False, checkpoint_format="gptq_v2"), lambda matrix: gptq(matrix, symmetric=False, v2=True), "Q4_1"
    ),
    "gptq-order": Format(_gptq(desc_act=True), lambda matrix: gptq(matrix, order=True), "Q8_0"),
    "gptq-one-group": Format(_gptq(group_size=-1), lambda matrix: gptq(matrix, group=None), "Q4_0", exactly=True),
    "gptq-8": Format(_gptq(bits=8), lambda matrix: gptq(matrix, bits=8), "Q8_0", exactly=True),
    "awq": Format(_AWQ, awq, "Q4_1"),
    "nf4": Format(_BNB, nf4, "Q8_0"),
    "nf4-nested": Format({**_BNB, "bnb_4bit_use_double_quant": True}, lambda matrix: nf4(matrix, nested=True), "Q8_0"),
    "bnb-8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_rows, "Q8_0"),
}
"""Formats of matrices whose sizes are multiples of 32."""


def quantized(tensors: Mapping[str, Tensor], format: Format) -> tuple[Tensors, Tensors]:
    """A checkpoint with its layers' matrices packed, and its twin."""
    packed: Tensors = {}
    twin: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or ".layers." not in name:
            packed[name] = twin[name] = tensor
            continue
        parts, decoded = format.pack(tensor)
        twin[name] = decoded
        packed |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    return packed, twin


def write_quantized(
    directory: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], format: Format, *, num_files: int = 1
) -> Tensors:
    """Writes the checkpoint, with a module's tensors in different files if there are several; returns its twin."""
    packed, twin = quantized(tensors, format)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": dict(format.config)}))
    if num_files == 1:
        save_file(packed, directory / "model.safetensors")
        return twin
    files = [f"model-{number:05}-of-{num_files:05}.safetensors" for number in range(1, num_files + 1)]
    places = {name: files[number % num_files] for number, name in enumerate(packed)}
    for file in files:
        save_file({name: packed[name] for name, place in places.items() if place == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return twin


def write_mxfp4(directory: Path, config: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """gpt-oss as it is published: stacks of matrices in blocks."""
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.dim() == 3:
            stored |= {f"{name}_{part}": each for part, each in mxfp4(tensor)[0].items()}
        else:
            stored[name] = tensor.contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    described = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(described))
    save_file(stored, directory / "model.safetensors")
