"""Which device and which number format a model runs on. Knows torch's devices; loads nothing."""

import torch

from ostro.errors import BadRequest

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def pick_device(name: str) -> torch.device:
    """The device that a setting names; "auto" is a GPU if there is one."""
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "auto":
        return torch.device("cpu")
    built = "" if torch.backends.cuda.is_built() else "; this torch was built without CUDA"
    raise BadRequest(f"device is {name!r}, but torch sees no GPU{built}. Use --device cpu.", param="device")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """CPUs mostly lack fast kernels for 16-bit numbers; GPUs are twice as fast with them."""
    if name != "auto":
        dtype = _DTYPES[name]
        if device.type == "cpu" and dtype != torch.float32:
            raise BadRequest(f"dtype {name} runs on GPUs only; on a CPU use float32.", param="dtype")
        return dtype
    return torch.bfloat16 if device.type == "cuda" else torch.float32
