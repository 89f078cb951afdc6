"""Triton's interpreter rounds to 8 bits wrongly: here it learns to do it as GPUs do."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def round_as_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry of a mantissa that rounds up, and wraps around above the largest number."""
    convert = interpreter._convert_float
    largest = torch.finfo(torch.float8_e4m3fn).max

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != tl.float8e4nv:
            return convert(data, source, target, mode)
        assert source == tl.float32
        wide = torch.from_numpy(np.ascontiguousarray(data)).clamp(-largest, largest)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
