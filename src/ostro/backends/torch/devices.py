"""Picks the device and dtype that a model runs on. Knows torch's devices; loads nothing."""

from collections import Counter

import torch
from torch import nn

from ostro.config import DType
from ostro.devices import DEVICE_KINDS
from ostro.errors import BadRequest
from ostro.torch_models.layers import HeadNorm

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Quantized integers, which are not parameters: see `backends.torch.quantize`. A byte holds two 4-bit values.
_PACKED = {torch.int8: ("int8", 1), torch.uint8: ("int4", 2)}


def pick_device(name: str) -> torch.device:
    """The configured device; "auto" is an NVIDIA GPU if there is one, otherwise the CPU, with its native core."""
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps":
        return _apple_gpu()
    # With ROCm, torch also calls AMD's GPUs "cuda".
    if torch.cuda.is_available() and torch.version.hip is None:
        return torch.device("cuda")
    if name == "auto":
        return torch.device("cpu")
    built = "" if torch.backends.cuda.is_built() else "; this torch was built without CUDA"
    built = built if torch.version.hip is None else "; this torch was built for AMD's GPUs, which are not supported"
    raise BadRequest(f"device is {name!r}, but torch sees no NVIDIA GPU{built}. Use --device cpu.", param="device")


def _apple_gpu() -> torch.device:
    if torch.backends.mps.is_available():
        return torch.device("mps")
    built = torch.backends.mps.is_built()
    reason = "this machine has no Apple GPU, or its macOS is too old" if built else "this torch was built without MPS"
    raise BadRequest(f"device is 'mps', but {reason}. Use --device cpu.", param="device")


def pick_dtype(asked: DType, device: torch.device) -> torch.dtype:
    return _DTYPES[DEVICE_KINDS[device.type].compute_dtype(asked)]


def format_name(dtype: torch.dtype) -> str:
    return "fp8" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")


def weight_formats(model: nn.Module) -> list[str]:
    """The formats of a loaded model's matrices, the most common first."""
    counts: Counter[str] = Counter()
    norms = {id(module.weight) for module in model.modules() if isinstance(module, HeadNorm)}
    for parameter in model.parameters():
        if parameter.dim() > 1 and id(parameter) not in norms:
            counts[format_name(parameter.dtype)] += parameter.numel()
    for name, buffer in model.named_buffers():
        if name.endswith("weight") and buffer.dtype in _PACKED:
            kind, values = _PACKED[buffer.dtype]
            counts[kind] += values * buffer.numel()
    return [name for name, _ in counts.most_common()]
