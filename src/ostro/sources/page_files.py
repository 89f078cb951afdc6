"""Files in which servers keep a model's cached prefixes across restarts: their names, and removal. Knows no format.

ROOT/pages/NAME-PLACE.pages     PLACE is a digest of the path of the model's directory or file
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from ostro.errors import BadRequest, ModelNotFound
from ostro.sources.cache import cache_root
from ostro.sources.locks import alone
from ostro.sources.store import Entry, ModelStore

PAGES = "pages"
_SUFFIX = ".pages"


def pages_root() -> Path:
    return cache_root() / PAGES


def page_file_name(name: str, model: Path) -> str:
    """The name says where the model is: when its content or its settings change, the file starts over."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)[:80]}-{_place(model)}{_SUFFIX}"


def kept_pages(store: ModelStore) -> list[Entry]:
    """All such files in the cache, least recently used first. Each refers to its model's path if the model is in the
    cache, otherwise to itself.
    """
    models = {place: entry for entry in store.entries() for place in _places(entry.path)}
    found = []
    for path in (store.root / PAGES).glob(f"*{_SUFFIX}"):
        model = models.get(path.stem.rpartition("-")[2])
        with alone(path) as is_idle:
            in_use = not is_idle
        try:
            facts = path.stat()
        except OSError:
            # Just removed.
            continue
        reference = path if model is None else model.path
        name = f"{PAGES}/{path.stem}"
        found.append(Entry(name, str(reference), path, facts.st_size, facts.st_mtime, in_use, None))
    return sorted(found, key=lambda entry: entry.last_use)


def remove_pages(path: Path) -> None:
    """Deletes the file; refuses if a server uses it."""
    with alone(path) as is_ours:
        if is_ours:
            path.unlink()
        elif path.exists():
            raise BadRequest(f"{path.name} is in use. Stop what serves it, then try again.")
        else:
            raise ModelNotFound(f"{path.name} is no longer in the cache.")


def _places(model: Path) -> Iterator[str]:
    """The places of a model's directory and of its GGUF files, each of which is a model by itself."""
    yield _place(model)
    for path in model.rglob("*.gguf"):
        yield _place(path)


def _place(model: Path) -> str:
    return hashlib.sha256(str(model).encode()).hexdigest()[:12]
