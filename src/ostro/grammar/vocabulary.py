"""A model's vocabulary in the form that llguidance needs. Knows tokenizers; knows no grammars."""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from ostro.errors import OstroError, Unsupported

if TYPE_CHECKING:
    from llguidance import LLTokenizer

WORD_BITS = 32

# Characters of forced text tokenised at a time: a step must not pay for a megabyte.
_MAX_CHARACTERS = 160
_MARGIN = 4
"""Tokens dropped at the cut, since they may differ from those of the whole text."""
_MAX_TEXTS = 1 << 14


class TokenizerLike(Protocol):
    """The part of `text.tokenizer.Tokenizer` that is needed here."""

    vocab_size: int
    eos_ids: frozenset[int]

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, id: int, /) -> bytes: ...

    def encode(self, text: str, /, *, add_special: bool = True, allow_special: bool = True) -> list[int]: ...


def require_llguidance() -> None:
    """Raises Unsupported if the library is not installed: it has no wheels for some platforms."""
    if not _is_installed():
        raise Unsupported(
            "Structured outputs and tool calls need the package llguidance, which is not installed here. Run: "
            "pip install llguidance (it needs a Rust compiler on platforms without a wheel), then restart.",
            param="structured",
        )


def _is_installed() -> bool:
    try:
        return find_spec("llguidance") is not None
    except (ImportError, ValueError):
        return False


class Vocabulary:
    """Takes up to a second to build, and about 100 MB for 150,000 tokens. Safe to share between threads."""

    def __init__(self, tokenizer: TokenizerLike, width: int) -> None:
        """`width` is the width of the logits, which may be more or less than the size of the vocabulary."""
        require_llguidance()
        from llguidance import LLTokenizer, TokenizerWrapper

        self.eos_ids = frozenset(token for token in tokenizer.eos_ids if token < width)
        self.tokens = [tokenizer.token_bytes(token) for token in range(width)]
        special_ids = sorted(token for token in tokenizer.special_ids if token < width)
        if not self.eos_ids:
            # The library requires one. It lies beyond the logits, so it is never sampled.
            self.tokens.append(b"")
        self.num_words = -(-len(self.tokens) // WORD_BITS)
        ends = sorted(self.eos_ids) or [width]
        source = _Source(tokenizer, self.tokens, special_ids, ends[0])
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(source), eos_token=ends)
        source.built = self.tokenizer
        self.special_words = _words(special_ids)
        """The words of a mask that hold special tokens, by index, with those tokens' bits."""
        self.line_breaks = frozenset(token for token, text in enumerate(self.tokens) if text in (b"\n", b"\n\n"))
        self.line_break_words = _words(sorted(self.line_breaks))
        self.endless_mask = self._endless_mask(width) if self.eos_ids else None
        """Allows all tokens except those that end a sequence; None if there are none of those."""

    def _endless_mask(self, width: int) -> memoryview:
        words = array("I", b"\xff" * (4 * self.num_words))
        for index, word in _words([*self.eos_ids, *range(width, WORD_BITS * self.num_words)]):
            words[index] &= ~word
        return memoryview(words).toreadonly()

    def marker_ids(self, text: str) -> list[int]:
        """The tokens of a marker: a single one, special or not, if the vocabulary has it."""
        if text.encode() in self.tokens:
            return [self.tokens.index(text.encode())]
        return list(self.tokenizer.tokenize_str(text))


class _Source:
    """The vocabulary that LLTokenizer reads, and its tokenizer for forced text.

    The names of special tokens in forced text are plain text. The library's own readers of tokenizer files turn them
    into special tokens, which the grammar that forced the text then refuses.
    """

    bos_token_id = None

    def __init__(
        self, tokenizer: TokenizerLike, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int
    ) -> None:
        self._tokenizer = tokenizer
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_ids, eos_id
        self.built: LLTokenizer | None = None
        # Every mask of forced text tokenises it, and the same property names recur.
        self._ids = lru_cache(_MAX_TEXTS)(self._uncached)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("takes text only")
        if len(text) <= _MAX_CHARACTERS:
            return list(self._ids(text))
        return list(self._ids(text[:_MAX_CHARACTERS])[:-_MARGIN])

    def _uncached(self, text: str) -> list[int]:
        # The line break is for vocabularies that put a space before a text's first word.
        for prefix in ("", "\n"):
            ids = self._encode(prefix + text)
            while prefix and ids and self._text(ids) != text.encode():
                ids = ids[1:]
            if self._text(ids) == text.encode():
                return ids
        return [] if self.built is None else list(self.built.greedy_tokenize(text))

    def _encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special=False, allow_special=False)
        except OstroError:
            return []

    def _text(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[token] if token < len(self.tokens) else b"" for token in ids)


def _words(ids: Sequence[int]) -> list[tuple[int, int]]:
    words: dict[int, int] = {}
    for token in ids:
        words[token // WORD_BITS] = words.get(token // WORD_BITS, 0) | 1 << token % WORD_BITS
    return sorted(words.items())
