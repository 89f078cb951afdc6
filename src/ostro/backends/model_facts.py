"""What identifies a model's files: their contents, not their location. Reads a sample of each."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ostro.sources.store import ModelStore
from ostro.weights import Checkpoint

# One block per stretch, up to a maximum per file: a few milliseconds of reading for a file of any size.
_BLOCK = 4096
_STRETCH = 1 << 20
_MOST_BLOCKS = 256


def model_facts(checkpoint: Checkpoint) -> list[list[object]]:
    """What identifies a model's files."""
    store = ModelStore()
    return [_file_facts(path, store) for path in checkpoint.files]


def sample_of(path: Path) -> str:
    """A digest of blocks spread over the whole file; for a small file, of all its bytes."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for at, num_bytes in _blocks(path.stat().st_size):
            file.seek(at)
            digest.update(file.read(num_bytes))
    return digest.hexdigest()


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    if size <= _STRETCH:
        yield 0, size
        return
    count = min(_MOST_BLOCKS, size // _STRETCH + 1)
    yield from (((size - _BLOCK) * number // (count - 1), _BLOCK) for number in range(count))


def _file_facts(path: Path, store: ModelStore) -> list[object]:
    status = path.stat()
    record = store.record(path)
    # The checksum that a download was verified against identifies it better than its mtime.
    version = status.st_mtime_ns if record is None else [record.generation, record.crc32c, record.sha256]
    return [status.st_size, version, sample_of(path)]
