"""A GGUF file's vocabulary as a tokenizer. Knows the `tokenizer.*` metadata; opens no file and knows no templates.

`gpt2`: byte-level pieces, merges in the file, and the pre-tokenizer that `tokenizer.ggml.pre` names.
`llama`: SentencePiece pieces with scores, from which the merges follow.
`gemma4`: SentencePiece pieces, merges in the file.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.text.pretokenizers import pre_tokenizer_named

_log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Tokens that end a chat turn: files often do not name all of theirs. One counts only if the file's own chat template
# writes it: a base model may have it in its vocabulary unused.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|eom_id|>", "<|return|>", "<|call|>")

# SentencePiece's default ids, for files that do not name theirs.
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}

# Most characters in a piece that is merged from others; every possible cut of it is tried. SentencePiece's own default
# is 16.
_LONGEST_PIECE = 256

# All of Phi-3's markers but these swallow the white space after them; the file format cannot express that.
_PHI3_PLAIN_MARKERS = frozenset({"<unk>", "<s>", "<|endoftext|>"})


@dataclass(frozen=True, slots=True)
class GgufVocab:
    core: tokenizers.Tokenizer
    pieces: list[str]
    """Pieces by id. If a piece occurs twice, the core tokenizer knows only its last id."""
    bos_id: int | None
    eos_ids: frozenset[int]
    special_pieces: dict[str, str]
    """Special pieces by their names in templates: `bos_token`, `eos_token` and so on."""
    chat_template: str | None
    tool_template: str | None
    """A separate template for conversations with tools."""


def gguf_vocab(metadata: Mapping[str, object]) -> GgufVocab:
    """Raises UnsupportedModel for a kind of vocabulary it does not know, BadCheckpoint for one that is malformed."""
    fields = _Fields(metadata)
    kind = fields.text("tokenizer.ggml.model") or "none"
    if kind not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModel(
            f"The GGUF file has a vocabulary of kind {kind!r}, but Ostro only knows gpt2, llama and gemma4. "
            "Use the model's original files, with their tokenizer.json."
        )
    pieces = fields.texts("tokenizer.ggml.tokens")
    types = fields.integers("tokenizer.ggml.token_type") or [_NORMAL] * len(pieces)
    if not pieces or len(types) != len(pieces):
        raise _damaged(f"{len(pieces)} tokens and {len(types)} token types")
    usual = _SENTENCEPIECE_IDS if kind == "llama" else {}
    names = ("bos", "eos", "unknown", "padding", "eot", "eom")
    ids = {name: fields.token_id(name, usual.get(name), len(pieces)) for name in names}
    if kind == "gpt2":
        core, add_bos = _byte_level(fields, pieces)
    else:
        core, add_bos = _sentencepiece(fields, pieces, types, ids["unknown"]), True
    core.add_tokens(_added_tokens(pieces, types, _swallowing_markers(fields, kind, pieces)))
    bos = ids["bos"] if fields.flag("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = ids["eos"] if fields.flag("tokenizer.ggml.add_eos_token", False) else None
    _frame(core, pieces, bos, eos)
    template = fields.text("tokenizer.chat_template")
    labels = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return GgufVocab(
        core=core,
        pieces=pieces,
        bos_id=ids["bos"],
        eos_ids=frozenset(
            {token for name in ("eos", "eot", "eom") if (token := ids[name]) is not None}
            | _turn_ends(pieces, types, template)
        ),
        special_pieces={label: pieces[token] for name, label in labels.items() if (token := ids[name]) is not None},
        chat_template=template,
        tool_template=fields.text("tokenizer.chat_template.tool_use"),
    )


def _byte_level(fields: "_Fields", pieces: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = fields.text("tokenizer.ggml.pre")
    if name is None:
        _log.warning("the GGUF file names no pre-tokenizer (tokenizer.ggml.pre); the format's old default is used")
        name = "default"
    rule = pre_tokenizer_named(name)
    core = _bpe(pieces, fields.merges(), ignore_merges=rule.ignore_merges)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return core, rule.add_bos


def _sentencepiece(fields: "_Fields", pieces: list[str], types: list[int], unknown: int | None) -> tokenizers.Tokenizer:
    given = fields.merges()
    merges = given or _merges_by_score(pieces, types, fields.numbers("tokenizer.ggml.scores"))
    unknown_piece = None if unknown is None else pieces[unknown]
    core = _bpe(pieces, merges, unk_token=unknown_piece, fuse_unk=True, byte_fallback=True)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    after: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    # Vocabularies with merges of their own add no space by default.
    if fields.flag("tokenizer.ggml.add_space_prefix", not given):
        steps.insert(0, normalizers.Prepend("▁"))
        after.append(decoders.Strip(" ", 1, 0))
    core.normalizer = normalizers.Sequence(steps)
    core.decoder = decoders.Sequence(after)
    return core


def _merges_by_score(pieces: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece from two others, best piece first.

    SentencePiece joins the neighbours that make the best-scored piece, which merges ranked by score reproduce. Of the
    ways to make one piece, longer left parts come first, as in the public conversions of these vocabularies.
    """
    if len(scores) != len(pieces):
        raise _damaged(f"{len(pieces)} tokens and {len(scores)} scores")
    joinable = {
        piece: score
        for piece, kind, score in zip(pieces, types, scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    if (longest := max(map(len, joinable), default=0)) > _LONGEST_PIECE:
        raise _damaged(f"a piece of {longest} characters, but the limit is {_LONGEST_PIECE}")
    merges: list[tuple[str, str]] = []
    for piece in sorted(joinable, key=joinable.__getitem__, reverse=True):
        for cut in range(len(piece) - 1, 0, -1):
            # Most cuts fail on the left part, so the right one is sliced only after that.
            if (left := piece[:cut]) in joinable and (right := piece[cut:]) in joinable:
                merges.append((left, right))
    return merges


def _bpe(
    pieces: list[str],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    try:
        model = models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=unk_token,
            fuse_unk=fuse_unk,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:  # the library raises nothing narrower
        raise _damaged(f"merges that do not fit its tokens ({error})") from error
    return tokenizers.Tokenizer(model)


def _added_tokens(pieces: list[str], types: list[int], swallowing: frozenset[str]) -> list[AddedToken]:
    """Tokens that are matched in the text as they are, before pre-tokenisation and merging."""
    return [
        AddedToken(piece, special=kind != _USER_DEFINED, normalized=False, rstrip=piece in swallowing)
        for piece, kind in zip(pieces, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and piece
    ]


def _swallowing_markers(fields: "_Fields", kind: str, pieces: list[str]) -> frozenset[str]:
    if kind != "llama" or fields.text("general.architecture") != "phi3":
        return frozenset()
    return frozenset(pieces) - _PHI3_PLAIN_MARKERS


def _frame(core: tokenizers.Tokenizer, pieces: list[str], bos: int | None, eos: int | None) -> None:
    """Puts the beginning and end tokens around every encoded text."""
    template = [*([pieces[bos]] if bos is not None else []), "$A", *([pieces[eos]] if eos is not None else [])]
    if len(template) > 1:
        special = [(pieces[token], token) for token in {bos, eos} if token is not None]
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _turn_ends(pieces: list[str], types: list[int], template: str | None) -> set[int]:
    written = {piece for piece in _TURN_ENDS if template is not None and piece in template}
    if not written:
        return set()
    found = {
        piece: token
        for token, (piece, kind) in enumerate(zip(pieces, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and piece in written
    }
    if "<|return|>" in found:
        # If this token ends a turn, <|end|> ends only a message within it.
        found.pop("<|end|>", None)
    return set(found.values())


def _damaged(what: str) -> BadCheckpoint:
    return BadCheckpoint(f"The GGUF file's vocabulary is damaged: it has {what}. Download it again.")


class _Fields:
    """Metadata, checked for the types it should have."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def text(self, key: str) -> str | None:
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise _damaged(f"{key} = {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._metadata.get(key, default))

    def token_id(self, name: str, usual: int | None, count: int) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id", usual)
        # Some converters write the highest id to mean that there is no such token.
        if value is None or value == 0xFFFFFFFF or value == -1:
            return None
        if not isinstance(value, int) or not 0 <= value < count:
            raise _damaged(f"the {name} token {value!r} among {count} tokens")
        return value

    def texts(self, key: str) -> list[str]:
        return cast(list[str], self._array(key, (str,)))

    def integers(self, key: str) -> list[int]:
        return cast(list[int], self._array(key, (int,)))

    def numbers(self, key: str) -> list[float]:
        return cast(list[float], self._array(key, (int, float)))

    def merges(self) -> list[tuple[str, str]]:
        # A piece is never empty, so the separating space is searched for from the second character on.
        pairs = self.texts("tokenizer.ggml.merges")
        return [(pair[: (gap := pair.find(" ", 1))], pair[gap + 1 :]) for pair in pairs]

    def _array(self, key: str, types: tuple[type, ...]) -> list[object]:
        value = self._metadata.get(key, [])
        if not isinstance(value, list) or not _all_are(value, types):
            raise _damaged(f"a {key} of the wrong type")
        return value


def _all_are(values: Iterable[object], types: tuple[type, ...]) -> bool:
    return {type(value) for value in values} <= set(types)
