"""Matmul on a CPU with 8-bit or 4-bit weights; inputs, sums and results stay float32.

    int8   one scale per row                                     w = q · scale             8 bits per weight
    int4   a scale and a minimum per 32 values of a row          w = q · scale + minimum   5 bits per weight

Weights are dequantized one block of rows at a time, so that the float32 block stays in the cache, then multiplied by
the library. That is slower than float32 weights: the gain is memory. For a few rows in 8 bits, torch has a kernel that
dequantizes on the fly. The plain twin dequantizes the whole matrix.

No row of the result depends on its neighbours: inputs are not rounded, and sums are per row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Weights of a row that share a scale and a minimum in 4 bits."""
# Dequantized at a time: two megabytes in float32.
_BLOCK_VALUES = 1 << 19
_LEAST = torch.finfo(torch.float32).tiny
# Up to this many rows, torch's int8 kernel is faster; all its builds support sizes divisible by 32.
_FEW_ROWS, _MULTIPLE = 4, 32


@dataclass(frozen=True, slots=True)
class Int8Weight:
    values: Tensor
    """[out, in], from -127 to 127."""
    scales: Tensor
    """[out], float32."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    values: Tensor
    """[out, in / 2]: a byte holds a value of the row's first half and, in its upper four bits, one of the second."""
    scales: Tensor
    """[out, in / GROUP], float16."""
    minima: Tensor


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Quantizes with one scale per row."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for rows in _blocks(weight):
        low, high = weight[rows].aminmax(dim=1)
        scales[rows] = torch.maximum(-low, high) / 127
        # Divides by the rounded scale, which is what dequantizing uses; a row of zeros has scale zero.
        quotient = weight[rows] / scales[rows, None].clamp_min(_LEAST)
        values[rows] = quotient.round_().nan_to_num_(0).clamp_(-127, 127)
    return Int8Weight(values, scales)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Quantizes in groups of GROUP values, which must divide the row length."""
    out_features, in_features = weight.shape
    values = torch.empty(out_features, in_features // 2, dtype=torch.uint8)
    scales = torch.empty(out_features, in_features // GROUP, dtype=torch.float16)
    minima = torch.empty_like(scales)
    for rows in _blocks(weight):
        groups = weight[rows].unflatten(1, (-1, GROUP))
        low, high = groups.aminmax(dim=-1)
        scales[rows], minima[rows] = (high - low) / 15, low
        quotient = groups - minima[rows].float()[..., None]
        quotient /= scales[rows].float().clamp_min(_LEAST)[..., None]
        whole = quotient.round_().nan_to_num_(0).clamp_(0, 15).to(torch.uint8).flatten(1)
        lower, upper = whole.chunk(2, 1)
        values[rows] = lower | (upper << 4)
    return Int4Weight(values, scales, minima)


def widened(weight: Int8Weight | Int4Weight) -> Tensor:
    """The matrix in float32, [out, in]."""
    if isinstance(weight, Int8Weight):
        return weight.values.float() * weight.scales[:, None]
    groups = _unpacked(weight.values).unflatten(1, (-1, GROUP))
    return (groups * weight.scales.float()[..., None] + weight.minima.float()[..., None]).flatten(1)


def packed_linear_plain(x: Tensor, weight: Int8Weight | Int4Weight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, widened(weight), bias)


def packed_linear(x: Tensor, weight: Int8Weight | Int4Weight, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out], float32."""
    y = _int8_product(x, weight) if isinstance(weight, Int8Weight) else _int4_product(x, weight)
    return y if bias is None else y.add_(bias)


def packed_rows(weight: Int8Weight, ids: Tensor) -> Tensor:
    """Selected rows of the matrix in float32: an embedding lookup."""
    return weight.values[ids].float().mul_(weight.scales[ids, None])


def _int8_product(x: Tensor, weight: Int8Weight) -> Tensor:
    values, scales = weight.values, weight.scales
    if len(x) <= _FEW_ROWS and values.shape[0] % _MULTIPLE == values.shape[1] % _MULTIPLE == 0:
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), values, scales)
    # Scaling the sums is cheaper than scaling the weights.
    return torch.cat([F.linear(x, values[rows].float()) for rows in _blocks(values)], 1).mul_(scales)


def _int4_product(x: Tensor, weight: Int4Weight) -> Tensor:
    # A minimum applies to all values of its group, so it needs only the sum of the group's inputs.
    sums = x.unflatten(1, (-1, GROUP)).sum(-1)
    parts = []
    for rows in _blocks(weight.values):
        wide = _unpacked(weight.values[rows])
        wide.unflatten(1, (-1, GROUP)).mul_(weight.scales[rows].float()[..., None])
        parts.append(F.linear(x, wide).add_(F.linear(sums, weight.minima[rows].float())))
    return torch.cat(parts, 1)


def _unpacked(values: Tensor) -> Tensor:
    """[rows, in / 2] bytes -> [rows, in], from 0 to 15, in float32."""
    wide = torch.empty(len(values), 2, values.shape[1])
    wide[:, 0] = values & 15
    wide[:, 1] = values >> 4
    return wide.flatten(1)


def _blocks(matrix: Tensor) -> list[slice]:
    """Ranges of rows with about _BLOCK_VALUES values each, and at least one row."""
    step = max(1, _BLOCK_VALUES // matrix.shape[1])
    return [slice(at, at + step) for at in range(0, len(matrix), step)]
