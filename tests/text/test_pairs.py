"""Texts for encoders: joined and shortened as the tokenizers library does it itself."""

import json
from itertools import product
from pathlib import Path

import pytest
import tokenizers
from encoder_directory import tokenizer as wordpiece
from tokenizers import decoders, models, pre_tokenizers, processors

from ostro.errors import BadRequest
from ostro.text.pairs import LatestText
from ostro.text.tokenizer import Tokenizer

TEXTS = ["the fox", "the quick brown fox jumps over a lazy dog", "paris", "", "the [SEP] </s> fox"]


def sentencepiece() -> tokenizers.Tokenizer:
    """As XLM-R has it: pairs have two separators, and no token types."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁the", "▁fox", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    core = tokenizers.Tokenizer(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], unk_id=3))
    core.add_special_tokens(pieces[:4])
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return core


@pytest.fixture(params=["wordpiece", "sentencepiece"])
def core(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return wordpiece() if request.param == "wordpiece" else sentencepiece()


def loaded(core: tokenizers.Tokenizer, directory: Path) -> Tokenizer:
    core.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({}))
    return Tokenizer.load(directory)


@pytest.mark.parametrize("most", [5, 6, 7, 8, 9, 12, 40])
def test_pairs_and_starts_are_those_of_the_library(core: tokenizers.Tokenizer, tmp_path: Path, most: int) -> None:
    ours = loaded(core, tmp_path)
    core.enable_truncation(most)
    for first in TEXTS:
        assert ours.encode_start(first, most) == core.encode(first).ids
        for second in TEXTS:
            expected = core.encode(first, second)
            found = ours.encode_pair(first, second, most)
            assert found.ids == expected.ids
            types = [0] * found.second_at + [1] * (len(found.ids) - found.second_at) if found.second_at else []
            assert types == (expected.type_ids if 1 in expected.type_ids else [])


def test_without_a_limit_nothing_is_shortened(core: tokenizers.Tokenizer, tmp_path: Path) -> None:
    long = "the fox " * 50
    assert loaded(core, tmp_path).encode_pair(long, long).ids == core.encode(long, long).ids


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        loaded(wordpiece(), tmp_path).encode_pair("the fox", "\ud800")


def test_truncated_text_takes_neither_time_nor_memory(tmp_path: Path) -> None:
    """The library keeps it, and joins each piece of one text with each of the other: here, millions."""
    ours, long = loaded(wordpiece(), tmp_path), "the fox " * 2000
    assert len(ours.encode_pair(long, long, 5).ids) == 5
    assert len(ours.encode_start(long, 3)) == 3


def test_fewer_tokens_than_the_special_ones_are_refused(core: tokenizers.Tokenizer, tmp_path: Path) -> None:
    ours, special = loaded(core, tmp_path), core.num_special_tokens_to_add(True)
    with pytest.raises(BadRequest, match=f"{special} are special ones") as raised:
        ours.encode_pair("the fox", "paris", special)
    assert raised.value.param == "truncate_prompt_tokens"
    with pytest.raises(BadRequest, match="raise it"):
        ours.encode_start("the fox", core.num_special_tokens_to_add(False))


def test_first_text_that_comes_again_is_not_encoded_again(tmp_path: Path) -> None:
    ours, latest = loaded(wordpiece(), tmp_path), LatestText()
    for first, second in product(TEXTS, TEXTS):
        assert ours.encode_pair(first, second, None, latest) == ours.encode_pair(first, second)
