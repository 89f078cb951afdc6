"""Code common to the readers of quantised formats. Imports no torch.

The tensors themselves show which weights are quantised: those stored in parts. `modules_to_not_convert`, `ignore`
and `targets` repeat this as patterns that would have to be trusted. A weight that lacks parts is noticed without
them, because it does not hold floats.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, TypeVar

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.weights.arrays import WeightArray
from ostro.weights.quantized.parts import Parts, T
from ostro.weights.quantized.weight import Packing, QuantizedWeight
from ostro.weights.stored import TensorHeader

WEIGHT = "weight"
PLAIN = ("F64", "F32", "F16", "BF16")
Shape = tuple[int, ...]
U = TypeVar("U")


class Scheme(ABC):
    """How a checkpoint is quantised, as its quantization_config says."""

    pattern: ClassVar[re.Pattern[str]]
    """Matches the names of parts: the group `module` is what a weight's parts have in common, `part` the rest."""
    unused: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    """Matches tensors that only concern the rounding of activations, which are not rounded here."""
    named: ClassVar[str] = "{module}.weight"
    """The pattern of a weight's name."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The format, in words."""

    @abstractmethod
    def header(self, parts: Parts[T]) -> tuple[Shape, Packing]:
        """A weight's shape and packing, from its parts' headers. Raises BadCheckpoint if they do not fit together."""

    @abstractmethod
    def weight(self, parts: Parts[WeightArray]) -> QuantizedWeight:
        """The same with the numbers, of which all but the codes themselves are checked."""

    def headers(self, tensors: Iterable[TensorHeader]) -> Iterator[TensorHeader]:
        """A header for each weight."""
        found = list(tensors)

        def build(parts: Parts[TensorHeader]) -> TensorHeader:
            shape, packing = self.header(parts)
            return TensorHeader(parts.name, shape, packing.format, packing.how, packing.form)

        names = [tensor.name for tensor in found]
        return (tensor for _, tensor in self._assembled(names, ((each.name, each) for each in found), build))

    def weights(
        self, names: Iterable[str], arrays: Iterable[tuple[str, WeightArray]]
    ) -> Iterator[tuple[str, WeightArray | QuantizedWeight]]:
        """The weights, each as soon as all of its parts have arrived; other tensors unchanged.

        `names` are those of all tensors that will arrive.
        """
        return self._assembled(names, arrays, self.weight)

    def _assembled(
        self, names: Iterable[str], tensors: Iterable[tuple[str, T]], build: Callable[[Parts[T]], U]
    ) -> Iterator[tuple[str, T | U]]:
        expected: dict[str, set[str]] = {}
        for name in names:
            if (match := self.pattern.fullmatch(name)) is not None:
                expected.setdefault(match["module"], set()).add(match["part"])
        waiting: dict[str, dict[str, T]] = {}
        whole: set[str] = set()
        for name, tensor in tensors:
            match = self.pattern.fullmatch(name)
            if match is None:
                if not self.unused.fullmatch(name):
                    yield name, tensor
                continue
            module, part = match["module"], match["part"]
            found = waiting.setdefault(module, {})
            if part in found or module in whole:
                raise BadCheckpoint(f"The checkpoint holds tensor {name!r} twice. Fetch the model again.")
            found[part] = tensor
            if found.keys() != expected[module]:
                continue
            whole.add(module)
            parts = Parts(self.named.format(module=module), name.removesuffix(part), waiting.pop(module))
            yield parts.name, tensor if _is_plain(parts) else build(parts)


def _is_plain(parts: Parts[T]) -> bool:
    return parts.found.keys() == {WEIGHT} and parts[WEIGHT].format in PLAIN


def refused(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The model is quantised with {what}, which Ostro does not read. Use the original model in safetensors, a GGUF "
        "of it, or one in FP8, compressed-tensors, GPTQ, AWQ, bitsandbytes or MXFP4."
    )
