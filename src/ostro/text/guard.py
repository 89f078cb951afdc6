"""Encodes conversations so that every control token is the template's own. See control_text.py for the idea.

Knows the template's source and the tokenizer's core; renders nothing and reads no files.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import tokenizers
from tokenizers import AddedToken

from ostro.errors import BadRequest
from ostro.text.chat import ChatTemplate
from ostro.text.control_text import ControlTexts

_MARKER = re.compile(r"<\S.*>|\[\S.*\]|\{\S.*\}")


def encode_ids(core: tokenizers.Tokenizer, texts: Sequence[str], *, add_special: bool) -> list[list[int]]:
    """Token ids of each text. Releases the GIL, which the library's single `encode` does not."""
    try:
        encodings = core.encode_batch_fast(list(texts), add_special_tokens=add_special)
    except TypeError as error:
        # JSON can spell half a surrogate pair, which Python keeps but UTF-8 cannot encode.
        raise BadRequest("The text holds half a surrogate pair, which is not a character.") from error
    return [encoding.ids for encoding in encodings]


class PlainEncoder:
    """Encodes text without recognising control tokens, except those that bear a secret signature.

    It shares the core's model and rules. Only its added tokens differ: each guarded one is spelt signature + text, so
    that one pass finds them exactly as the core would find the bare ones.
    """

    def __init__(self, core: tokenizers.Tokenizer, added: Mapping[int, AddedToken], guarded: ControlTexts) -> None:
        self._guarded = guarded
        self._signature = secrets.token_hex(8)
        self._twin = tokenizers.Tokenizer(core.model)
        self._twin.normalizer = core.normalizer
        self._twin.pre_tokenizer = core.pre_tokenizer
        self._real_ids = self._adopt(added)
        self._before, self._after = frame(core)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        [twin_ids] = encode_ids(self._twin, [text], add_special=False)
        ids = [self._real_ids.get(token, token) for token in twin_ids]
        return [*self._before, *ids, *self._after] if add_special else ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Encodes guarded texts as control tokens, except those that bear the mark, which stay text."""
        return self.encode(self._guarded.signed(text, mark, self._signature), add_special=False)

    def _adopt(self, added: Mapping[int, AddedToken]) -> dict[int, int]:
        """Gives the twin its added tokens. Returns the twin's id -> the core's id of each."""
        signed = {token: self._signed(added[token]) for token in sorted(added)}
        self._twin.add_tokens(list(signed.values()))
        return {cast(int, self._twin.token_to_id(twin.content)): token for token, twin in signed.items()}

    def _signed(self, added: AddedToken) -> AddedToken:
        if added.content not in self._guarded:
            return added
        return AddedToken(
            self._signature + added.content,
            single_word=added.single_word,
            lstrip=added.lstrip,
            rstrip=added.rstrip,
            normalized=False,
        )


def frame(core: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the core puts before and after a text."""
    encoding = core.encode("a", add_special_tokens=True)
    bare = len(core.encode("a", add_special_tokens=False).ids)
    before = encoding.special_tokens_mask.index(0) if 0 in encoding.special_tokens_mask else 0
    return encoding.ids[:before], encoding.ids[before + bare :]


def guarded_texts(added: Collection[AddedToken], template: ChatTemplate | None) -> tuple[ControlTexts, ControlTexts]:
    """The texts of special tokens; and these plus other added tokens that the template uses as markers."""
    special = {token.content for token in added if token.special}
    source = template.whole_source if template is not None else ""
    markers = {token.content for token in added if _MARKER.fullmatch(token.content) and token.content in source}
    return ControlTexts(special), ControlTexts(special | markers)
