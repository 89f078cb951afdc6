"""Compiles constraints for one model and caches the results. Checks no schema: see `checker`."""

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest
from ostro.grammar.limits import STEPS, USERS_STEPS
from ostro.grammar.lru import Lru
from ostro.grammar.matcher import GrammarMatcher, first_line
from ostro.grammar.vocabulary import TokenizerLike, Vocabulary, require_llguidance

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_GRAMMARS = 64
_MAX_CHARACTERS = 1 << 22
"""Total length of all cached grammars, since their compiled size grows with it."""


class NotCompiled(BadRequest):
    """The library refused a grammar."""

    def __init__(self, error: str) -> None:
        """`error` is the library's message, including the parser's state."""
        self.error = error
        self.reason = _reason(error)
        super().__init__(f"The structured output cannot be compiled: {self.reason}.", param="structured")


class GrammarCompiler:
    """Implements `engine.constraint.Grammars`. The vocabulary is read for the first constraint."""

    def __init__(self, load_tokenizer: Callable[[], TokenizerLike], width: int) -> None:
        """`width` is the width of the logits."""
        self._load_tokenizer, self._width = load_tokenizer, width
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._compiled: Lru[Constraint, _Compiled] = Lru(_MAX_GRAMMARS, _MAX_CHARACTERS)

    def prepare(self, constraint: Constraint) -> "GrammarPrototype":
        # Constraints that differ only in other fields share the compiled grammar.
        key = Constraint(grammar=constraint.grammar, is_users=constraint.is_users)
        found = self._compiled.get(key)
        if found is None:
            # Two threads may compile the same grammar; either result will do.
            found = _Compiled(compile_grammar(self.vocabulary.tokenizer, key))
            self._compiled.put(key, found, len(key.grammar))
        return GrammarPrototype(found, self.vocabulary, constraint)

    @property
    def vocabulary(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._load_tokenizer(), self._width)
            return self._vocabulary


class GrammarPrototype:
    """Implements `engine.constraint.Prototype`: each choice gets a copy of the compiled grammar."""

    def __init__(self, compiled: "_Compiled", vocabulary: Vocabulary, constraint: Constraint) -> None:
        self._compiled, self._vocabulary, self._constraint = compiled, vocabulary, constraint

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self._compiled.copy(), self._vocabulary, self._constraint)


class _Compiled:
    """A compiled grammar in its initial state."""

    def __init__(self, inner: "LLMatcher") -> None:
        self._inner = inner
        # The library refuses concurrent calls on one matcher.
        self._copying = threading.Lock()

    def copy(self) -> "LLMatcher":
        with self._copying:
            return self._inner.deep_copy()


def compile_grammar(tokenizer: "LLTokenizer", constraint: Constraint) -> "LLMatcher":
    """Compiles the grammar and computes its first mask. Raises NotCompiled, with a one-line message, if that fails."""
    require_llguidance()
    from llguidance import LLMatcher, LLParserLimits

    steps = USERS_STEPS if constraint.is_users else STEPS
    limits = LLParserLimits(
        step_max_items=steps.max_items,
        max_items_in_row=steps.items_in_row,
        step_lexer_fuel=steps.lexer_fuel,
        max_lexer_states=steps.lexer_states,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, constraint.grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        # Some grammars only fail here, and copies reuse the work of the first mask.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise NotCompiled(matcher.get_error())
    return matcher


def _reason(error: str) -> str:
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    if "regex parse error" in error and (match := re.search(r"error: (.*)", error)):
        return match[1]
    return first_line(re.sub(r"^(?:at )?\d+\(\d+\): ", "", error))
