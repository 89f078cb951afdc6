"""What a tokenizer.json may cost, read from its declarations. Runs nothing of it and knows no requests.

A tokenizer.json is a program: normalizers and pre-tokenizers rewrite a text one after the other, and each may make it
longer. Twenty-two times `Replace z → zz` makes four million letters of one, in the process that serves all models.

    normalizer      Prepend 4 × Replace 3      most bytes that each step makes of one byte
    pre_tokenizer   ByteLevel 2                ─> their product bounds the growth of every text

Tokenizers do not run in a process with limits, as chat templates do: each prompt would travel there and back, which
takes longer than encoding most of them. Unlike a template's, a tokenizer's worst case can be computed. A product beyond
MAX_GROWTH is refused when the tokenizer is loaded; one beyond ORDINARY_GROWTH limits the length of texts instead, so
that vocabularies with Unicode's own long expansions keep working.

Decoders need no bound: `pieces` decodes by code of its own, and refuses a decoder that does anything else.
"""

import math
import re
import struct
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ostro.errors import BadCheckpoint, BadRequest

MAX_GROWTH = 256
ORDINARY_GROWTH = 16
"""Growth that every text may have: what the steps of usual vocabularies add up to."""
MAX_GROWN_BYTES = 16 << 20
"""A text's most bytes after all steps, where its growth may be more than ordinary. Each takes some 130 of memory, and a
million of them a second."""
MAX_STEPS = 32
"""Normalizers or pre-tokenizers, and steps of a post-processor. Each passes over the whole text."""
MAX_FRAME = 1024
"""Special tokens that a post-processor adds to a text."""
MAX_VOCABULARY = 1 << 24
"""Tokens of a vocabulary, and one more than the highest id: grammars and masks have a place for each."""
MAX_WORD = 1024
"""Characters of a word or a piece that a vocabulary compares at once: its time grows with their square."""
MAX_AFFIX = 64

