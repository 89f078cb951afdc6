"""Small tokenizers of each kind, and what an attacker or a bad disk may have changed in them."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import tokenizers
from checkpoint_mutations import NUMBERS, OTHERS, Files, Subject, damaged, read_files
from text_vocabs import (
    CHATML,
    bert_directory,
    byte_level_core,
    model_directory,
    sentencepiece_core,
    sentencepiece_pieces,
    write_gguf,
)
from tokenizer_parts import (
    BYTES,
    ISOLATE,
    METASPACE,
    Part,
    charsmap,
    pre_tokenizers_of,
    precompiled,
    processing,
    replace,
    sequence,
    template,
)
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

_KINDS = (1, 2, 3, 4, 5, 6)


def subjects() -> list[Subject]:
    with tempfile.TemporaryDirectory() as scratch:
        cores = {"sentencepiece": sentencepiece_core(), "unigram": _unigram()}
        found = [_saved(Path(scratch) / name, name, core) for name, core in cores.items()]
    found += [
        _directory(name, path)
        for name, path in (
            ("byte-level", model_directory()),
            ("word-piece", bert_directory()),
            ("bert-older", bert_directory(older=True)),
        )
    ]
    return [*found, Subject("gguf-llama", {}, "model.gguf"), Subject("gguf-gpt2", {}, "model.gguf")]


def _directory(name: str, path: Path) -> Subject:
    return Subject(name, read_files(path, "model"), "model")


def _saved(path: Path, name: str, core: tokenizers.Tokenizer) -> Subject:
    path.mkdir()
    core.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1], "bos_token_id": 1}))
    return _directory(name, path)


def _unigram() -> tokenizers.Tokenizer:
    """As XLM-RoBERTa's."""
    letters = [(letter, -3.0 - number / 100) for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz.,")]
    pieces = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁the", -1.0), ("▁a", -1.5), ("ing", -2.0), *letters]
    core = tokenizers.Tokenizer(models.Unigram(pieces, 2, False))
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(["<s>", "</s>", "<unk>"])
    special = [("<s>", 0), ("</s>", 1)]
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=special
    )
    return core


def whole(subject: Subject) -> Files:
    """The files of the tokenizer before it is changed."""
    return subject.files or _gguf(subject.name, Random(0), lambda fields, random: None)


def mutated(subject: Subject, random: Random) -> Files:
    """The tokenizer's files with one to three changes in them."""
    if not subject.files:
        return _changed_gguf(subject.name, random)
    files = dict(subject.files)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        name = random.choices(list(files), [8 if each.endswith("tokenizer.json") else 1 for each in files])[0]
        files[name] = _changed(name, files[name], random)
    return files


def _changed(name: str, data: bytes, random: Random) -> bytes:
    if random.random() < 0.1 or not name.endswith(".json"):
        return damaged(data, random)
    try:
        content = json.loads(data)
        change = random.choice(_CHANGES) if name.endswith("tokenizer.json") else _change_anything
        change(content, random)
        return json.dumps(content).encode()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError):
        return damaged(data, random)


# --- tokenizer.json -------------------------------------------------------------------------------------------------

REGEXES: Sequence[str] = (
    *("", ".", ".*", "a*", "(?=z)", r"\b", "^", "$", "(", "[", "(?<name>a)", r"\p{L}+", r"\p{", "(?i:a|b)", "(a)|(b)"),
    *("(a+)+$", r"(\w+\s?)*$", "(.*)*x", "(a|aa)+$", r"(?<=a{1,99})b", "a{1000}", "a{1,100000}", "((((((a))))))"),
    *(r"\s+(?!\S)|\s+", "[^\\s]", "[\ud7ff-\ue000]", "(?:)", "x{0}", r"\R", r"\X", r"\K", r"(?~abc)", "é", "🙂"),
)
TEXTS: Sequence[str] = (
    "",
    "z",
    "zz",
    " ",
    "▁",
    "é",
    "ﷺ",
    "🙂",
    "a" * 30,
    "$0",
    "$1$1",
    "\0",
    "\n",
    "##",
    "<s>",
    "x" * 3000,
)


def _text(random: Random) -> str:
    return random.choice(TEXTS)


def _pattern(random: Random) -> Part:
    return {"Regex": random.choice(REGEXES)} if random.random() < 0.5 else {"String": _text(random)}


def _chain(steps: Callable[[Random], Part], of: str, random: Random) -> Part:
    count = random.choice((1, 1, 2, 3, 5, 12, 40, 70))
    chosen = [steps(random) for _ in range(min(count, 5))]
    return chosen[0] if count == 1 else sequence(*(chosen * 14)[:count], of=of)


