"""Where the tests of GPU kernels run: on a GPU if there is one, else in Triton's interpreter, on CPU tensors.

Imported before any kernel is declared, for that is when Triton decides.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# For tests of whole runs: a GPU does in no time what takes the interpreter ten seconds and more.
slow_in_the_interpreter = pytest.mark.slow if DEVICE.type == "cpu" else pytest.mark.gpu

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
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
        """Triton swaps the language's functions for the interpreter's in each call within a kernel, which takes
        longer than the kernel's own work. Here nothing is ever compiled, so they stay swapped.
        """
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_once

    splat = interpreter.InterpreterBuilder.create_splat

    def _splat(
        self: interpreter.InterpreterBuilder, type: tl.block_type, scalar: interpreter.TensorHandle
    ) -> interpreter.TensorHandle:
        """Triton 3.9 makes integers of a comparison of scalars, and then takes them for no mask."""
        if scalar.data.dtype == np.bool_:
            scalar = interpreter.TensorHandle(scalar.data, tl.int1)
        return splat(self, type, scalar)

    interpreter.InterpreterBuilder.create_splat = _splat

    dot = interpreter.InterpreterBuilder.create_dot

    def _dot(
        self: interpreter.InterpreterBuilder,
        a: interpreter.TensorHandle,
        b: interpreter.TensorHandle,
        *rest: object,
    ) -> interpreter.TensorHandle:
        """The interpreter keeps bfloat16 as integers, and multiplies those."""
        if a.dtype == tl.bfloat16:
            a, b = (self.cast_impl(each, tl.float32) for each in (a, b))
        return dot(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = _dot

    # Overflow is computed with a dozen further operations for each one on integers, and then ignored without `debug`.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

    get_numpy_dtype = interpreter._get_np_dtype
    numpy_dtypes: dict[str, object] = {}

    def _numpy_dtype(type: tl.dtype) -> object:
        """Triton builds a table of all types in each call."""
        name = type.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = get_numpy_dtype(type)
        return numpy_dtypes[name]

    interpreter._get_np_dtype = _numpy_dtype

    init_block_type = tl.block_type.__init__
    block_types: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}

    def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Iterable[int | tl.constexpr]) -> None:
        """Triton checks a shape and spells it out for each result."""
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (element_ty.name, tuple(sizes))
        if key not in block_types:
            init_block_type(self, element_ty, sizes)
            block_types[key] = self
        known = block_types[key]
        self.element_ty, self.shape, self.numel, self.name = element_ty, known.shape, known.numel, known.name

    tl.block_type.__init__ = _init_block_type

    init_tensor = tl.tensor.__init__
    tensors: dict[tuple[int, ...], tl.tensor] = {}

    def _init_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensors:
            init_tensor(self, handle, type)
            tensors[sizes] = self
        known = tensors[sizes]
        self.handle, self.type, self.dtype, self.shape, self.numel = handle, type, type.scalar, known.shape, known.numel

    tl.tensor.__init__ = _init_tensor

    broadcast = TritonSemantic.broadcast_impl_value

    def _broadcast(self: TritonSemantic[tl.tensor], lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        """Triton compares shapes of one kind of tuple with lists, by way of many objects."""
        blocks = lhs.type.is_block() and rhs.type.is_block()
        return (lhs, rhs) if blocks and lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = _broadcast
