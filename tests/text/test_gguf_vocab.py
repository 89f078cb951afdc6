"""Vocabularies in GGUF files, held to the libraries they were converted from."""

import json
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_vocabs import (
    BYTE,
    CHATML,
    CONTROL,
    CONTROL_PIECES,
    CORPUS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_level,
    byte_level_core,
    control_ids,
    sentencepiece_like,
    sentencepiece_model,
    sentencepiece_pieces,
    write_gguf,
)
from tokenizers import Regex, pre_tokenizers

from ostro.errors import BadCheckpoint, OstroError, UnsupportedModel
from ostro.text.gguf_vocab import gguf_vocab
from ostro.text.pretokenizers import PRE_TOKENIZERS
from ostro.text.tokenizer import Tokenizer
from ostro.weights import read_gguf_header


def byte_level_file(
    *,
    pre: str = "gpt-2",
    ids: dict[str, int] | None = None,
    flags: dict[str, bool] | None = None,
    template: str | None = None,
) -> Path:
    """The small byte-level vocabulary as a converter would write it."""
    model = json.loads(byte_level_core().to_str())["model"]
    vocabulary = byte_level_core().get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [CONTROL if p in CONTROL_PIECES else USER_DEFINED if p in ("<think>", "   ") else NORMAL for p in pieces]
    merges = [" ".join(pair) for pair in model["merges"]]
    return write_gguf("gpt2", pieces, types, pre=pre, merges=merges, ids=ids, flags=flags, template=template)


@cache
def converted() -> Tokenizer:
    end, turn_end = control_ids()
    ids = {"bos": end, "eos": end, "eot": turn_end}
    return Tokenizer.load(byte_level_file(ids=ids, flags={"add_bos_token": True}, template=CHATML))


@given(st.text(max_size=40) | st.sampled_from(CORPUS))
def test_byte_level_file_gives_the_ids_of_the_original(text: str) -> None:
    assert converted().encode(text) == byte_level().encode(text)
    assert converted().decode(converted().encode(text, add_special=False), skip_special=False) == text


@pytest.mark.full
def test_byte_level_file_gives_ends_special_tokens_and_template() -> None:
    messages = [{"role": "user", "content": "Hi <|im_end|> there   <think>"}]
    assert (converted().bos_id, converted().eos_ids) == (byte_level().bos_id, byte_level().eos_ids)
    assert converted().vocab_size == byte_level().vocab_size
    assert converted().encode_chat(messages) == byte_level().encode_chat(messages)
    assert all(converted().token_bytes(i) == byte_level().token_bytes(i) for i in range(converted().vocab_size))


def test_end_token_is_appended_where_the_file_says_so() -> None:
    end, _ = control_ids()
    path = byte_level_file(ids={"eos": end}, flags={"add_eos_token": True})
    tokenizer = Tokenizer.load(path)
    for allow_special in (True, False):
        ids = tokenizer.encode("the dog", allow_special=allow_special)
        assert ids == [*tokenizer.encode("the dog", add_special=False), end]


def test_turn_end_that_only_the_template_names_ends_generation() -> None:
    end, turn_end = control_ids()
    with_template = byte_level_file(ids={"eos": end}, template=CHATML)
    another = byte_level_file(ids={"eos": end}, template="{{ messages[0].content }}")
    assert Tokenizer.load(with_template).eos_ids == {end, turn_end}
    assert Tokenizer.load(another).eos_ids == {end}


def test_a_file_without_a_template_gets_the_one_that_its_tokens_identify() -> None:
    end, turn_end = control_ids()
    tokenizer = Tokenizer.load(byte_level_file(ids={"eos": end}))
    assert tokenizer.eos_ids == {end, turn_end}
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == byte_level().encode_chat(
        [{"role": "user", "content": "hi"}]
    )


def test_file_may_have_a_template_for_tools() -> None:
    metadata = read_gguf_header(byte_level_file()).metadata
    assert gguf_vocab(metadata).tool_template is None
    assert gguf_vocab({**metadata, "tokenizer.chat_template.tool_use": "{{ tools }}"}).tool_template == "{{ tools }}"


@given(
    text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=40)
    | st.sampled_from(CORPUS)
)
def test_sentencepiece_file_gives_the_ids_of_sentencepiece(text: str) -> None:
    expected = sentencepiece_model().EncodeAsIds(text)
    assert sentencepiece_like().encode(text, allow_special=False) == [1, *expected]
    assert sentencepiece_like().decode(expected) == text


