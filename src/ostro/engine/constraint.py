"""Constraints on a request's output, and the matchers that enforce them: the engine's protocols. Knows no text and no
grammar library.
"""

from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What each choice of a request must match. Already checked: compiling it is safe and takes milliseconds."""

    grammar: str
    """The grammar in llguidance's notation."""
    free_until: str = ""
    """The grammar begins after the first occurrence of this text in the output. Any token is allowed before that, but
    the output may not end there unless it is lazy."""
    free_tokens: int | None = None
    """After this many tokens without `free_until`, that text is forced."""
    lazy: bool = False
    """Tokens are masked only where the output could not end. Where it could, any token is allowed, and the matcher
    skips one that does not fit the grammar."""
    jump_forward: bool = False
    """Whether tokens without an alternative are appended without being sampled."""
    is_users: bool = False
    """Whether a user wrote the grammar: such a grammar gets tighter limits on the cost of a step."""


class Matcher(Protocol):
    """One choice's position in its grammar. Not thread-safe, but different matchers may run in parallel.

    Each method raises SequenceFailed if the grammar cannot be followed any further. That fails this choice alone, which
    must not end as if it were complete.
    """

    def mask(self) -> memoryview | None:
        """Which tokens may come next: 32-bit words, token i at bit i % 32 of word i // 32, for the whole width of the
        logits. At least one bit is set. None if any token may come. The words are valid until the next call.
        """
        ...

    def take(self, token_id: int) -> None:
        """Advances by the output's next token. A token that ends the sequence may be left out."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, if there is only one way to go on; empty unless the constraint asks for them.
        Does not take them.
        """
        ...

    def copy(self) -> Self:
        """An independent matcher at the same position."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the output is complete and must end."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether the grammar has not begun. Until then a mask only keeps the sequence from ending."""
        ...


class Prototype(Protocol):
    """A compiled constraint. Safe to share between threads."""

    def start(self) -> Matcher:
        """A matcher for one choice, before its first token. Takes microseconds."""
        ...


class Grammars(Protocol):
    """Compiles constraints for one model. Safe to share between threads."""

    def prepare(self, constraint: Constraint) -> Prototype:
        """Compiles the constraint, or finds it in a cache. Takes milliseconds, but seconds for a model's first, which
        reads the vocabulary: do not call it between steps. Raises BadRequest if it cannot be compiled.
        """
        ...
