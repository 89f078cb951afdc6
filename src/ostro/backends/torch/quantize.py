"""Quantizes a model's matrices to 8 or 4 bits on a CPU, each as soon as it is loaded: the whole model never exists in
float32. Norms and biases are unchanged.

With 4 bits, only the layers' projections, most of a model, are 4-bit. Embeddings and the head keep 8 bits, because they
distinguish tokens, and so do matrices outside of layers and those whose rows do not divide into groups.
"""

import mmap
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from ostro.errors import BadCheckpoint
from ostro.kernels.packed_linear import (
    GROUP,
    Int4Weight,
    Int8Weight,
    packed_linear,
    packed_rows,
    quantize_int4,
    quantize_int8,
)
from ostro.torch_models.base import Model
from ostro.torch_models.layers import Embedding, ExactProjection, Linear, Matrix

Bits = Literal["int8", "int4"]
Store = Int8Weight | Int4Weight


class PackedLinear(Linear):
    def __init__(self, plain: Linear, store: Store) -> None:
        with torch.device("meta"):
            super().__init__(1, 1)
        self.bias = plain.bias
        self.store = store
        _replace_weight(self, store)

    def pack(self) -> None:
        """Nothing to do: there is only one layout."""

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_linear(x, self.store, bias)


class PackedEmbedding(Embedding):
    def __init__(self, plain: Embedding, store: Int8Weight) -> None:
        with torch.device("meta"):
            super().__init__(plain.name, 1, 1)
        self.scale = plain.scale
        self.store = store
        _replace_weight(self, store)

    def pack(self) -> None:
        """Nothing to do: there is only one layout."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = packed_rows(self.store, ids)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_linear(x, self.store, bias)


_PACKED = (PackedLinear, PackedEmbedding)
_IN_EIGHT_BITS = ("lm_head", "layer_inputs.projection")


def quantized_on_the_way(
    model: Model, tensors: Iterable[tuple[str, Tensor]], bits: Bits
) -> Iterator[tuple[str, Tensor]]:
    """Passes the tensors through to `load_weights`; each time it asks for the next, packs what it has filled."""
    packer = _Packer(model, bits)
    packer.stage()
    return _watched(model, tensors, packer)


def quantize_matrices(model: Model, bits: Bits) -> None:
    """Packs all matrices of a loaded model that are not packed yet."""
    packer = _Packer(model, bits)
    for path in packer.missing:
        packer.pack(path)


def _watched(model: Model, tensors: Iterable[tuple[str, Tensor]], packer: "_Packer") -> Iterator[tuple[str, Tensor]]:
    for given, tensor in tensors:
        name = given if given in packer.path_of else f"{model.backbone_name}.{given}"
        if name in packer.filled:
            raise BadCheckpoint(f"The checkpoint holds tensor {given!r} twice. Fetch the model again.")
        yield given, tensor
        packer.fill(name)


class _Packer:
    """Tracks which matrices of a model are filled, and packs them."""

    def __init__(self, model: Model, bits: Bits) -> None:
        self._bits = bits
        self._matrices = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, Matrix) and not isinstance(module, (*_PACKED, ExactProjection))
        }
        # A tied head is the embedding under a second name.
        self._homes: dict[int, list[tuple[nn.Module, str]]] = {}
        for parent in model.modules():
            for name, child in parent.named_children():
                self._homes.setdefault(id(child), []).append((parent, name))
        self.missing = {
            path: {name for name in module.places(path) if name.endswith(".weight")}
            for path, module in self._matrices.items()
        }
        self.path_of = {name: path for path, names in self.missing.items() for name in names}
        self.filled: set[str] = set()
        self._stages: dict[str, mmap.mmap] = {}

    def stage(self) -> None:
        """Backs each matrix with memory that is returned to the system at once, even if someone holds a view of it.

        torch's allocator would keep most of what is freed.
        """
        for path, matrix in self._matrices.items():
            weight = matrix.weight
            stage = mmap.mmap(-1, weight.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            weight.data = torch.frombuffer(stage, dtype=weight.dtype).view(weight.shape)
            self._stages[path] = stage

    def fill(self, name: str) -> None:
        if (path := self.path_of.get(name)) is None:
            return
        self.filled.add(name)
        self.missing[path].discard(name)
        if not self.missing[path]:
            self.pack(path)

    def pack(self, path: str) -> None:
        plain = self._matrices.pop(path)
        packed = _packed(plain, "int8" if path.endswith(_IN_EIGHT_BITS) else self._bits)
        for parent, name in self._homes[id(plain)]:
            setattr(parent, name, packed)
        if path in self._stages:
            self._stages[path].madvise(mmap.MADV_DONTNEED)


def _packed(plain: Matrix, bits: Bits) -> Matrix:
    weight = plain.weight.data
    if isinstance(plain, Embedding):
        return PackedEmbedding(plain, quantize_int8(weight))
    assert isinstance(plain, Linear)
    store = quantize_int4(weight) if bits == "int4" and weight.shape[1] % GROUP == 0 else quantize_int8(weight)
    return PackedLinear(plain, store)


def _replace_weight(module: Matrix, store: Store) -> None:
    """Stores the values as a buffer: parameters define the model's dtype, and integers must not."""
    del module.weight
    module.register_buffer("weight", store.values, persistent=False)
