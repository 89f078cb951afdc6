"""Finds where the end of a sequence occurred before, in its own tokens or in another text. Knows token ids only.

    text       … def area ( w , h ) : return w * h … def volume ( w , h
                               └─────┘ match            └─────┘ the sequence's last tokens
                                      ) : return w * h …        what may follow

Each pair of adjacent tokens points to its latest occurrence, and each occurrence to the one before it. Following a few
of them finds the longest match among them; indexing a token and looking one up take constant time.
"""

from typing import NamedTuple

# Occurrences of the last two tokens that are compared, latest first.
_MOST_COMPARED = 8
# Tokens beyond which a longer match is no better.
LONGEST_MATCH = 32
# Tokens indexed per call, so that no step waits for a long prompt: milliseconds at most.
_MOST_AT_ONCE = 4096
# A bound on the memory of an index, which takes about 150 bytes a token.
_MOST_INDEXED = 32_768


class Match(NamedTuple):
    end: int
    """Where in the text the match ends, and what may follow begins."""
    length: int


class TextIndex:
    """Occurrences of token pairs in a text. The text may grow after it was indexed, but not change."""

    __slots__ = ("_before", "_first", "_indexed", "_latest", "text")

    def __init__(self, text: list[int]) -> None:
        self.text = text
        # Positions are those after a pair. The first token that is indexed, and the position up to which they are.
        self._first = self._indexed = max(0, len(text) - _MOST_INDEXED)
        self._latest: dict[tuple[int, int], int] = {}
        # Position - _first - 1 -> the position before it of the same pair; 0 if there is none.
        self._before: list[int] = [0]

    def grow(self, end: int) -> None:
        """Indexes the text up to `end`, or the next part of it if that is much."""
        text, latest, before = self.text, self._latest, self._before
        start = max(self._indexed, self._first + 1)
        end = min(end, start + _MOST_AT_ONCE)
        for at in range(start, end):
            pair = (text[at - 1], text[at])
            before.append(latest.get(pair, 0))
            latest[pair] = at + 1
        self._indexed = max(self._indexed, end)

    def find(self, tokens: list[int], end: int) -> Match | None:
        """The longest match in the text for what comes before `end` in `tokens`, the latest of equally long ones."""
        if end < 2:
            return None
        at = self._latest.get((tokens[end - 2], tokens[end - 1]), 0)
        best = Match(0, 0)
        for _ in range(_MOST_COMPARED):
            if not at:
                break
            length = self._common(tokens, end, at)
            if length > best.length:
                best = Match(at, length)
                if length == LONGEST_MATCH:
                    break
            at = self._before[at - self._first - 1]
        return best if best.length else None

    def _common(self, tokens: list[int], end: int, at: int) -> int:
        """How many tokens before `end` equal those before `at` in the text; at least the pair."""
        text, length = self.text, 2
        most = min(LONGEST_MATCH, end, at)
        while length < most and tokens[end - 1 - length] == text[at - 1 - length]:
            length += 1
        return length
