"""The interface of every model reference, independent of the source. `sources.references` parses them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class RemoteFiles(Protocol):
    """A model's files at their source. Thread-safe."""

    @property
    def name(self) -> str:
        """The model's display name."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes in bytes, keyed by path within the model's directory."""

    def read(self, name: str, start: int, end: int) -> bytes: ...


class ModelReference(Protocol):
    """A parsed reference. Immutable. May read the disk; only `fetch` and `remote_files` use the network."""

    @property
    def name(self) -> str:
        """The model's default name: never empty, and the same before and after loading."""

    @property
    def label(self) -> str | None:
        """The name that the reference itself gives the model; None if it follows from the files."""

    def find(self, *, newest: bool = True, tokenizer_only: bool = False) -> Path | None:
        """The model's directory or file, if it is complete on this machine. Uses no network: None if `newest` is wanted
        and only the source knows which version that is.
        """

    def fetch(self, *, progress: bool, newest: bool = False, tokenizer_only: bool = False) -> Path:
        """The model's directory or file, downloading what is missing. `newest` asks the source for a newer version even
        if the model is cached; `tokenizer_only` skips the weights if the tokenizer has separate files.
        """

    def remote_files(self) -> RemoteFiles | None:
        """The files at their source, for range reads; None for a model that is only ever downloaded whole."""
