"""Asynchronous transfers of small arrays between host and device. Knows no batch.

On a CPU, where Triton's interpreter stands in for a GPU, the same calls copy synchronously.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def send(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device; it arrives before any work queued after this call."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host.clone()
    # torch recycles pinned memory, but only after the copy has finished.
    return host.pin_memory().to(device, non_blocking=True)


def fetch(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Starts copying tensors to the host; calling the result waits for them."""
    if tensors[0].device.type == "cpu":
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> list[Tensor]:
        arrived.synchronize()
        return copies

    return wait
