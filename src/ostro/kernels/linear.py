"""Matrix products for projections. The plain twin is torch.nn.functional.linear."""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]."""
    return F.linear(x, weight, bias)
