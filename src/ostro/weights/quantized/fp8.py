"""Checkpoints with `quant_method: fp8`, such as DeepSeek's and Qwen's, with a scale per tile, row or tensor; fbgemm's
and ModelOpt's too.

weight             float8 [out, in]
weight_scale_inv   or `weight_scale`; despite its name, it multiplies too
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Self

from ostro.models.config import ConfigReader
from ostro.weights.arrays import WeightArray
from ostro.weights.quantized.parts import Parts, T
from ostro.weights.quantized.scheme import Scheme, Shape, refused
from ostro.weights.quantized.tiles import Tile, float8_packing, float8_shape, float8_weight
from ostro.weights.quantized.weight import Packing, QuantizedWeight

# Scales of activations and of the KV cache.
UNUSED_SCALES = re.compile(r".+\.(input|activation|output|q|k|v|kv|prob)_(scale|scale_ub|zero_point)")
_NAMES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True, slots=True)
class Float8(Scheme):
    block: Tile | None

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(?P<module>.+)\.(?P<part>weight(_scale|_scale_inv)?)")
    unused: ClassVar[re.Pattern[str]] = UNUSED_SCALES

    @classmethod
    def read(cls, config: ConfigReader) -> Self:
        return cls(block_size(config, "weight_block_size"))

    @classmethod
    def read_modelopt(cls, config: ConfigReader) -> Self:
        """Reads a ModelOpt config; FP8 is one of its algorithms."""
        algorithm = config.text("quant_algo", "an unknown algorithm")
        if algorithm != "FP8":
            raise refused(f"modelopt's {algorithm}")
        return cls(None)

    @property
    def label(self) -> str:
        return "FP8" if self.block is None else f"FP8 in blocks of {self.block[0]} × {self.block[1]}"

    def header(self, parts: Parts[T]) -> tuple[Shape, Packing]:
        shape = float8_shape(parts, _scale_name(parts), self.block)
        return shape, float8_packing(shape)

    def weight(self, parts: Parts[WeightArray]) -> QuantizedWeight:
        return float8_weight(parts, _scale_name(parts), self.block)


def block_size(config: ConfigReader, key: str) -> Tile | None:
    """How many rows and columns share a scale; None if the config does not say."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise config.bad(key, value, "a list of two sizes")
    sizes = [ConfigReader({key: each}, config.source).integer(key) for each in value]
    return sizes[0], sizes[1]


def _scale_name(parts: Parts[T]) -> str:
    found = [name for name in _NAMES if name in parts]
    if len(found) > 1:
        raise parts.wrong(found[0], f"cannot stand beside {found[1]!r}")
    return found[0] if found else _NAMES[0]
