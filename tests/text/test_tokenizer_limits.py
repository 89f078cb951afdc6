"""A tokenizer.json that makes texts longer without limit is refused when it is loaded; usual ones are not."""

import base64
import json
import resource
import shutil
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from text_vocabs import (
    bert_directory,
    byte_level,
    model_directory,
    sentencepiece_core,
    sentencepiece_gguf,
    sentencepiece_like,
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
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ostro.errors import BadCheckpoint, BadRequest
from ostro.text import tokenizer_limits
from ostro.text.tokenizer import Tokenizer
from ostro.text.tokenizer_limits import MAX_GROWN_BYTES, ORDINARY_GROWTH, declared_growth


def with_parts(directory: Path, **parts: object) -> Path:
    """The tokenizer with some of its parts replaced."""
    shutil.copytree(model_directory(), directory, dirs_exist_ok=True)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return directory


NORMALIZERS: dict[str, Part] = {
    "doubling": sequence(*[replace("z", "zz")] * 22),
    "nested doubling": sequence(sequence(*[replace("z", "zz")] * 11), sequence(*[replace("z", "zz")] * 11)),
    "one long text": replace("z", "z" * 2000),
    "of nothing": replace("", "z" * 2000),
    "a regex of nothing": replace("(?=z)", "z" * 2000, "Regex"),
    "repeated matches": replace("(.+)", "$1" * 600, "Regex"),
    "long prefix": {"type": "Prepend", "prepend": "z" * 2000},
    "ligatures": sequence(*[replace("\u0635", "\ufdfa"), {"type": "NFKD"}] * 4),
    "bytes of bytes": sequence(*[{"type": "ByteLevel"}] * 11),
    # The library goes by the parameters where a type's own are missing.
    "in disguise": sequence(*[replace("z", "zz") | {"type": "BertNormalizer"}] * 22),
    "without a type": sequence(*[{"pattern": {"String": "z"}, "content": "zz"}] * 22),
    "many steps": sequence(*[{"type": "Strip", "strip_left": True, "strip_right": True}] * 1000),
}
PRE_TOKENIZERS: dict[str, Part] = {
    "words of letters": pre_tokenizers_of(*[METASPACE, ISOLATE, METASPACE | {"replacement": "b"}, ISOLATE] * 6),
    "bytes of bytes": pre_tokenizers_of(*[BYTES] * 11),
    "bytes of letters": pre_tokenizers_of(*[BYTES | {"add_prefix_space": False}, ISOLATE] * 8),
    "many steps": pre_tokenizers_of(*[ISOLATE] * 1000),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_normalizer_that_grows_without_limit_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """Twenty-two times z -> zz made the prompt "z" take 12.8 s and 544 MiB in the process that serves all models."""
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json: The tokenizer is refused: .*--tokenizer"):
        Tokenizer.load(with_parts(tmp_path, normalizer=NORMALIZERS[name]))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_a_pre_tokenizer_that_grows_without_limit_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json: The tokenizer is refused"):
        Tokenizer.load(with_parts(tmp_path, pre_tokenizer=PRE_TOKENIZERS[name]))


def test_the_refusal_names_the_worst_step(tmp_path: Path) -> None:
    normalizer = sequence(replace(" ", "▁"), replace("z", "y" * 700), {"type": "NFC"})
    worst = r"6\.3e\+03 times as long, and 128 times is the most; Replace \{'pattern': \{'String': 'z'\}.* 700 times"
    # Of 256 times, the byte-level pre-tokenizer takes two.
    with pytest.raises(BadCheckpoint, match=worst):
        Tokenizer.load(with_parts(tmp_path, normalizer=normalizer))


def test_an_added_token_is_not_normalised_before_the_check(tmp_path: Path) -> None:
    """The library normalises added tokens while it reads the file."""
    added = {"id": 9000, "content": "z", "special": False, "normalized": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    bomb = with_parts(tmp_path, normalizer=sequence(*[replace("z", "zz")] * 40), added_tokens=[added])
    with pytest.raises(BadCheckpoint, match="The tokenizer is refused"):
        Tokenizer.load(bomb)


def test_the_compiled_map_of_these_tests_is_one_to_the_library() -> None:
    core = normalizers.Precompiled(base64.b64decode(charsmap(b"abc\0def\0", key="é".encode(), at=4)))
    assert core.normalize_str("xéz") == "xdefz"


@pytest.mark.parametrize(
    ("part", "growth"),
    [
        (precompiled(b"abc\0"), 3),
        (precompiled(b"abc\0de\0", at=4), 2),
        (precompiled(b"abcdef\0", key="é".encode()), 3),
        (precompiled(b"a" * 33 + b"\0", key="ﷺ".encode()), 11),
        (precompiled(b"a" * 90), 90),
        (replace(" ", "▁"), 3),
        (replace("▁▁", "▁"), 1),
        (replace(" {2,}", "▁", "Regex"), 3),
        (replace(r"\s+", "▁", "Regex"), 3),
        (replace(r"\s+|", "▁", "Regex"), 4),
        (replace(r"\s*", "▁", "Regex"), 4),
        (replace(" +", "$0$0", "Regex"), 7),
        ({"type": "Prepend", "prepend": "▁"}, 4),
        ({"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}, 4),
        (BYTES, 4),
        (None, 1),
    ],
)
def test_growth_is_that_of_the_worst_text(part: Part | None, growth: float) -> None:
    assert declared_growth(part, None).factor == growth


def test_a_compiled_map_of_long_strings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="Precompiled alone makes it 5e"):
        Tokenizer.load(with_parts(tmp_path, normalizer=precompiled(b"a" * 5000 + b"\0")))


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\4\0\0\0\xff\xff\xff\xff", b"\0\0\0\0\xff"]
)
def test_a_damaged_compiled_map_is_refused(tmp_path: Path, data: bytes) -> None:
    """The library allocates as much as the map says it has, up to eight gigabytes, and aborts if it cannot."""
    damaged = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
    with pytest.raises(BadCheckpoint):
        Tokenizer.load(with_parts(tmp_path, normalizer=damaged))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *[(form, lambda text, form=form: unicodedata.normalize(form, text)) for form in ("NFC", "NFD", "NFKC", "NFKD")],
        ("Lowercase", str.lower),
    ],
)
def test_no_character_grows_more_than_its_form_says(kind: str, form: Callable[[str], str]) -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    grown = max(len(form(each).encode()) / len(each.encode()) for each in characters)
    assert grown <= declared_growth({"type": kind}, None).factor


PAIR = template("A", "B")
PROCESSORS = {
    "a text many times": processing(template(*"A" * 1000), PAIR, []),
    "of two texts, one twice": processing(template("A"), template("A", "B", "B"), []),
    "twice, in a sequence": {"type": "Sequence", "processors": [processing(template("A", "A"), PAIR, [])] * 20},
    "many special tokens": processing(template("A", *["<s>"] * 60), PAIR, [0] * 1000),
    "many steps": {"type": "Sequence", "processors": [processing(template("A"), PAIR, [])] * 1000},
    "a special token that it lacks": processing(template("A", "</s>"), PAIR, [0]),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_post_processor_that_repeats_texts_or_lacks_its_tokens_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadCheckpoint):
        Tokenizer.load(with_parts(tmp_path, post_processor=PROCESSORS[name]))


def unigram(piece: str) -> models.Model:
    return models.Unigram([("<unk>", 0.0), ("a", -1.0), (piece, -2.0)], 0, False)


@pytest.mark.parametrize(
    "model",
    [
        models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]", max_input_chars_per_word=10**9),
        models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]", continuing_subword_prefix="#" * 10_000),
        models.BPE({"a": 0}, [], continuing_subword_prefix="#" * 10_000),
        unigram("z" * 100_000),
    ],
)
def test_a_vocabulary_that_takes_too_long_over_a_word_is_refused(tmp_path: Path, model: models.Model) -> None:
    core = tokenizers.Tokenizer(model)
    core.decoder = decoders.ByteLevel()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadCheckpoint, match="The tokenizer is refused"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("prefix", ["\n", "#", "##", "é"])
