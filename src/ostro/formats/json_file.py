"""Reads JSON files that come with a model, checking size and type. Does not interpret them."""

import json
from pathlib import Path

from ostro.errors import BadCheckpoint, ModelNotFound

# The largest legitimate ones are shard indexes of a few megabytes.
MAX_BYTES = 64 << 20


def read_json_object(path: Path) -> dict[str, object]:
    return _object(path, _read(path))


def parse_json_object(path: Path, text: bytes) -> dict[str, object]:
    """What `read_json_object` returns for a file with this content."""
    return _object(path, _parse(path, text))


def read_json_list(path: Path) -> list[object]:
    value = _read(path)
    if not isinstance(value, list):
        raise BadCheckpoint(f"{path} should hold a JSON list but holds a {type(value).__name__}. Download it again.")
    return value


def _object(path: Path, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} should hold a JSON object but holds a {type(value).__name__}. Download it again.")
    return value


def _read(path: Path) -> object:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadCheckpoint(f"{path} is larger than {MAX_BYTES >> 20} MiB, which no model's JSON file is.")
        text = path.read_bytes()
    except FileNotFoundError:
        raise ModelNotFound(f"There is no file {path}, and the model needs it. Download the model again.") from None
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error.strerror or error}.") from error
    return _parse(path, text)


def _parse(path: Path, text: bytes) -> object:
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not valid JSON ({error}). Download it again.") from error
