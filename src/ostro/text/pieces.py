"""The bytes that a vocabulary's pieces stand for. Knows how vocabularies write bytes as text; knows no ids.

A byte-level vocabulary gives each of the 256 bytes a printable character. A SentencePiece one writes a space as ▁
and a byte that no piece covers as <0x0A>. A WordPiece one, like BERT's, keeps no spaces: a piece begins a word unless
it is marked with ##.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

from tokenizers.decoders import Decoder

from ostro.errors import UnsupportedModel

_SPACE_MARK = "▁"
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class PieceCodec:
    to_bytes: Callable[[str], bytes]
    added_to_bytes: Callable[[str], bytes]
    """For added tokens, which are matched in the text as they are, before it is pre-tokenised."""
    drops_first_space: bool
    """Whether the vocabulary adds a space before a text's first word, which is not part of the text."""


def codec_of(decoder: Decoder | None) -> PieceCodec:
    """The codec equivalent to the tokenizer's own decoder."""
    if decoder is None:
        raise _unsupported("no decoder")
    steps = list(_steps(json.loads(decoder.__getstate__())))
    kinds = [cast(str, step["type"]) for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return PieceCodec(byte_level_bytes, str.encode, drops_first_space=False)
    if kinds == ["Metaspace"] and steps[0]["replacement"] == _SPACE_MARK:
        return PieceCodec(_marked_bytes, _marked_bytes, drops_first_space=steps[0].get("prepend_scheme") != "never")
    if all(map(_is_sentencepiece_step, steps)) and "Replace" in kinds:
        to_bytes = _fallback_bytes if "ByteFallback" in kinds else _marked_bytes
        return PieceCodec(to_bytes, _marked_bytes, drops_first_space="Strip" in kinds)
    if kinds == ["WordPiece"]:
        prefix, tidy = cast(str, steps[0]["prefix"]), bool(steps[0]["cleanup"])
        return PieceCodec(
            partial(_word_bytes, prefix, tidy), partial(_word_bytes, prefix, tidy), drops_first_space=True
        )
    raise _unsupported(f"the decoder {'+'.join(kinds)}")


def _steps(decoder: dict[str, object]) -> Iterator[dict[str, object]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in cast(list[dict[str, object]], decoder["decoders"]):
        yield from _steps(step)


def _is_sentencepiece_step(step: dict[str, object]) -> bool:
    match step:
        case {"type": "ByteFallback" | "Fuse"}:
            return True
        case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
            return True
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return True
    return False


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The tokenizer has {what}, but Ostro only reads byte-level, SentencePiece and WordPiece vocabularies. "
        "Use another model."
    )


def _byte_alphabet() -> dict[int, int]:
    """Character -> byte. Printable Latin-1 stands for itself; the other bytes take characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {256 + place: byte for place, byte in enumerate(others)}


# Unused Latin-1 characters map outside Latin-1, so that encoding fails for every character outside the alphabet.
_FROM_ALPHABET = dict.fromkeys(range(256), 0xFFFD) | _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_FROM_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        # Not in the byte alphabet: an added piece, in plain text.
        return piece.encode()


def _marked_bytes(piece: str) -> bytes:
    return piece.replace(_SPACE_MARK, " ").encode()


# The clean-up of BERT's decoder, which it too applies to each piece.
_TIDIED = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " n't": "n't",
    " 'm": "'m",
    " do not": " don't",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}


def _word_bytes(prefix: str, tidy: bool, piece: str) -> bytes:
    text = piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
    if tidy:
        for before, after in _TIDIED.items():
            text = text.replace(before, after)
    return text.encode()


def _fallback_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return _marked_bytes(piece) if byte is None else bytes.fromhex(byte[1])