# Growth by steps without parameters. Unicode's forms: https://www.unicode.org/faq/normalization.html, in UTF-8. Bert:
# spaces around ideographs, form D, lower case. A byte is written as one character of the byte alphabet, two bytes at
# most.
_FIXED: Mapping[object, float] = {
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "ByteLevel": 2.0,
    **dict.fromkeys(("Bert", "BertNormalizer"), 5 / 3 * 3.0 * 1.5),
    **dict.fromkeys(("Nmt", "Strip", "StripAccents", "Replace", "Prepend", "Precompiled", "Sequence"), 1.0),
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Delimiter", "Digits", "FixedLength"), 1.0),
    **dict.fromkeys(("Metaspace", "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1.0),
    None: 1.0,
}
# One character or white space, perhaps repeated: it never matches nothing.
_CHARACTERS = re.compile(r"(?:\\s|[^\\\[\](){}.*+?^$|])(?:\+|\{[1-9]\d*,\d*\})?")
_LISTS = ("normalizers", "pretokenizers", "processors")


@dataclass(frozen=True, slots=True)
class Growth:
    """How much longer a tokenizer may make a text."""

    factor: float

    def check(self, text: str) -> None:
        """Raises BadRequest for a text that may become too long inside the tokenizer."""
        if self.factor <= ORDINARY_GROWTH:
            return
        size, most = len(text.encode(errors="surrogatepass")), int(MAX_GROWN_BYTES / self.factor)
        if size > most:
            raise BadRequest(
                f"The text has {size} bytes in UTF-8, and this model's tokenizer takes at most {most}, as its "
                f"normalizers may make a text {self.factor:.0f} times as long. Send a shorter text."
            )


def declared_growth(normalizer: object, pre_tokenizer: object) -> Growth:
    """The growth that both declare, as in a tokenizer.json; None for what it lacks. Raises BadCheckpoint if it has no
    bound.
    """
    # A pre-tokenizer works on every word by itself, and takes longer over each byte.
    words = _product("pre-tokenizers", list(_steps(pre_tokenizer)), ORDINARY_GROWTH)
    return Growth(words * _product("normalizers", list(_steps(normalizer)), MAX_GROWTH / words))


def _product(what: str, steps: Sequence[Mapping[str, object]], most: float) -> float:
    factors = [_factor(step) for step in steps]
    growth = math.prod(factors)
    if not growth <= most:
        worst = factors.index(max(factors))
        raise _refused(
            f"its {what} may make a text {growth:.3g} times as long, and {most:.3g} times is the most; "
            f"{_name(steps[worst])} alone makes it {factors[worst]:.3g} times as long"
        )
    return growth


def check_frame(post_processor: object, num_added: int) -> None:
    """Raises BadCheckpoint for a post-processor that repeats texts, or adds more than a few tokens to them."""
    if num_added > MAX_FRAME:
        raise _refused(f"its post-processor adds {num_added} tokens to a text, but the limit is {MAX_FRAME}")
    for step in _steps(post_processor):
        for name in ("single", "pair"):
            used = [_text_used(piece) for piece in _listed(step.get(name))]
            if any(used.count(text) > 1 for text in set(used) - {None}):
                raise _refused(f"the template {name!r} of its post-processor repeats a text")


def check_size(vocab_size: int) -> None:
    """Raises BadCheckpoint for a vocabulary with an id beyond reason."""
    if vocab_size > MAX_VOCABULARY:
        raise _refused(f"its highest token id is {vocab_size - 1}, and {MAX_VOCABULARY - 1} is the most")


def check_words(longest_word: int, longest_piece: int, *affixes: str | None) -> None:
    """Raises BadCheckpoint for a vocabulary that takes too long over one word."""
    if max(longest_word, longest_piece) > MAX_WORD:
        raise _refused(
            f"its vocabulary compares {max(longest_word, longest_piece)} characters at once, and {MAX_WORD} are the "
            "most (max_input_chars_per_word, or the longest piece)"
        )
    if any(len(affix) > MAX_AFFIX for affix in affixes if affix is not None):
        raise _refused(f"it adds more than {MAX_AFFIX} characters to each part of a word (continuing_subword_prefix)")


def check_merges(prefix: object, merges: object) -> None:
    """Raises BadCheckpoint for merges whose second parts lack the prefix of parts within a word. The library cuts its
    length off each of them unseen: what is left of a character aborts the process.
    """
    if isinstance(prefix, str) and not all(_second(merge).startswith(prefix) for merge in _listed(merges)):
        raise _refused(f"not all of its merges have its continuing_subword_prefix {prefix!r:.40}")


def _second(merge: object) -> str:
    """The second part of a merge, which older files write as one text."""
    second = merge[-1] if isinstance(merge, list) and merge else merge
    return second if merge is not second and isinstance(second, str) else str(second).rpartition(" ")[2]


def _refused(why: str) -> BadCheckpoint:
    return BadCheckpoint(f"The tokenizer is refused: {why}. Use the original model's, or give one with --tokenizer.")


def _steps(declared: object) -> Iterator[Mapping[str, object]]:
    """All steps, with those of nested sequences in place of these. What is no step is left to the library to refuse."""
    found = list(islice(_flat(declared), MAX_STEPS + 1))
    if len(found) > MAX_STEPS:
        raise _refused(f"it has a sequence of more than {MAX_STEPS} steps, each of which reads the whole text")
    yield from found


def _flat(declared: object) -> Iterator[Mapping[str, object]]:
    if isinstance(declared, Mapping):
        yield declared
        for name in _LISTS:
            for step in _listed(declared.get(name)):
                yield from _flat(step)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _factor(step: Mapping[str, object]) -> float:
    """Counts every parameter, whatever the step's type says: the library goes by those that are there where the type's
    own are missing.
    """
    kind = step.get("type")
    factor = _FIXED.get(kind) if isinstance(kind, str | None) else None
    if factor is None:
        raise _refused(f"it has a step of the unknown kind {kind!r:.40}, which may make texts longer")
    factor *= _replaced(step.get("pattern"), step.get("content"))
    # Before each part of a text between two added tokens, and for pre-tokenizers, each word: one byte, perhaps.
    factor *= 1 + _size(step.get("prepend")) + _size(step.get("replacement"))
    if step.get("add_prefix_space") and "replacement" not in step:
        factor *= 2
    return factor * _charsmap_growth(step.get("precompiled_charsmap"))


def _replaced(pattern: object, content: object) -> float:
    length, declared = _size(content), pattern if isinstance(pattern, Mapping) else {}
    if list(declared) == ["String"] and (replaced := _size(declared["String"])):
        return max(1.0, length / replaced)
    regex, repeats = declared.get("Regex"), content.count("$") if isinstance(content, str) else 0
    if isinstance(regex, str) and _CHARACTERS.fullmatch(regex) and not repeats:
        return max(1.0, length)
    # Other expressions may match nothing at every place, and each $ in the content may repeat the match.
    return 1.0 + length + repeats


def _size(text: object) -> int:
    return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0


def _name(step: Mapping[str, object]) -> str:
    details = {key: value for key, value in step.items() if key in ("pattern", "content", "prepend", "replacement")}
    return f"{step.get('type')} {details!r:.80}" if details else str(step.get("type"))


def _text_used(piece: object) -> object:
    """Which text a template's piece stands for: A or B; None for a special token."""
    sequence = piece.get("Sequence") if isinstance(piece, Mapping) else None
    return str(sequence.get("id")) if isinstance(sequence, Mapping) else None


# --- SentencePiece's compiled character maps -------------------------------------------------------------------------


def _charsmap_growth(encoded: object) -> float:
    """A map is a trie from UTF-8 keys to places in a list of strings that end with NUL. Keys of one and two bytes are
    looked up; all others are counted as three bytes for the longest string.

    Raises BadCheckpoint for a damaged map: the library allocates as much as it says, and aborts if it cannot.
    """
    if not isinstance(encoded, str):
        return 1.0
    try:
        data = b64decode(encoded, validate=True)
        units = struct.unpack_from("<I", data)[0] // 4
        trie = _Trie(struct.unpack_from(f"<{units}I", data, 4), data[4 + 4 * units :])
    except (ValueError, struct.error) as error:
        raise _refused(f"its compiled map of characters is damaged ({error})") from error
    return max(1.0, trie.longest / 3, *trie.growths())


class _Trie:
    """A double array, as Darts lays it out: the child for a byte lies at the node's base XOR that byte."""

    def __init__(self, units: tuple[int, ...], strings: bytes) -> None:
        self._units, self._strings = units, strings
        self.longest = max(map(len, strings.split(b"\0")))

    def growths(self) -> Iterator[float]:
        """How much keys of one and two bytes grow."""
        yield 1.0
        root = self._base(0) if self._units else 0
        for first, length in self._children(root):
            yield float(length)
            for _, length in self._children(first):
                yield length / 2

    def _children(self, base: int) -> Iterator[tuple[int, int]]:
        """Each child's base, and the length of what its key becomes: 0 if it is no key."""
        for byte in range(1, 256):
            at = base ^ byte
            if at < len(self._units) and self._units[at] & 0x800000FF == byte:
                child = self._base(at)
                yield child, self._length(child) if self._units[at] >> 8 & 1 else 0

    def _base(self, at: int) -> int:
        unit = self._units[at]
        return at ^ (unit >> 10) << ((unit & 1 << 9) >> 6)

    def _length(self, leaf: int) -> int:
        if leaf >= len(self._units):
            return 0
        begin = self._units[leaf] & 0x7FFFFFFF
        end = self._strings.find(b"\0", begin)
        return max(0, (len(self._strings) if end < 0 else end) - begin)
