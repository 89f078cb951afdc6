"""Where in a text its tokens begin. Knows a tokenizer; knows no stream."""

import codecs
from collections.abc import Iterator, Sequence

from ostro.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def text_offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[int]:
    """Where in its text each token begins; at its end for one that a stop has cut off."""
    decoder = _Utf8Decoder(errors="replace")
    at = 0
    for token in ids:
        yield min(at, len(text))
        data = tokenizer.bytes_of((token,))
        if not data and text.startswith(tokenizer.token_text(token), at):
            # A special token, and the text spells it out.
            data = tokenizer.token_bytes(token)
        if at == 0 and not text.startswith(" "):
            # Some vocabularies begin every text with a space that is not shown.
            data = data.removeprefix(b" ")
        at += len(decoder.decode(data))
