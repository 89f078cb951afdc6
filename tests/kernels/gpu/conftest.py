"""The same tests on a GPU where there is one, else in Triton's interpreter, on CPU tensors."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is declared, so before the kernels are imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
