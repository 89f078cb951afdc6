"""Loads a tokenizer from a model's directory: tokenizer.json and the files next to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from ostro.text.tokenizer_limits import MAX_VOCABULARY, check_merges, declared_growth

# The largest legitimate ones have forty megabytes.
_MAX_BYTES = 256 << 20
_TOOL_TEMPLATE = "tool_use"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_BERT_SPECIALS = {
    "unk_token": "[UNK]",
    "sep_token": (_SEPARATOR := "[SEP]"),
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


@dataclass(frozen=True, slots=True)
class Settings:
    bos_id: int | None
    eos_ids: frozenset[int]
    special_pieces: dict[str, str]
    chat_template: str | None
    tool_template: str | None
    """A separate template for conversations with tools."""


def read_core(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if path.is_file():
        return _read_tokenizer(path)
    if (directory / "vocab.txt").is_file():
        return _read_wordpiece(directory)
    older = [name for name in ("tokenizer.model", "vocab.json") if (directory / name).is_file()]
    if older:
        raise UnsupportedModel(
            f"{directory} has {older[0]} but no tokenizer.json. Make one with transformers: "
            "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)."
        )
    raise ModelNotFound(f"There is no tokenizer.json in {directory}. Copy it there from the original model.")


class _Merging(msgspec.Struct):
    """The part of a vocabulary that is checked before the library reads it."""

    continuing_subword_prefix: object = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _Rewriting(msgspec.Struct):
    """The parts of a tokenizer.json that change texts."""

    normalizer: object = None
    pre_tokenizer: object = None
    model: _Merging | None = None


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise BadCheckpoint(f"{path} is larger than {_MAX_BYTES >> 20} MiB, which no tokenizer is.")
        data = path.read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error.strerror or error}.") from error
    try:
        rewriting = msgspec.json.decode(data, type=_Rewriting)
        # Before the library reads it, which normalises the added tokens.
        declared_growth(rewriting.normalizer, rewriting.pre_tokenizer)
        if rewriting.model is not None and (prefix := rewriting.model.continuing_subword_prefix):
            # Few vocabularies have one: the merges of others are not read twice.
            check_merges(prefix, msgspec.json.decode(rewriting.model.merges))
        return tokenizers.Tokenizer.from_buffer(data)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{path}: {error.message}") from None
    except Exception as error:  # the library raises nothing narrower
        raise BadCheckpoint(f"{path} is not a valid tokenizer ({error}). Download it again.") from error


def _read_wordpiece(directory: Path) -> tokenizers.Tokenizer:
    """Reads a BERT vocabulary from before tokenizer.json: one piece per line, and a few settings."""
    path = directory / "vocab.txt"
    config = {**_json(directory, "special_tokens_map.json"), **_json(directory, "tokenizer_config.json")}
    special = {name: _piece(config.get(name)) or usual for name, usual in _BERT_SPECIALS.items()}
    try:
        core = tokenizers.Tokenizer(models.WordPiece.from_file(str(path), unk_token=special["unk_token"]))
    except Exception as error:  # the library raises nothing narrower
        raise BadCheckpoint(f"{path} is not a valid vocabulary ({error}). Download it again.") from error
    ids = {name: core.token_to_id(piece) for name, piece in special.items()}
    missing = next((special[name] for name, token in ids.items() if token is None), None)
    if missing is not None:
        raise UnsupportedModel(
            f"{path} has no {missing}, so it is not a BERT vocabulary. Make a tokenizer.json with transformers: "
            "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)."
        )
    core.add_special_tokens(list(special.values()))
    core.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case") is not False,
        strip_accents=accents if isinstance(accents := config.get("strip_accents"), bool) else None,
        handle_chinese_chars=config.get("tokenize_chinese_chars") is not False,
    )
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    start, end = ((special[name], ids[name] or 0) for name in ("cls_token", "sep_token"))
    core.post_processor = processors.BertProcessing(end, start)
    core.decoder = decoders.WordPiece()
    return core


def read_settings(directory: Path, core: tokenizers.Tokenizer) -> Settings:
    config = {**_json(directory, "special_tokens_map.json"), **_json(directory, "tokenizer_config.json")}
    generation = {**_json(directory, "config.json"), **_json(directory, "generation_config.json")}
    pieces = {name: piece for name in _SPECIAL_NAMES if (piece := _piece(config.get(name))) is not None}
    if isinstance(core.model, models.WordPiece) and (end := _piece(config.get("sep_token", _SEPARATOR))) is not None:
        # BERT's vocabularies have no other end-of-text token.
        pieces.setdefault("eos_token", end)
    bos, eos = (core.token_to_id(pieces[name]) if name in pieces else None for name in ("bos_token", "eos_token"))
    ends = set(ids_in(generation.get("eos_token_id")))
    template, tool_template = _chat_templates(directory, config)
    return Settings(
        bos_id=next(ids_in(generation.get("bos_token_id")), None) if bos is None else bos,
        eos_ids=frozenset(ends if eos is None else ends | {eos}),
        special_pieces=pieces,
        chat_template=template,
        tool_template=tool_template,
    )


def _json(directory: Path, name: str) -> dict[str, object]:
    """The file's entries that are not null; empty if there is no such file."""
    from ostro.formats.json_file import read_json_object

    path = directory / name
    entries = read_json_object(path) if path.is_file() else {}
    return {key: value for key, value in entries.items() if value is not None}


def _piece(value: object) -> str | None:
    """The text of a special token, which files write as a string or as an object that holds one."""
    piece = value.get("content") if isinstance(value, Mapping) else value
    return piece if isinstance(piece, str) else None


def ids_in(value: object) -> Iterator[int]:
    """Token ids from a file, which holds one number, a list of them, or -1 for none. Others that no vocabulary has are
    left out, too.
    """
    for token in value if isinstance(value, list) else [value]:
        if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < MAX_VOCABULARY:
            yield token


def _chat_templates(directory: Path, config: Mapping[str, object]) -> tuple[str | None, str | None]:
    """The template for plain conversations, and a separate one for those with tools if there is one."""
    value = _json(directory, "chat_template.json").get("chat_template", config.get("chat_template"))
    # A list holds several templates by name; plain conversations use the default one.
    listed = value if isinstance(value, list) else [{"name": "default", "template": value}]
    named = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, Mapping)}
    plain = _text(directory / "chat_template.jinja") or named.get("default")
    with_tools = _text(directory / "additional_chat_templates" / f"{_TOOL_TEMPLATE}.jinja") or named.get(_TOOL_TEMPLATE)
    return plain if isinstance(plain, str) else None, with_tools if isinstance(with_tools, str) else None


def _text(path: Path) -> str | None:
    """The file's text, if there is one."""
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}. Download it again.") from error
