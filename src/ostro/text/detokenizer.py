"""Incremental detokenisation of one sequence. Knows no stops.

Tokens stand for bytes, and a character's bytes may span several tokens, so text is emitted once its characters are
complete.
"""

import codecs
from collections.abc import Sequence

from ostro.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The texts of `push` and `flush`, joined, equal `Tokenizer.decode` of the ids as a continuation of the prompt.

    A character that the prompt left unfinished belongs to the prompt: the output does not show its bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown_ids = shown_ids
        self._utf8 = _Utf8Decoder(errors="replace")
        # Only a text's very first space is dropped: the output's, only if the prompt has no text.
        self._drop_space = tokenizer.drops_first_space and not any(
            tokenizer.bytes_of((token,), skip_special=skip_special) for token in prompt_ids
        )

    def push(self, ids: Sequence[int]) -> str:
        """The text these tokens complete; it never ends within a character."""
        if self._shown_ids:
            data = self._with_shown(ids)
        else:
            data = self._tokenizer.bytes_of(ids, skip_special=self._skip_special)
        if self._drop_space and data:
            data = data.removeprefix(b" ")
            self._drop_space = False
        return self._utf8.decode(data)

    def _with_shown(self, ids: Sequence[int]) -> bytes:
        return b"".join(
            self._tokenizer.bytes_of((token,), skip_special=self._skip_special and token not in self._shown_ids)
            for token in ids
        )

    def flush(self) -> str:
        """Ends the text: an unfinished character becomes a replacement character."""
        return self._utf8.decode(b"", final=True)