@pytest.mark.parametrize("older", [False, True])
def test_a_prefix_that_merges_lack_is_refused(tmp_path: Path, prefix: str, older: bool) -> None:
    """The library cut its bytes off them, and what was left of a character aborted the process."""
    merges = ["a é", "é a"] if older else [["a", "é"], ["é", "a"]]
    vocab = {piece: number for number, piece in enumerate(("a", "é", "aé", "éa"))}
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "continuing_subword_prefix": prefix}
    with pytest.raises(BadCheckpoint, match="continuing_subword_prefix"):
        Tokenizer.load(with_parts(tmp_path, model=model))


def test_a_prefix_that_merges_have_is_taken(tmp_path: Path) -> None:
    vocab = {piece: number for number, piece in enumerate(("a", "b", "##b", "ab"))}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "##b"]], "continuing_subword_prefix": "##"}
    assert Tokenizer.load(with_parts(tmp_path, model=model)).encode("ab", add_special=False) == [3]


# --- usual tokenizers -----------------------------------------------------------------------------------------------

# As long as those of SentencePiece's own form of NFKC: U+FDFA becomes 33 bytes.
NFKC_MAP = precompiled("صلى الله عليه وسلم".encode() + b"\0", key="ﷺ".encode())
WORDS = {"type": "WhitespaceSplit"}

