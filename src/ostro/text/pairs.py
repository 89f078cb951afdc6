"""Encodes texts for encoders: one, or two that the tokenizer joins, shortened at their ends with special tokens kept.

Knows the tokenizer's core; reads no files.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import Encoding

from ostro.errors import BadRequest


class PairIds(NamedTuple):
    ids: list[int]
    second_at: int
    """Where the second text begins for a model that tells the two apart; 0 if its tokenizer does not."""


def encode_start(core: tokenizers.Tokenizer, text: str, most: int) -> list[int]:
    """As many of the text's first tokens as fit into `most`, special tokens included."""
    [encoding] = _encode(core, [text])
    encoding.truncate(max(0, most - core.num_special_tokens_to_add(False)))
    ids: list[int] = core.post_process(encoding, None, True).ids
    return ids


def encode_pair(core: tokenizers.Tokenizer, first: str, second: str, most: int | None = None) -> PairIds:
    """With `most`, the longer text is shortened until both fit, as transformers does by default."""
    encodings = _encode(core, [first, second])
    if most is not None:
        room = max(0, most - core.num_special_tokens_to_add(True))
        for encoding, kept in zip(encodings, _shares(len(encodings[0]), len(encodings[1]), room), strict=True):
            encoding.truncate(kept)
    pair = core.post_process(encodings[0], encodings[1], True)
    return PairIds(pair.ids, pair.type_ids.index(1) if 1 in pair.type_ids else 0)


def _encode(core: tokenizers.Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    try:
        # Unlike the library's single `encode`, this releases the GIL.
        encodings: list[Encoding] = core.encode_batch_fast(list(texts), add_special_tokens=False)
    except TypeError as error:
        raise BadRequest("The text holds half a surrogate pair, which is not a character.") from error
    return encodings


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text to keep: all of the shorter one, unless both are longer than half the room."""
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)
