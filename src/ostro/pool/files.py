"""What the pool knows about models' files: whether they are on this machine, and how to keep them there while in
use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ostro.pool.catalog import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """A model's files on this machine. Nobody deletes them before `close` is called."""

    path: str
    name: str | None
    """What their source calls the model; None where only the files tell."""
    close: Callable[[], None]
    adapters: tuple[tuple[str, str], ...] = ()
    """Of its adapters, too: their names and directories."""
    tokenizer: str | None = None
    """Of the tokenizer, where that was named apart from the model."""


class ModelFiles(Protocol):
    """Gets the files of models, and of their adapters, onto this machine. Both raise OstroError, and give up when they
    are cancelled.
    """

    async def find(self, spec: ModelSpec) -> Files | None:
        """What is here already, in a moment; None if it must be fetched."""

    async def fetch(self, spec: ModelSpec) -> Files:
        """However long that takes. What has arrived when it is cancelled need not be fetched again."""
