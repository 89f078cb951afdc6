"""The tensors that one quantised weight is stored as, and errors that name them. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ostro.errors import BadCheckpoint
from ostro.models.tensor_errors import not_finite
from ostro.weights.arrays import Floats, WeightArray

SCALES = ("F16", "BF16", "F32")
_INTEGERS = {"I8": "<i1", "I32": "<i4", "I64": "<i8"}
_AGAIN = "The checkpoint is damaged, or its quantization_config is another model's. Download it again."


class Header(Protocol):
    """A stored tensor, with or without its numbers."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> str: ...


T = TypeVar("T", bound=Header)


@dataclass(frozen=True, slots=True)
class Parts(Generic[T]):
    name: str
    """The weight's name."""
    prefix: str
    """The prefix of the parts' names in the checkpoint."""
    found: Mapping[str, T]

    def __contains__(self, part: str) -> bool:
        return part in self.found

    def __getitem__(self, part: str) -> T:
        if part not in self.found:
            there = ", ".join(repr(self.prefix + each) for each in sorted(self.found))
            raise BadCheckpoint(f"The checkpoint has no tensor {self.prefix + part!r} beside {there}. {_AGAIN}")
        return self.found[part]

    def take(self, part: str, formats: Sequence[str], dimensions: int) -> T:
        """A part that must be there, of one of these number formats."""
        tensor = self[part]
        if tensor.format not in formats:
            raise self.wrong(part, f"holds {tensor.format} instead of {' or '.join(formats)}")
        if len(tensor.shape) != dimensions:
            raise self.wrong(part, f"has shape {tensor.shape} instead of {dimensions} dimensions")
        if 0 in tensor.shape:
            raise self.wrong(part, "is empty")
        return tensor

    def shaped(self, part: str, formats: Sequence[str], shape: tuple[int, ...]) -> T:
        tensor = self.take(part, formats, len(shape))
        if tensor.shape != shape:
            raise self.wrong(part, f"has shape {tensor.shape} instead of {shape}")
        return tensor

    def wrong(self, part: str, what: str) -> BadCheckpoint:
        return BadCheckpoint(f"Tensor {self.prefix + part!r} {what}. {_AGAIN}")


def finite(parts: Parts[WeightArray], part: str) -> Floats:
    """A part's floats, such as scales: few, and each affects many weights, so they are all checked."""
    values = parts[part].floats()
    if not np.isfinite(values).all():
        raise not_finite(parts.prefix + part)
    return values


def integers(array: WeightArray) -> npt.NDArray[np.signedinteger]:
    """The numbers of an array of integers."""
    return array.raw.view(_INTEGERS[array.format]).reshape(array.shape)


def groups_of_columns(parts: Parts[WeightArray], part: str, groups: int) -> npt.NDArray[np.int32]:
    """The group of each column, checked to be less than `groups`."""
    found = integers(parts[part])
    if found.min() < 0 or found.max() >= groups:
        raise parts.wrong(part, f"names groups from {found.min()} to {found.max()}, but there are {groups}")
    return found.astype(np.int32)


def unpacked(words: npt.NDArray[np.integer], bits: int) -> npt.NDArray[np.uint8]:
    """The codes in each row of 32-bit words, or bytes, starting with the lowest bits of the first word or byte."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    halves = np.stack((octets & np.uint8(15), octets >> np.uint8(4)), axis=-1)
    return halves.reshape(*octets.shape[:-1], -1)
