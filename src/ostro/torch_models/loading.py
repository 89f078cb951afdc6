"""Filling a model with a checkpoint's tensors, strictly. Knows names and shapes; knows no family and no file format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ostro.models.tensor_errors import REDUNDANT, lacking, misshapen, no_place, not_finite, not_floats
from ostro.torch_models.base import Model, Module


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's tensor goes: a view of a parameter, in the checkpoint's orientation."""

    memory: Tensor
    offset: float = 0.0
    """Added on the way in."""
    repeated: bool = False
    """The tensor fills each row of the memory."""
    merged: int = 1
    """So many leading dimensions of the memory are one of the tensor."""

    @property
    def shape(self) -> torch.Size:
        shape = self.memory.shape[1:] if self.repeated else self.memory.shape
        return torch.Size((shape[: self.merged].numel(), *shape[self.merged :]))

    def fill(self, tensor: Tensor) -> None:
        self.memory.copy_(tensor if self.merged == 1 else tensor.reshape(self.memory.shape))
        if self.offset:
            self.memory.add_(self.offset)


class Weighted(Module):
    """A module that holds parameters itself, and knows how checkpoints store them."""

    def places(self, path: str) -> dict[str, Place]:
        """The places of its tensors by their names in a checkpoint, for a module that sits at `path` in the model."""
        return {f"{path}.{name}": Place(parameter.data) for name, parameter in self.named_parameters(recurse=False)}


def load_weights(model: Model, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every tensor to its place; names may lack the backbone's, as those of a bare backbone do."""
    fill(places_of(model), tensors, prefix=f"{model.backbone_name}.")


def fill(places: Mapping[str, Place], tensors: Iterable[tuple[str, Tensor]], *, prefix: str = "") -> None:
    """Copies every tensor to its place. A tensor missing, misshapen or without a place is an error that names it."""
    missing = set(places)
    for given, tensor in tensors:
        name = given if given in places else prefix + given
        place = places.get(name)
        if place is None:
            if REDUNDANT.fullmatch(given):
                continue
            raise no_place(given)
        if place.shape != tensor.shape:
            raise misshapen(given, tensor.shape, place.shape)
        if not tensor.is_floating_point():
            raise not_floats(given, str(tensor.dtype).removeprefix("torch."))
        # Few numbers, and each is in every token's way. Matrices are too many: a step's own numbers show them.
        if tensor.dim() < 2 and not bool(tensor.isfinite().all()):
            raise not_finite(given)
        place.fill(tensor)
        missing.discard(name)
    if missing:
        raise lacking(missing)


def places_of(model: nn.Module) -> dict[str, Place]:
    """Every tensor that a checkpoint must hold, by its name there."""
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        if isinstance(module, Weighted):
            places |= module.places(path)
    return places
