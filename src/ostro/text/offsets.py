"""Character offsets of tokens in a text. Knows a tokenizer; knows no stream."""

import codecs
from collections import deque
from collections.abc import Iterator, Sequence

from ostro.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def text_offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[int]:
    """Where in the text each token begins; the text's length for tokens that a stop has cut off."""
    for begin, _ in TokenSpans(tokenizer).push(ids, text, ended=True):
        yield min(begin, len(text))


class TokenSpans:
    """Where the tokens of a growing text begin and end. If a character spans several tokens, all but the last of them
    are empty; tokens that a stop has cut off lie beyond the text's end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Utf8Decoder(errors="replace")
        self._left: deque[int] = deque()
        self._at = 0

    def push(self, ids: Sequence[int], text: str, *, ended: bool) -> list[tuple[int, int]]:
        """The spans of the next tokens, as far as they are certain. `text` is all of the text so far, which may lag
        behind the tokens.
        """
        self._left += ids
        spans: list[tuple[int, int]] = []
        while self._left and (data := self._shown(self._left[0], text, ended=ended)) is not None:
            self._left.popleft()
            begin = self._at
            self._at += len(self._decoder.decode(data))
            spans.append((begin, self._at))
        return spans

    def _shown(self, token: int, text: str, *, ended: bool) -> bytes | None:
        """The token's bytes that appear in the text; None if that is not certain yet."""
        data = self._tokenizer.bytes_of((token,))
        if not data:
            name = self._tokenizer.token_text(token)
            if text.startswith(name, self._at):
                # A special token, and the text spells it out.
                data = self._tokenizer.token_bytes(token)
            elif not ended and name.startswith(text[self._at :]):
                return None
        if self._at == 0 and data.startswith(b" ") and not text.startswith(" "):
            # Some vocabularies begin every text with a space, which is dropped.
            return data.removeprefix(b" ") if text or ended else None
        return data
