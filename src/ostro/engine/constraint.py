"""What a request's output must match, and who keeps track of it: the engine's side. Knows no text and no library."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What each choice of a request must match. It was checked before: compiling it is safe, and takes milliseconds."""

    grammar: str
    """In llguidance's own notation."""
    free_until: str = ""
    """The grammar begins after the first occurrence of this text in the output: any token may come before that, but
    the output may not end there, unless it is lazy."""
    free_tokens: int | None = None
    """After so many tokens without `free_until`, that text is the only one that may come."""
    lazy: bool = False
    """Tokens are masked only where the output could not end. Where it could, any token may come, and one that the
    grammar has no place for is passed over."""
    jump_forward: bool = False
    """Whether tokens that are the only possible ones are appended without being sampled."""
    is_users: bool = False
    """Whether a user wrote the grammar: then a step may cost less."""


class Matcher(Protocol):
    """Where one choice stands in its grammar. One thread at a time; different matchers run in parallel.

    Each method raises SequenceFailed where the grammar cannot be followed any further: an error of that choice alone,
    and never a reason to end it as if it were complete.
    """

    def mask(self) -> memoryview | None:
        """Which tokens may come next: 32-bit words, token i at bit i % 32 of word i // 32, for the whole width of the
        logits. At least one bit is set. None if any may. The words are valid until the next call.
        """
        ...

    def take(self, token_id: int) -> None:
        """The token is the next one of the output. A token that ends the sequence may be left out."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, if there is only one way to go on; empty if the constraint does not ask for them.
        They are not taken yet.
        """
        ...

    @property
    def is_done(self) -> bool:
        """Whether the output is complete, and nothing may follow but its end."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether the grammar has not begun. A mask only keeps the sequence from ending then."""
        ...


class Prototype(Protocol):
    """A compiled constraint. Safe to share between threads."""

    def start(self) -> Matcher:
        """A matcher for one choice, before its first token. Takes microseconds."""
        ...


class Grammars(Protocol):
    """Compiles constraints for one model. Safe to share between threads."""

    def prepare(self, constraint: Constraint) -> Prototype:
        """Compiled, or found among those that were before. Takes milliseconds, and seconds for a model's first, since
        its vocabulary is read then: do not call it between steps. Raises BadRequest if it cannot be compiled.
        """
        ...