def test_spaces_are_kept_where_no_prefix_is_wanted() -> None:
    pieces, types, scores = sentencepiece_pieces()
    flags = {"add_space_prefix": False, "add_bos_token": False}
    path = write_gguf("llama", pieces, types, scores=scores, ids={"bos": 1, "eos": 2, "unknown": 0}, flags=flags)
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode(" dog") == sentencepiece_model().EncodeAsIds("dog")
    for text in ("dog", " dog", "  dog "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_a_sentencepiece_file_leaves_out_are_the_usual_ones() -> None:
    pieces, types, scores = sentencepiece_pieces()
    tokenizer = Tokenizer.load(write_gguf("llama", pieces, types, scores=scores))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, frozenset({2}))
    assert tokenizer.encode("the dog") == sentencepiece_like().encode("the dog")


def test_vocabulary_with_its_merges_in_the_file_needs_no_scores() -> None:
    pieces = ["<unk>", "▁", "a", "b", "ab", "▁ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, *[NORMAL] * 5, *[BYTE] * 256]
    tokenizer = Tokenizer.load(write_gguf("gemma4", pieces, types, merges=["a b", "▁ ab"], ids={"unknown": 0}))
    ids = tokenizer.encode("ab ab ü")
    assert [tokenizer.token_bytes(token) for token in ids] == [b"ab", b" ab", b" ", b"\xc3", b"\xbc"]
    assert tokenizer.decode(ids) == "ab ab ü"


def test_markers_of_phi3_swallow_the_space_after_them() -> None:
    pieces, types, scores = sentencepiece_pieces()
    path = write_gguf(
        "llama",
        [*pieces, "<|end|>"],
        [*types, CONTROL],
        scores=[*scores, -1000.0],
        ids={"bos": 1, "eos": 2, "unknown": 0},
        architecture="phi3",
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("<|end|>\n dog") == tokenizer.encode("<|end|>dog")


def test_unknown_word_rule_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedModel, match="'brand-new'"):
        Tokenizer.load(byte_level_file(pre="brand-new"))


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv"])
def test_unknown_kind_of_vocabulary_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{kind}'"):
        Tokenizer.load(write_gguf(kind, ["a"], [NORMAL]))


def test_merges_that_do_not_fit_the_tokens_are_refused() -> None:
    with pytest.raises(BadCheckpoint, match="merges"):
        Tokenizer.load(write_gguf("gpt2", ["a", "b"], [NORMAL] * 2, pre="gpt-2", merges=["a c"]))


def test_special_id_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="eos"):
        Tokenizer.load(write_gguf("gpt2", ["a"], [NORMAL], pre="gpt-2", merges=[], ids={"eos": 9}))


def test_every_word_rule_is_a_valid_pattern() -> None:
    for rule in PRE_TOKENIZERS.values():
        assert all(Regex(pattern) for pattern in rule.patterns)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        # LFM2, and Granite 4: numbers of up to three digits.
        (("lfm2", "dbrx"), ["We", "'LL", " see", " ", "123", "4", ";\n\n", "नमस", "्त", "े", "  ", " x"]),
        # Qwen3-Next: single digits.
        (("qwen2",), ["We", "'LL", " see", " ", *"1234", ";\n\n", "नमस", "्त", "े", "  ", " x"]),
        # Qwen 3.5: marks belong to words, too.
        (("qwen35",), ["We", "'LL", " see", " ", *"1234", ";\n\n", "नमस्ते", "  ", " x"]),
    ],
)
def test_word_rules_of_recurrent_models_split_as_their_own_tokenizers(names: tuple[str, ...], words: list[str]) -> None:
    for name in names:
        (pattern,) = PRE_TOKENIZERS[name].patterns
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        assert [word for word, _ in split.pre_tokenize_str("".join(words))] == words


VOCABULARIES = sorted(Path(os.environ["OSTRO_VOCAB_DIR"]).glob("*.gguf")) if "OSTRO_VOCAB_DIR" in os.environ else []


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_known_vocabulary_gives_its_recorded_ids(path: Path) -> None:
    """Over files that are too large to keep here: vocabularies, each with texts (.inp) and their ids (.out)."""
    texts_file, ids_file = (path.with_name(path.name + ending) for ending in (".inp", ".out"))
    try:
        core = gguf_vocab(read_gguf_header(path).metadata).core
    except OstroError as error:
        pytest.skip(str(error))
    if not texts_file.is_file():
        pytest.skip("no recorded ids")
    core.encode_special_tokens = True
    texts = texts_file.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    recorded = ids_file.read_text().split("\n")
    assert len(recorded) >= len(texts)
    for text, line in zip(texts, recorded, strict=False):
        assert core.encode(text, add_special_tokens=False).ids == [int(token) for token in line.split()]