def _normalizer(random: Random) -> Part:
    flags = {name: random.random() < 0.5 for name in ("clean_text", "handle_chinese_chars", "lowercase")}
    return random.choice(
        (
            {"type": random.choice(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel"))},
            {"type": "Strip", "strip_left": True, "strip_right": random.random() < 0.5},
            {"type": "BertNormalizer", **flags, "strip_accents": random.choice((None, True, False))},
            {"type": "Prepend", "prepend": _text(random)},
            replace(_text(random), _text(random)),
            replace(random.choice(REGEXES), _text(random), "Regex"),
            {"type": random.choice(("BertNormalizer", "Strip", None, 3)), "pattern": _pattern(random), "content": "zz"},
            precompiled(_text(random).encode() + b"\0abc\0", key=random.choice((b"z", "é".encode(), b"zz"))),
            _damaged_map(random),
            sequence(),
        )
    )


def _damaged_map(random: Random) -> Part:
    import base64

    data = damaged(base64.b64decode(charsmap(b"abc\0")), random)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def _pre_tokenizer(random: Random) -> Part:
    behaviour = random.choice(("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous", "?"))
    return random.choice(
        (
            ISOLATE,
            BYTES,
            BYTES | {"add_prefix_space": False, "use_regex": True},
            METASPACE | {"replacement": random.choice(("▁", "a", "🙂", "", "ab"))},
            METASPACE | {"prepend_scheme": random.choice(("first", "never", "?"))},
            {"type": "Split", "pattern": _pattern(random), "behavior": behaviour, "invert": random.random() < 0.3},
            {"type": "Punctuation", "behavior": behaviour},
            {"type": "Digits", "individual_digits": random.random() < 0.5},
            {"type": "CharDelimiterSplit", "delimiter": random.choice((" ", "a", "🙂", "", "ab"))},
            {"type": "FixedLength", "length": random.choice((0, 1, 5, -1, 2**63, 2**64 - 1))},
            {"type": random.choice(("Whitespace", "WhitespaceSplit", "UnicodeScripts", "BertPreTokenizer"))},
            pre_tokenizers_of(),
        )
    )


def _post_processor(random: Random) -> Part:
    ids = random.choice(([], [0], [1, 2], [2**31], [2**32 - 1], [2**32], [-1], [0] * 2000))
    pieces = [random.choice(("A", "A", "B", "<s>", "</s>")) for _ in range(random.choice((0, 1, 2, 3, 5, 300)))]
    special = [random.choice(("<s>", "[SEP]", "")), random.choice((0, 2**31, 2**32 - 1, -1))]
    return random.choice(
        (
            processing(template(*pieces), template("A", "B"), ids),
            processing(template("A"), template(*pieces), ids),
            {"type": "BertProcessing", "sep": special, "cls": special},
            {
                "type": "RobertaProcessing",
                "sep": special,
                "cls": special,
                "trim_offsets": True,
                "add_prefix_space": True,
            },
            BYTES,
            sequence(of="processors"),
        )
    )


def _decoder(random: Random) -> Part:
    return random.choice(
        (
            {"type": random.choice(("Fuse", "ByteFallback", "ByteLevel", "?"))},
            METASPACE | {"replacement": random.choice(("▁", "a", "🙂"))},
            replace(_text(random), _text(random)),
            replace(random.choice(REGEXES), _text(random), "Regex"),
            {"type": "WordPiece", "prefix": _text(random), "cleanup": random.random() < 0.5},
            {
                "type": "Strip",
                "content": random.choice((" ", "a", "ab")),
                "start": random.choice((0, 1, 2**63)),
                "stop": 0,
            },
            {"type": "BPEDecoder", "suffix": _text(random)},
            {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
        )
    )


def _change_normalizer(content: Part, random: Random) -> None:
    content["normalizer"] = _chain(_normalizer, "normalizers", random)


def _change_pre_tokenizer(content: Part, random: Random) -> None:
    content["pre_tokenizer"] = _chain(_pre_tokenizer, "pretokenizers", random)


def _change_post_processor(content: Part, random: Random) -> None:
    content["post_processor"] = _chain(_post_processor, "processors", random)


def _change_decoder(content: Part, random: Random) -> None:
    content["decoder"] = _chain(_decoder, "decoders", random)


def _change_added(content: Part, random: Random) -> None:
    added = {
        "id": random.choice((0, 5, 399, 10**6, 2**32 - 1, 2**32, -1)),
        "content": random.choice((*TEXTS, "a", "the")),
    }
    added |= {name: random.random() < 0.4 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    tokens = content["added_tokens"]
    if tokens and random.random() < 0.3:
        tokens[random.randrange(len(tokens))] |= {key: added[key] for key in random.sample(list(added), 2)}
    else:
        tokens.insert(random.randrange(len(tokens) + 1), added)


def _change_model(content: Part, random: Random) -> None:
    model = content["model"]
    vocab = model["vocab"]
    match random.randrange(8):
        case 0:
            model[random.choice(list(model))] = _value(random)
        case 1:
            model["type"] = random.choice(("BPE", "WordPiece", "Unigram", "WordLevel", None, "?"))
        case 2 | 3 if isinstance(vocab, dict):
            piece = random.choice(list(vocab))
            vocab[random.choice((piece, *TEXTS))] = random.choice((0, 1, 10**6, 2**31, 2**32 - 1, 2**32, -1, 1.5, "0"))
            if random.random() < 0.5:
                vocab.pop(piece, None)
        case 2 | 3:
            piece = [random.choice((*TEXTS, "the")), random.choice((0.0, 1.0, -1e308, 1e308, -1, None, "0"))]
            vocab[random.randrange(len(vocab))] = random.choice((piece, piece[:1], [*piece, 1], None))
        case 4 if isinstance(model.get("merges"), list) and model["merges"]:
            merge = random.choice((["a", "b"], "a b", ["", ""], " ", "abc", ["a"], 3, ["zz", "zz"]))
            model["merges"][random.randrange(len(model["merges"]))] = merge
        case 5:
            model[random.choice(_MODEL_FIELDS)] = random.choice(
                (*TEXTS, True, False, 0, 1, 10**9, 2**64, 0.5, 1.0, -1.0, None)
            )
        case 6:
            model["unk_token" if "unk_token" in model else "unk_id"] = random.choice((None, "?", 0, 10**9, -1))
        case _:
            del model[random.choice(list(model))]


_MODEL_FIELDS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"),
    *("ignore_merges", "max_input_chars_per_word", "unk_id", "merges"),
)


def _change_limits(content: Part, random: Random) -> None:
    size = random.choice((0, 1, 4, 2**31, 2**63, -1))
    content["truncation"] = {"direction": "Right", "max_length": size, "strategy": "LongestFirst", "stride": size}
    fixed = random.choice(("BatchLongest", {"Fixed": size}))
    content["padding"] = {"strategy": fixed, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    content["padding"]["pad_to_multiple_of"] = random.choice((None, 0, 8, 2**63))


def _change_anything(content: Any, random: Random) -> None:
    """One value, wherever it is, or a template in its place."""
    holder: Any = content
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = random.choice(keys)
        if not isinstance(holder[key], dict | list) or not holder[key] or random.random() < 0.2:
            break
        holder = holder[key]
    match random.randrange(4):
        case 0:
            del holder[key]
        case 1:
            holder[key] = holder[random.choice(keys)]
        case _:
            holder[key] = random.choice((_value(random), _text(random), "{{ messages }}", [holder[key]] * 3))


def _value(random: Random) -> object:
    return random.choice(NUMBERS) if random.random() < 0.5 else random.choice(OTHERS)


_CHANGES = (
    *(_change_normalizer, _change_normalizer, _change_pre_tokenizer, _change_pre_tokenizer, _change_post_processor),
    *(_change_decoder, _change_added, _change_added, _change_model, _change_model, _change_limits, _change_anything),
)

# --- GGUF -----------------------------------------------------------------------------------------------------------

_Fields = dict[str, Any]


def _changed_gguf(name: str, random: Random) -> Files:
    files = _gguf(name, random, _change_vocabulary if random.random() < 0.7 else lambda fields, random: None)
    if random.random() < 0.5:
        files = {file: damaged(data, random) for file, data in files.items()}
    return files


def _gguf(name: str, random: Random, change: Callable[[_Fields, Random], None]) -> Files:
    fields = _gguf_fields(name)
    change(fields, random)
    path = write_gguf(**fields)
    data = path.read_bytes()
    path.unlink()
    path.parent.rmdir()
    return {"model.gguf": data}


def _gguf_fields(name: str) -> _Fields:
    if name == "gguf-llama":
        pieces, types, scores = sentencepiece_pieces()
        return {
            "kind": "llama",
            "pieces": pieces,
            "types": types,
            "scores": scores,
            "ids": {"bos": 1},
            "template": CHATML,
        }
    content: Mapping[str, Any] = json.loads(byte_level_core().to_str())["model"]
    pieces = list(content["vocab"])
    merges = [" ".join(pair) for pair in content["merges"]]
    return {
        "kind": "gpt2",
        "pieces": pieces,
        "types": [1] * len(pieces),
        "merges": merges,
        "pre": "llama-bpe",
        "ids": {},
    }


def _change_vocabulary(fields: _Fields, random: Random) -> None:
    place = random.randrange(len(fields["pieces"]))
    match random.randrange(8):
        case 0 | 1:
            fields["pieces"][place] = random.choice((*TEXTS, *fields["pieces"]))
        case 2:
            fields["types"][place] = random.choice((0, *_KINDS, 7, 2**31 - 1, -1))
        case 3:
            fields["types"] = [random.choice(_KINDS)] * random.choice((len(fields["pieces"]), 1))
        case 4:
            fields["ids"] = {
                random.choice(("bos", "eos", "unknown", "padding", "eot")): random.choice((0, 10**6, 2**32 - 1))
            }
        case 5 if fields.get("scores"):
            fields["scores"][place] = random.choice((float("nan"), float("inf"), float("-inf"), 0.0, 1e38))
        case 5 if fields.get("merges"):
            fields["merges"][place % len(fields["merges"])] = random.choice(("", " ", "a", "a b c", "zz zz", "a  b"))
        case 6:
            fields["pre"] = random.choice(("default", "gpt-2", "qwen2", "deepseek-llm", "?", ""))
        case _:
            fields["flags"] = {random.choice(("add_bos_token", "add_eos_token", "add_space_prefix")): True}