USUAL: dict[str, tuple[Part | None, Part | None]] = {
    "Llama 2": (sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")), None),
    "Gemma": (replace(" ", "▁"), ISOLATE | {"pattern": {"String": " "}, "behavior": "MergedWithPrevious"}),
    "Llama 3": (None, pre_tokenizers_of(ISOLATE, BYTES | {"add_prefix_space": False})),
    "Qwen": ({"type": "NFC"}, pre_tokenizers_of(ISOLATE, BYTES | {"add_prefix_space": False})),
    "GPT-2": (None, BYTES),
    "CLIP": (sequence({"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}), BYTES),
    "T5": (sequence(NFKC_MAP, replace(" {2,}", "▁", "Regex")), METASPACE),
    "XLM-RoBERTa": (NFKC_MAP, pre_tokenizers_of(WORDS, METASPACE)),
    "BERT": (
        json.loads(normalizers.BertNormalizer().__getstate__()),
        {"type": "BertPreTokenizer"},
    ),
}


@pytest.mark.parametrize("name", USUAL)
def test_the_steps_of_usual_tokenizers_are_taken(tmp_path: Path, name: str) -> None:
    normalizer, pre_tokenizer = USUAL[name]
    tokenizer = Tokenizer.load(with_parts(tmp_path, normalizer=normalizer, pre_tokenizer=pre_tokenizer))
    assert tokenizer.encode("The quick brown fox") == tokenizer._core.encode("The quick brown fox").ids
    growth = declared_growth(normalizer, pre_tokenizer)
    if name not in ("CLIP", "T5", "XLM-RoBERTa"):
        assert growth.factor <= ORDINARY_GROWTH
    # More than fits into the contexts of these models.
    growth.check("é" * 60_000)


def test_vocabularies_of_gguf_files_and_of_older_berts_have_usual_steps() -> None:
    """Their normalizers and pre-tokenizers are ours; a file only chooses among them."""
    for tokenizer in (sentencepiece_like(), byte_level(), Tokenizer.load(bert_directory(older=True))):
        assert tokenizer._growth.factor <= ORDINARY_GROWTH
    core = sentencepiece_core()
    assert declared_growth(json.loads(core.normalizer.__getstate__()), None).factor == 12


def test_texts_are_limited_where_growth_is_more_than_ordinary(tmp_path: Path) -> None:
    directory = with_parts(tmp_path, normalizer=replace("z", "y" * 100))
    tokenizer = Tokenizer.load(directory, chat_template="generic")
    # The vocabulary's byte-level alphabet may double it once more.
    most = MAX_GROWN_BYTES // 200
    too_long, refused = "é" * (most // 2 + 1), pytest.raises(BadRequest, match=r"at most .* 200 times as long")
    assert len(tokenizer.encode("a" * (most // 10))) > 0
    for encode in (
        lambda: tokenizer.encode(too_long),
        lambda: tokenizer.encode_batch(["a", too_long], allow_special=False),
        lambda: tokenizer.encode_start(too_long, 10),
        lambda: tokenizer.encode_pair("a", too_long, 10),
        lambda: tokenizer.encode_chat([{"role": "user", "content": too_long}]),
        lambda: tokenizer.encode_chat([{"role": "user", "content": "<|im_end|>" + too_long}]),
    ):
        with refused:
            encode()


def test_a_file_beyond_all_sizes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadCheckpoint, match="larger than 256 MiB"):
        Tokenizer.load(tmp_path)


def test_an_error_of_the_library_with_a_text_names_the_model(tmp_path: Path) -> None:
    """A vocabulary without the unknown token that it names failed with an untyped error."""
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    core.decoder = decoders.ByteLevel()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadCheckpoint, match="cannot encode plain text"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("depth", [100, 500, 100_000])
def test_nested_sequences_are_refused(tmp_path: Path, depth: int) -> None:
    nested = '{"type":"Sequence","normalizers":[' * depth + "]}" * depth
    directory = with_parts(tmp_path, normalizer="HERE")
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace('"HERE"', nested))
    with pytest.raises(BadCheckpoint):
        Tokenizer.load(directory)


def test_the_module_counts_every_step_of_the_installed_library() -> None:
    ours = {kind for kind in tokenizer_limits._FIXED if isinstance(kind, str)}
    theirs = {
        name
        for module in (normalizers, pre_tokenizers)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and name not in ("Normalizer", "PreTokenizer")
    }
    assert theirs <= ours, "say how much longer a step makes texts"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_that_loads_many_tokenizers_keeps_nothing_of_them() -> None:
    """The library keeps a cache of words for each, which held the probes: 260 KB a load."""

    def load(count: int) -> None:
        for _ in range(count):
            Tokenizer.load(sentencepiece_gguf())

    load(20)
    before = resident()
    load(60)
    assert resident() - before < 6 << 20
