"""Where the tests of GPU kernels run: on a GPU if there is one, else in Triton's interpreter, on CPU tensors.

Imported before any kernel is declared, for that is when Triton decides.
"""

import os
from collections.abc import Callable

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# For tests of whole runs: a GPU does in no time what takes the interpreter ten seconds and more.
slow_in_the_interpreter = pytest.mark.slow if DEVICE.type == "cpu" else pytest.mark.gpu

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        # The interpreter keeps scalars as arrays of one element, which NumPy 2.4 makes no integers of.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = _patch_with_index

    patch_language = interpreter._patch_lang
    patched: set[str] = set()

    def _patch_once(function: Callable[..., object]) -> object:
        """Triton swaps the language's functions for the interpreter's anew in each call within a kernel, which takes
        longer than the kernel's own work. Here nothing is ever compiled, so they stay swapped.
        """
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_once
