"""Tracks one choice through its grammar: `engine.constraint.Matcher` on llguidance. Knows tokens; no schemas."""

import logging
from array import array
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from ostro.engine.constraint import Constraint
from ostro.errors import OstroError, SequenceFailed, StructureFailed
from ostro.grammar.vocabulary import WORD_BITS, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

# Line break tokens that a model may write between its reasoning and the text that the grammar describes.
_MAX_BREAKS = 2


def _contained(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Turns any failure of the library into an error of one choice, so that other requests in the step go on."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except (OstroError, KeyboardInterrupt, SystemExit):
            raise
        # A Rust panic in the library is not an Exception.
        except BaseException as error:
            _log.exception("A grammar failed.")
            raise _structure_failed(str(error)) from error

    return call


class GrammarMatcher:
    """Owns a copy of a compiled grammar, and checks after every call whether it failed: a failed grammar allows only
    the end of the output, which would make it look complete.
    """

    def __init__(self, inner: "LLMatcher", vocabulary: Vocabulary, constraint: Constraint) -> None:
        self._inner, self._vocabulary, self._constraint = inner, vocabulary, constraint
        self._make_room()
        self._marker = constraint.free_until.encode()
        # The end of the output so far, which may hold the start of the marker; None once the marker was found.
        self._tail: bytes | None = b"" if self._marker else None
        self._num_free = 0
        # Tokens of the marker that are still to come once it is due.
        self._due: list[int] = []
        self._num_breaks = 0
        self._keep_budget()

    @_contained
    def copy(self) -> Self:
        twin = copy(self)
        twin._inner = self._inner.deep_copy()
        twin._due = list(self._due)
        twin._make_room()
        return twin

    def _make_room(self) -> None:
        """Allocates the words of masks, which are the matcher's own."""
        self._words = array("I", bytes(4 * self._vocabulary.num_words))
        self._view, self._address = memoryview(self._words), self._words.buffer_info()[0]

    @_contained
    def mask(self) -> memoryview | None:
        if self._due:
            return self._only(self._due[0])
        if self.is_free:
            # An end within the reasoning would pass for a complete, empty answer.
            return None if self._constraint.lazy else self._vocabulary.endless_mask
        self._inner.unsafe_compute_mask_ptr(self._address, self._view.nbytes)
        self._check()
        if self._is_open:
            self._allow(self._vocabulary.special_words)
        if self._num_breaks:
            self._allow(self._vocabulary.line_break_words)
        return self._view

    @_contained
    def take(self, token_id: int) -> None:
        if self._tail is not None:
            self._search(token_id)
        elif self._num_breaks and self._is_break(token_id):
            self._num_breaks -= 1
        elif token_id in self._vocabulary.eos_ids:
            # It ends the sequence. The library consumes it in some states and not in others.
            return
        elif self._is_open:
            # A token that does not match is a special token within free text.
            self._inner.try_consume_tokens([token_id])
            self._check()
        else:
            self._num_breaks = 0
            self._inner.consume_token(token_id)
            self._check()

    @_contained
    def forced(self) -> list[int]:
        if not self._constraint.jump_forward or self.is_done:
            return []
        if self._tail is not None:
            return list(self._due)
        if self._is_open:
            return []
        tokens = self._inner.compute_ff_tokens()
        num_valid = self._inner.validate_tokens(tokens) if tokens else 0
        self._check()
        return tokens[:num_valid]

    @property
    @_contained
    def is_done(self) -> bool:
        return self._tail is None and self._inner.is_stopped() and not self._inner.is_error()

    @property
    def is_free(self) -> bool:
        return self._tail is not None and not self._due

    @property
    def _is_open(self) -> bool:
        """Whether the output is in a lazy grammar's free text, where special tokens that it does not name may occur."""
        return self._constraint.lazy and self._inner.is_accepting()

    def _allow(self, words: list[tuple[int, int]]) -> None:
        for index, word in words:
            self._words[index] |= word

    def _is_break(self, token_id: int) -> bool:
        """Whether it is a line break that the grammar itself does not allow here."""
        return token_id in self._vocabulary.line_breaks and not self._inner.validate_tokens([token_id])

    def _keep_budget(self) -> None:
        """Makes the marker due once `free_tokens` tokens have come without it."""
        if self._tail is not None and self._num_free == self._constraint.free_tokens:
            self._due = self._vocabulary.marker_ids(self._constraint.free_until)

    def _only(self, token_id: int) -> memoryview:
        words = array("I", bytes(4 * self._vocabulary.num_words))
        words[token_id // WORD_BITS] = 1 << token_id % WORD_BITS
        return memoryview(words)

    def _search(self, token_id: int) -> None:
        """Looks for the marker. The grammar begins right after it, even in the middle of a token."""
        tokens = self._vocabulary.tokens
        text = (self._tail or b"") + (tokens[token_id] if token_id < len(tokens) else b"")
        _, found, rest = text.partition(self._marker)
        if not found:
            self._tail = text[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""
            self._num_free += 1
            if self._due and token_id == self._due[0]:
                del self._due[0]
            self._keep_budget()
            return
        self._tail, self._due, self._num_breaks = None, [], _MAX_BREAKS
        pieces = self._vocabulary.tokenizer.tokenize_bytes(rest) if rest else []
        num_taken = self._inner.try_consume_tokens(pieces)
        self._check()
        left = b"".join(tokens[piece] for piece in pieces[num_taken:])
        if left.strip():
            raise SequenceFailed(
                f"The output after {self._constraint.free_until!r} began in the middle of a token, and with "
                f"{left.decode(errors='replace')!r}, which its structure does not allow. Try again."
            )

    def _check(self) -> None:
        if self._inner.is_error():
            raise _structure_failed(self._inner.get_error())


def _structure_failed(reason: str) -> SequenceFailed:
    return SequenceFailed(
        f"{StructureFailed.opening} any further: {first_line(reason)}. Simplify the schema or grammar."
    )


def first_line(message: str) -> str:
    """The message without the parser's state, fit to be embedded in a sentence."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return (lines[0] if lines else "no reason is known").rstrip(".")
