"""A model's vocabulary as llguidance wants it. Knows tokenizers; knows no grammars."""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from ostro.errors import OstroError, Unsupported

if TYPE_CHECKING:
    from llguidance import LLTokenizer

WORD_BITS = 32

# Of forced text that is tokenised at once: the rest has its turn later, and must not cost each step a megabyte's time.
_MAX_CHARACTERS = 160
_MARGIN = 4
"""Tokens at the end of it."""
_MAX_TEXTS = 1 << 14


class TokenizerLike(Protocol):
    """What is needed of `text.tokenizer.Tokenizer`."""

    vocab_size: int
    eos_ids: frozenset[int]

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, id: int, /) -> bytes: ...

    def encode(self, text: str, /, *, add_special: bool = True, allow_special: bool = True) -> list[int]: ...


def require_llguidance() -> None:
    """Raises Unsupported where the library is not installed: it has no wheels for some platforms."""
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
    """Built in a fraction of a second to a second, and some 100 MB for 150,000 tokens. Safe to share."""

    def __init__(self, tokenizer: TokenizerLike, width: int) -> None:
        """`width` is that of the logits, which may be more or less than the vocabulary's."""
        require_llguidance()
        from llguidance import LLTokenizer, TokenizerWrapper

        self.eos_ids = frozenset(token for token in tokenizer.eos_ids if token < width)
        self.tokens = [tokenizer.token_bytes(token) for token in range(width)]
        special_ids = sorted(token for token in tokenizer.special_ids if token < width)
        if not self.eos_ids:
            # The library wants one. It is beyond the logits, so that nobody samples it.
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
        """Of all tokens but those that end a sequence; None if there are none of those."""

    def _endless_mask(self, width: int) -> memoryview:
        words = array("I", b"\xff" * (4 * self.num_words))
        for index, word in _words([*self.eos_ids, *range(width, WORD_BITS * self.num_words)]):
            words[index] &= ~word
        return memoryview(words).toreadonly()

    def marker_ids(self, text: str) -> list[int]:
        """How a model writes a marker: as one token, if there is one for it, be it special or not."""
        if text.encode() in self.tokens:
            return [self.tokens.index(text.encode())]
        return list(self.tokenizer.tokenize_str(text))


class _Source:
    """What LLTokenizer reads a vocabulary from.

    It tokenises forced text, in which the names of special tokens are text like any other: the library's own readers of
    tokenizer files make special tokens of them, which the grammar that forced the text then refuses.
    """

    bos_token_id = None

    def __init__(
        self, tokenizer: TokenizerLike, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int
    ) -> None:
        self._tokenizer = tokenizer
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_ids, eos_id
        self.built: LLTokenizer | None = None
        # Every mask of forced text asks for it, and the same property names come again and again.
        self._ids = lru_cache(_MAX_TEXTS)(self._uncached)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("takes text only")
        if len(text) <= _MAX_CHARACTERS:
            return list(self._ids(text))
        # The end of what was cut is not as the whole text would have it.
        return list(self._ids(text[:_MAX_CHARACTERS])[:-_MARGIN])

    def _uncached(self, text: str) -> list[int]:
        # The second way is for vocabularies that put a space before a text's first word.
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
