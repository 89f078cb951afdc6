"""Divides a mixture of experts between a device and the CPU beside it. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ostro.models.architecture import Architecture, Experts, Layer, ModelShape, StoredTensor


@dataclass(frozen=True)
class ExpertLayers:
    """What the CPU computes: the experts of some layers, without their routers and what they share."""

    shape: ModelShape
    """The whole model's."""
    backbone: str
    mixtures: tuple[Experts, ...]

    def tensors(self) -> Iterator[StoredTensor]:
        for mixture in self.mixtures:
            yield from mixture.up.tensors()
            yield from mixture.down.tensors()

    @property
    def label(self) -> str:
        """Which part of the model this is, in words."""
        return f"the experts of {len(self.mixtures)} layers"

    @cached_property
    def names(self) -> frozenset[str]:
        """What the tensors are called, with and without the backbone's prefix."""
        names = [tensor.name for tensor in self.tensors()]
        return frozenset(names).union(name.removeprefix(f"{self.backbone}.") for name in names)


def mixtures_of(described: Architecture) -> tuple[Experts, ...]:
    """One for each layer that has experts in place of an MLP."""
    return tuple(layer.mlp for layer in described.layers if isinstance(layer.mlp, Experts))


def with_cpu_experts(described: Architecture, layers: int) -> tuple[Architecture, ExpertLayers]:
    """The model without the experts of the first so many layers that have any, and these experts."""
    left, moved = layers, list[Experts]()

    def kept(layer: Layer) -> Layer:
        if not isinstance(layer.mlp, Experts) or len(moved) == left:
            return layer
        moved.append(layer.mlp)
        return replace(layer, mlp=replace(layer.mlp, on_cpu=True))

    device = replace(described, layers=tuple(map(kept, described.layers)))
    return device, ExpertLayers(described.shape, described.backbone, tuple(moved))
