"""Incremental text, held to decoding the whole."""

from typing import cast

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from text_vocabs import byte_level, sentencepiece_like
from tokenizers import decoders, models

from ostro.text.stream import Detokenizer
from ostro.text.tokenizer import Tokenizer

# Without ▁, which a SentencePiece vocabulary cannot tell from a space.
characters = st.characters(exclude_characters="▁", exclude_categories=["Cs"])
some_text = st.text(characters, max_size=30)
cuts = st.lists(st.integers(1, 4), max_size=50)


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_like])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return cast(Tokenizer, request.param())


def streamed(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> str:
    texts, rest = [], ids
    for size in sizes:
        texts.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    return "".join([*texts, detokenizer.push(rest), detokenizer.flush()])


@given(data=st.data(), sizes=cuts, skip_special=st.booleans())
def test_any_ids_in_any_pieces_are_the_text_of_all_of_them(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int], skip_special: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    detokenizer = Detokenizer(tokenizer, [], skip_special=skip_special)
    assert streamed(detokenizer, ids, sizes) == tokenizer.decode(ids, skip_special=skip_special)


@given(prompt=st.text(characters, min_size=1, max_size=20), output=some_text, sizes=cuts)
def test_prompt_and_output_together_are_the_text_that_was_encoded(
    tokenizer: Tokenizer, prompt: str, output: str, sizes: list[int]
) -> None:
    prompt_ids = tokenizer.encode(prompt, allow_special=False)
    all_ids = tokenizer.encode(prompt + output, allow_special=False)
    # Else the prompt's last characters are in a token with the output's first.
    assume(all_ids[: len(prompt_ids)] == prompt_ids)
    text = streamed(Detokenizer(tokenizer, prompt_ids), all_ids[len(prompt_ids) :], sizes)
    assert prompt + text == prompt + output


@given(text=some_text)
def test_no_push_ends_within_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) == text
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in pieces)
    assert detokenizer.flush() == ""


def test_character_the_prompt_left_unfinished_does_not_show_in_the_output() -> None:
    ids = byte_level().encode("𝄞", add_special=False)
    assert len(ids) > 1, "the corpus taught this character as one token; choose a rarer one"
    detokenizer = Detokenizer(byte_level(), ids[:-1])
    assert detokenizer.push([ids[-1]]) == "\ufffd"
    assert detokenizer.push(byte_level().encode("ok", add_special=False)) == "ok"


def test_unfinished_character_at_the_end_comes_out_replaced_by_flush() -> None:
    detokenizer = Detokenizer(byte_level(), [])
    assert detokenizer.push(byte_level().encode("a𝄞", add_special=False)[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_first_word_keeps_its_space_after_a_prompt_and_loses_it_at_the_beginning() -> None:
    word = sentencepiece_like().encode("dog", add_special=False)
    after_text = Detokenizer(sentencepiece_like(), sentencepiece_like().encode("The"))
    after_bos = Detokenizer(sentencepiece_like(), sentencepiece_like().encode(""))
    assert after_text.push(word) == " dog"
    assert after_bos.push(word) == "dog"


def test_special_tokens_show_only_when_asked_for() -> None:
    ids = byte_level().encode("a<|im_end|>b", add_special=False)
    assert Detokenizer(byte_level(), []).push(ids) == "ab"
    assert Detokenizer(byte_level(), [], skip_special=False).push(ids) == "a<|im_end|>b"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert Detokenizer(byte_level(), []).push([byte_level().vocab_size, 10**9, -1]) == ""


def test_special_tokens_that_a_reader_needs_are_shown_and_no_others() -> None:
    core = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<call>", "<end>"])
    tokenizer = Tokenizer(core)
    [call, end] = core.encode("<call><end>", add_special_tokens=False).ids
    for cut in range(5):
        detokenizer = Detokenizer(tokenizer, [], shown_ids=frozenset({call}))
        ids = [0, call, end, 0]
        assert detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) == "a<call>a"
