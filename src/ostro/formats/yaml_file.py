"""Reads untrusted YAML with our own errors, and formats its values for messages."""

import reprlib
from pathlib import Path

import yaml

from ostro.errors import BadCheckpoint

MAX_BYTES = 1 << 20

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


def read_yaml(path: Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> object:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadCheckpoint(f"{path} is larger than {MAX_BYTES >> 20} MiB, which no model's settings are.")
        return yaml.load(path.read_text(encoding="utf-8"), loader)
    except (
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        # PyYAML lets through the exceptions that Python raises for malformed dates and numbers.
        raise BadCheckpoint(f"{path} is not valid YAML ({' '.join(str(error).split())}).") from error
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error.strerror or error}.") from error


def shown(value: object) -> str:
    """Truncated: an alias may expand to more than fits in memory, and Python refuses to print huge integers."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        return "a value too large to show"
