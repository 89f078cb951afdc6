"""Matmul for projections. The plain twin is torch.nn.functional.linear.

On CPUs without a vendor BLAS, torch multiplies several rows by a matrix no faster than one by one. oneDNN is three
times as fast if the matrix is packed beforehand. A single row gains nothing and uses the plain layout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]. `packed` is the same weight from `pack`, or None."""
    if packed is None or x.shape[0] == 1:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor | None:
    """A copy of the weight in oneDNN's fastest layout; None if oneDNN offers none."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())
