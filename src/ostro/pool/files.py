"""The pool's interface to models' files: are they on this machine, and how to keep them there while in use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ostro.pool.catalog import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """A model's files on this machine, protected from deletion until `close` is called."""

    path: str
    name: str | None
    """The source's name for the model; None if it follows from the files."""
    close: Callable[[], None]
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and directories of its adapters."""
    tokenizer: str | None = None
    """The tokenizer's path, if it was configured separately."""


class ModelFiles(Protocol):
    """Brings files of models and adapters to this machine. Both methods raise OstroError, and stop when cancelled."""

    async def find(self, spec: ModelSpec) -> Files | None:
        """Files that are already here, quickly; None if they must be downloaded."""

    async def fetch(self, spec: ModelSpec) -> Files:
        """May take any amount of time. If cancelled, downloaded bytes are kept."""
