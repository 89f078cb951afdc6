"""A model's config.json: typed access, bounds for its numbers, and errors that name the key. Knows no tensors and no
file formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import TypeGuard

from ostro.errors import BadCheckpoint

# Upper bounds for sizes: several times the largest published models.
MOST_LAYERS = 1024
MOST_HEADS = 4096
MOST_HEAD_DIM = 4096
MOST_HIDDEN = 1 << 20
MOST_INNER = 1 << 22
MOST_VOCAB = 1 << 24
MOST_EXPERTS = 4096
MOST_EXPERTS_OF_ALL_LAYERS = 1 << 17
MOST_CYCLES = 64
MOST_TAPS = 64
MOST_POSITIONS = (1 << 31) - 1

# Allowed ranges.
EPS = (1e-20, 1.0)
THETA = (1.0 + 1e-6, 1e15)
FACTOR = (1e-3, 1e6)
STRENGTH = (1e-6, 1e3)

# Ten times the longest context and the widest layer in use.
LARGEST = 100_000_000
# Default range of a number: within float32, with room for multiplication.
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A config.json, or equivalent settings from another file. A null value counts as absent, following Hugging Face's
    convention.
    """

    values: Mapping[str, object]
    source: str = "config.json"
    """The file's name in errors."""

    def get(self, key: str) -> object:
        return self.values.get(key)

    def with_defaults(self, defaults: Mapping[str, object]) -> "ConfigReader":
        """The same, with these values for the keys that are absent."""
        given = {key: value for key, value in self.values.items() if value is not None}
        return ConfigReader({**defaults, **given}, self.source)

    def integer(self, key: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """A size or a count: always positive."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise BadCheckpoint(f"{self.source}: {key!r} must be an integer from 1 to {most}, got {shown(value)}.")
        return value

    def count(self, key: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """Like `integer`, or 0."""
        value = self._value(key, default)
        return 0 if type(value) is int and value == 0 else self.integer(key, default, most=most)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        least: float = _SMALLEST_NUMBER,
        most: float = _LARGEST_NUMBER,
    ) -> float:
        """A positive number, such as a scale, base or cap."""
        value = self._value(key, default)
        if not _is_number(value, least, most):
            raise BadCheckpoint(f"{self.source}: {key!r} must be a number from {least} to {most}, got {shown(value)}.")
        return float(value)

    def within(self, key: str, limits: tuple[float, float], default: float | None = None) -> float:
        return self.number(key, default, least=limits[0], most=limits[1])

    def optional_number(
        self, key: str, limits: tuple[float, float] = (_SMALLEST_NUMBER, _LARGEST_NUMBER)
    ) -> float | None:
        return None if self.values.get(key) is None else self.within(key, limits)

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise BadCheckpoint(f"{self.source}: {key!r} must be true or false, got {shown(value)}.")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise BadCheckpoint(f"{self.source}: {key!r} must be a string, got {shown(value)}.")
        return value

    def table(self, key: str) -> Mapping[str, object] | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise BadCheckpoint(f"{self.source}: {key!r} must be an object, got {shown(value)}.")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise BadCheckpoint(f"{self.source}: {key!r} must be a list of strings, got {shown(value)}.")
        return tuple(value)

    def indices(self, key: str) -> tuple[int, ...]:
        """A list of non-negative integers; empty if absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or any(type(item) is not int or item < 0 for item in value):
            raise BadCheckpoint(f"{self.source}: {key!r} must be a list of non-negative integers, got {shown(value)}.")
        return tuple(value)

    def flags(self, key: str) -> tuple[bool, ...]:
        """A list of booleans, or of 1s and 0s; empty if absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or any(item not in (0, 1) for item in value):
            raise BadCheckpoint(
                f"{self.source}: {key!r} must be a list of booleans, or of 1s and 0s, got {shown(value)}."
            )
        return tuple(bool(item) for item in value)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._value(key, None)
        if not isinstance(value, list | tuple) or not all(map(_is_number, value)):
            raise BadCheckpoint(
                f"{self.source}: {key!r} must be a list of numbers from {_SMALLEST_NUMBER} to {_LARGEST_NUMBER}, "
                f"got {shown(value)}."
            )
        return tuple(float(item) for item in value)

    def bad(self, key: str, value: object, wanted: str) -> BadCheckpoint:
        """The error for a value that is valid by itself but contradicts another."""
        return BadCheckpoint(f"{self.source}: {key!r} is {shown(value)}, but it must be {wanted}.")

    @property
    def _cure(self) -> str:
        return "fetch the model again" if self.source == "config.json" else "add it there"

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise BadCheckpoint(f"{self.source} has no {key!r}, which this architecture needs; {self._cure}.")
        return default


def _is_number(value: object, least: float = _SMALLEST_NUMBER, most: float = _LARGEST_NUMBER) -> TypeGuard[int | float]:
    """Compares without conversion: a JSON integer may be too large for a float. NaN is never in range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
