"""Fills a model with a checkpoint's tensors, strictly. Knows names and shapes; knows no family and no file format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ostro.models.architecture import RowScale
from ostro.models.tensor_errors import REDUNDANT, lacking, misshapen, no_place, not_finite, not_floats
from ostro.torch_models.base import Model, Module


class Taken(NamedTuple):
    """The part of a checkpoint's tensor that a rank holds: some ranges along one dimension."""

    shape: tuple[int, ...]
    """The whole tensor's."""
    dim: int
    ranges: tuple[range, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """One range is a view: of a memory-mapped tensor, only that part is read."""
        parts = [tensor.narrow(self.dim, own.start, len(own)) for own in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


class Picked(NamedTuple):
    """Some rows of a checkpoint's tensor, in any order."""

    shape: tuple[int, ...]
    """The whole tensor's."""
    rows: tuple[int, ...]
    dim: int = 0
    """The dimension of the rows."""

    def of(self, tensor: Tensor) -> Tensor:
        # In memory order, so that rows are copied whole.
        swapped = self.dim == tensor.dim() - 1 and _is_transposed(tensor)
        if swapped:
            return Picked(self.shape, self.rows, self.dim - 1).of(tensor.transpose(-1, -2)).transpose(-1, -2)
        return tensor.index_select(self.dim, torch.tensor(self.rows, device=tensor.device))


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of a checkpoint's tensor: a view of a parameter, in the checkpoint's orientation."""

    memory: Tensor
    offset: float = 0.0
    """Added on loading."""
    repeated: bool = False
    """Whether the tensor is copied to every row of the memory."""
    taken: Taken | Picked | None = None
    """The part of the tensor that is stored; None for all of it."""
    left_out: bool = False
    """Whether zeros are stored instead, because another rank adds the tensor."""
    stacks_vectors: bool = False
    """Whether the tensor has a vector in each row, such as the biases of all experts."""
    scales: tuple[RowScale, ...] = ()
    """Factors of all rows of the memory, applied on loading; none if they are ones."""

    @property
    def shape(self) -> torch.Size:
        if self.taken is not None:
            return torch.Size(self.taken.shape)
        return self.memory.shape[1:] if self.repeated else self.memory.shape

    def factors(self) -> Tensor:
        """Those of `scales`, for the memory to be multiplied by."""
        parts = [torch.full((rows,), factor, device=self.memory.device) for rows, factor in self.scales]
        return torch.cat(parts).view(-1, *[1] * (self.memory.dim() - 1))

    def fill(self, tensor: Tensor) -> None:
        if self.left_out:
            self.memory.zero_()
            return
        if self.taken is not None:
            tensor = self.taken.of(tensor)
        memory = self.memory
        if _is_transposed(tensor):
            # Copies to a device must be contiguous, so the host would transpose these first.
            memory, tensor = memory.transpose(-1, -2), tensor.transpose(-1, -2)
        memory.copy_(tensor)
        if self.offset:
            self.memory.add_(self.offset)
        if self.scales:
            self.memory.mul_(self.factors())


def _is_transposed(tensor: Tensor) -> bool:
    """Whether its columns are contiguous in memory."""
    return tensor.dim() > 1 and tensor.stride(-1) != 1 and tensor.stride(-2) == 1


class Weighted(Module):
    """A module that has parameters itself, and knows how checkpoints store them."""

    def places(self, path: str) -> dict[str, Place]:
        """The destinations of its tensors, keyed by name in a checkpoint, for a module at `path` in the model."""
        return {f"{path}.{name}": Place(parameter.data) for name, parameter in self.named_parameters(recurse=False)}


def load_weights(model: Model, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every tensor into place; names may omit the backbone prefix, as in checkpoints of a bare backbone."""
    fill(places_of(model), tensors, prefix=f"{model.backbone_name}.")


def fill(places: Mapping[str, Place], tensors: Iterable[tuple[str, Tensor]], *, prefix: str = "") -> None:
    """Copies every tensor into place. A tensor that is missing, misshapen or unknown is an error that names it."""
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
        # Vectors are small and affect every token. Checking matrices would take too long; bad values show up in a step.
        if (tensor.dim() < 2 or place.stacks_vectors) and not bool(tensor.isfinite().all()):
            raise not_finite(given)
        place.fill(tensor)
        missing.discard(name)
    if missing:
        raise lacking(missing)


def places_of(model: nn.Module) -> dict[str, Place]:
    """All tensors that a checkpoint must contain, keyed by name."""
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        if isinstance(module, Weighted):
            places |= module.places(path)
    return places
