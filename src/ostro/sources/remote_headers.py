"""A remote model, described by its config and the headers of its files. Downloads no weights.

there   config.json   model.safetensors  ┌ header ┬ weights ─────────────┐
here    config.json   model.safetensors  └ header ┴ a hole of that size ─┘

The hollow copy has every file name and size, so the model can be opened like a complete one.
"""

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ostro.errors import DiskFull, DownloadFailed, ModelError, ModelNotFound
from ostro.formats.gguf_header import read_gguf_header
from ostro.formats.json_file import MAX_BYTES
from ostro.sources.address import StoreAddress, is_plain_path
from ostro.sources.base import ObjectChanged, Transient, with_retries
from ostro.sources.clients import open_source
from ostro.sources.files import INDEX, PICKLE, PICKLE_INDEX, SINGLE, is_first_gguf
from ostro.sources.model_reference import RemoteFiles

_CONFIG = "config.json"
_GGUF = re.compile(r"(?:-\d{5}-of-\d{5})?\.gguf$")
_THREADS = 8
# Enough for most safetensors headers. GGUF headers contain a vocabulary and do not state their length.
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 128 << 20


class ObjectFiles:
    """The files of a model in an object store."""

    def __init__(self, model: StoreAddress) -> None:
        self.name = model.name
        self._model = model
        self._source = open_source(model)
        stem = _GGUF.sub("", model.key)
        # One GGUF file or all shards of one model; otherwise a directory.
        prefix = stem if stem != model.key else model.directory
        directory = prefix[: prefix.rfind("/") + 1]
        listed = with_retries(f"Listing {model}", lambda: list(self._source.list(prefix)))
        if stem != model.key:
            listed = [info for info in listed if _GGUF.sub("", info.key) == stem]
        if not listed:
            raise ModelNotFound(f"There is nothing at {model}. Check the name.")
        self._objects = {info.key.removeprefix(directory): info for info in listed}
        self.sizes = {name: info.size for name, info in self._objects.items()}

    def read(self, name: str, start: int, end: int) -> bytes:
        info = self._objects[name]

        def attempt() -> bytes:
            data = b"".join(self._source.read(info.key, info.generation, start, end))
            if len(data) != end - start:
                raise Transient("the answer was cut short")
            return data

        try:
            return with_retries(f"Reading {name} of {self._model}", attempt)
        except ObjectChanged as error:
            raise DownloadFailed(f"{error} while it was read. Try again.") from error


@contextmanager
def hollow_copy(files: RemoteFiles) -> Iterator[Path]:
    """A temporary directory with the model's config and the headers of its weight files."""
    try:
        scratch = TemporaryDirectory(prefix="ostro-")
    except OSError as error:
        raise _cannot_write("a temporary directory", error) from error
    with scratch as place:
        try:
            _fill(Path(place), files)
        except OSError as error:
            raise _cannot_write(place, error) from error
        yield Path(place)


def _cannot_write(place: str, error: OSError) -> DiskFull:
    reason = error.strerror or error
    return DiskFull(f"Cannot write headers to {place} ({reason}). Set TMPDIR to another directory.")


def _fill(directory: Path, files: RemoteFiles) -> None:
    for name in files.sizes.keys() & {_CONFIG, INDEX, PICKLE_INDEX}:
        (directory / name).write_bytes(_read_small(files, name))
    weights = _weight_files(directory, files.sizes)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="headers") as threads:
        for _ in threads.map(lambda name: _copy_header(files, name, directory / name), weights):
            pass


def _read_small(files: RemoteFiles, name: str) -> bytes:
    size = files.sizes[name]
    if size > MAX_BYTES:
        raise DownloadFailed(f"{name} has {size} bytes, more than any model's JSON file.")
    return files.read(name, 0, size) if size else b""


def _weight_files(directory: Path, sizes: Mapping[str, int]) -> list[str]:
    """The files that will be opened; opening them reports any problem."""
    if INDEX in sizes and _CONFIG in sizes:
        return sorted(_indexed(directory / INDEX) & sizes.keys())
    if SINGLE in sizes and _CONFIG in sizes:
        return [SINGLE]
    models = [name for name in sizes if name.endswith(".gguf") and _is_file_name(name)]
    if sum(is_first_gguf(name) for name in models) > 1:
        names = ", ".join(sorted(models))
        raise ModelNotFound(f"There are several models ({names}). Give the address of one.")
    if not models and PICKLE_INDEX in sizes:
        return sorted(_indexed(directory / PICKLE_INDEX) & sizes.keys())
    return models or [name for name in (PICKLE,) if name in sizes]


def _indexed(index: Path) -> set[str]:
    try:
        return {file for file in json.loads(index.read_bytes())["weight_map"].values() if _is_file_name(file)}
    except (ValueError, TypeError, KeyError, AttributeError):
        return set()


def _is_file_name(name: str) -> bool:
    return is_plain_path(name) and "/" not in name


def _copy_header(files: RemoteFiles, name: str, path: Path) -> None:
    size = min(files.sizes[name], _MOST_BYTES)
    with path.open("w+b") as file:
        file.truncate(files.sizes[name])
        if path.suffix == ".bin":
            # A pickle has no header: planning uses its size.
            return
        fetched, wanted = 0, _FIRST_BYTES
        while fetched < min(wanted, size):
            data = files.read(name, fetched, min(wanted, size))
            file.seek(fetched)
            file.write(data)
            file.flush()
            fetched += len(data)
            wanted = _header_bytes(path, fetched)


def _header_bytes(path: Path, fetched: int) -> int:
    """The header's size in bytes; for a GGUF header that is still incomplete, how many bytes to read next."""
    if path.suffix == ".gguf":
        try:
            header = read_gguf_header(path)
        except ModelError:
            return 2 * fetched
        # If the weights start beyond the fetched bytes, part of the hole was parsed as header.
        begin = min((tensor.offset for tensor in header.tensors), default=_MOST_BYTES)
        return fetched if begin <= fetched else 2 * fetched
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
