"""A reference to a model in an object store."""

from dataclasses import dataclass, replace
from pathlib import Path

from ostro.sources.address import StoreAddress
from ostro.sources.model_reference import RemoteFiles


@dataclass(frozen=True, slots=True)
class StoredModel:
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
