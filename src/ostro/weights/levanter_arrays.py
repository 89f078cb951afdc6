"""The arrays of a Levanter checkpoint, read with TensorStore. Knows their layout on disk; knows no models.

until 2025-11    NAME/.zarray and chunks beside it, a directory per array
since then       manifest.ocdbt, d/…: one key-value database in which arrays share files
since 2026-08    the same, with a manifest.json that states the version
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ostro.errors import BadCheckpoint, Unsupported, UnsupportedModel
from ostro.formats.json_file import read_json_object
from ostro.system.requirements import needs

if TYPE_CHECKING:
    import numpy.typing as npt
    import tensorstore

MANIFEST = "manifest.json"
DATABASE = "manifest.ocdbt"
MODEL = "model"
_MANIFEST_VERSION = 1
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_DAMAGED = "The checkpoint was not copied whole or is damaged. Copy it again."

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredArray:
    path: str
    shape: tuple[int, ...]
    dtype: str
    _store: "tensorstore.TensorStore"

    @property
    def rows_per_chunk(self) -> int:
        """How far a chunk extends along the first axis."""
        return min(self._chunk_shape[0], self.shape[0])

    def decoded_bytes(self, rows: int) -> int:
        """The size of all chunks that hold this many rows, from the first one on."""
        extents = zip((rows, *self.shape[1:]), self._chunk_shape, strict=True)
        return prod(-(-extent // chunk) * chunk for extent, chunk in extents) * self._store.dtype.numpy_dtype.itemsize

    def read(self) -> "npt.NDArray[Any]":
        """The array's values; bfloat16 as uint16 bits."""
        return self._read(self._store)

    def read_rows(self) -> Iterator["npt.NDArray[Any]"]:
        """Its slices along the first axis, in order. At most one row of chunks is in memory."""
        step = self.rows_per_chunk
        for start in range(0, self.shape[0], step):
            yield from self._read(self._store[start : min(start + step, self.shape[0])])

    def read_box(self, box: tuple[slice, ...]) -> "npt.NDArray[Any]":
        """A part of it. Chunks are decoded one after another: several at a time would double the memory for them."""
        for corner in product(*map(_chunk_starts, box, self._chunk_shape)):
            _result(self._store[corner].read(), f"Cannot read the array {self.path!r}")
        return self._read(self._store[box])

    @property
    def _chunk_shape(self) -> tuple[int, ...]:
        return tuple(size or 1 for size in self._store.chunk_layout.read_chunk.shape or self.shape)

    def _read(self, part: "tensorstore.TensorStore") -> "npt.NDArray[Any]":
        values = _result(part.read(order="C"), f"Cannot read the array {self.path!r}")
        return values.view("uint16") if self.dtype == "bfloat16" else values


class LevanterArrays:
    """A model's arrays, keyed by path in the checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensorstore = _tensorstore()
        self._in_database = _is_database(directory)

    @cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(self._listed_in_database() if self._in_database else self._listed_directories())

    def open(self, path: str, *, cache_bytes: int = 0) -> StoredArray:
        """Keeps up to `cache_bytes` of decoded chunks as long as the array is in use."""
        if path not in self.paths:
            raise BadCheckpoint(f"{self._directory} has no array {path!r}, which the model's settings ask for.")
        context = self._tensorstore.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
        opened = self._tensorstore.open(self._spec(path), read=True, context=context)
        store = _result(opened, f"Cannot open the array {path!r}")
        dtype = store.dtype.name
        if dtype not in _FLOATS:
            raise BadCheckpoint(f"The array {path!r} of {self._directory} holds {dtype}, not floating-point numbers.")
        return StoredArray(path, tuple(store.shape), dtype, store)

    def _spec(self, path: str) -> dict[str, Any]:
        if self._in_database:
            return {"driver": "zarr3", "kvstore": {**self._database(), "path": path}}
        place = self._directory / path
        kvstore = {"driver": "file", "path": str(place.absolute())}
        if not (place / ".zarray").is_file():
            return {"driver": "zarr3", "kvstore": kvstore}
        # Every chunk is written, so a missing one was lost and must not read as zeros.
        return {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}

    def _database(self) -> dict[str, Any]:
        return {"driver": "ocdbt", "base": {"driver": "file", "path": str(self._directory.absolute())}}

    def _listed_in_database(self) -> Iterator[str]:
        what = f"Cannot read {self._directory / DATABASE}"
        store = _result(self._tensorstore.KvStore.open(self._database()), what)
        keys = _result(store.list(self._tensorstore.KvStore.KeyRange(f"{MODEL}/", f"{MODEL}0")), what)
        names = (key.decode("utf-8", "replace") for key in keys)
        yield from (name.removesuffix("/zarr.json") for name in names if name.endswith("/zarr.json"))

    def _listed_directories(self) -> Iterator[str]:
        for folder, below, files in os.walk(self._directory / MODEL):
            if ".zarray" in files or "zarr.json" in files:
                below.clear()
                yield Path(folder).relative_to(self._directory).as_posix()


def _chunk_starts(part: slice, size: int) -> Iterator[int]:
    """Where a range enters each chunk that it overlaps."""
    return (max(start, part.start) for start in range(part.start // size * size, part.stop, size))


def _is_database(directory: Path) -> bool:
    has_database = (directory / DATABASE).is_file()
    if not (directory / MANIFEST).is_file():
        return has_database
    manifest = read_json_object(directory / MANIFEST)
    version = manifest.get("format_version")
    drivers = manifest.get("array_driver"), manifest.get("kvstore_driver")
    if version != _MANIFEST_VERSION or drivers != ("zarr3", "ocdbt"):
        raise UnsupportedModel(
            f"{directory / MANIFEST} states version {version!r} with {' over '.join(map(str, drivers))}; Ostro reads "
            f"version {_MANIFEST_VERSION} with zarr3 over ocdbt. Use a newer Ostro, or export the model with Levanter."
        )
    if not has_database:
        raise BadCheckpoint(f"{directory} has {MANIFEST} but no {DATABASE}. {_DAMAGED}")
    return True


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise Unsupported(needs("A Levanter checkpoint", "levanter"), param="model") from error
    return tensorstore


def _result(future: "tensorstore.Future[T]", what: str) -> T:
    try:
        return future.result()
    except (ValueError, RuntimeError, LookupError, OSError) as error:
        # After the bracket, the message repeats the whole spec.
        reason = " ".join(str(error).partition(" [")[0].split())
        raise BadCheckpoint(f"{what} ({reason}). {_DAMAGED}") from error
