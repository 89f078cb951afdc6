"""What every model reference can do, wherever its files are. `sources.references` parses one. Knows no place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class RemoteFiles(Protocol):
    """A model's files where they are. Safe to use from several threads."""

    @property
    def name(self) -> str:
        """The model's, for display."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """In bytes, by the names they have in the model's directory."""

    def read(self, name: str, start: int, end: int) -> bytes: ...


class ModelReference(Protocol):
    """A reference, parsed. Immutable; all but the names may read disks, and `fetch` and `remote_files` the network."""

    @property
    def name(self) -> str:
        """What to call the model if nobody has named it: never empty, and the same before it is loaded and after."""

    @property
    def label(self) -> str | None:
        """What the reference itself calls the model; None where its files tell."""

    def find(self, *, newest: bool = True, tokenizer_only: bool = False) -> Path | None:
        """The directory or the file, if all of it is on this machine. Asks nobody: None where the `newest` version is
        wanted and only the network knows which that is.
        """

    def fetch(self, *, progress: bool, newest: bool = False, tokenizer_only: bool = False) -> Path:
        """The directory or the file, downloaded as far as it is not on this machine. With `newest`, its source is asked
        for a newer version even where the cache would do; with `tokenizer_only`, no weights are fetched where the
        tokenizer has files of its own.
        """

    def remote_files(self) -> RemoteFiles | None:
        """The files where they lie, to read parts of them; None for a model that is only ever fetched whole."""
