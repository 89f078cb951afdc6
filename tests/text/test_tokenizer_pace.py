"""Tokenizers whose regexes take time in the square of a text: found when they are loaded, and such texts refused."""

import json
from pathlib import Path

import pytest
from model_directory import write_model

from ostro.errors import BadRequest
from ostro.text import tokenizer_pace
from ostro.text.tokenizer import Tokenizer
from ostro.text.tokenizer_pace import measured_pace

ORDINARY = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'m|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\d",
)
SLOW = {r"\s+$": " ", r"\w+@": "a", r"a*a*c": "a", r"(ab)*c": "ab", r"(abcd)*e": "abcd"}


def tokenizer_with(directory: Path, pattern: str, *, normalizes: bool = False) -> Tokenizer:
    model = write_model(directory)
    whole = json.loads((model / "tokenizer.json").read_text())
    regex = {"Regex": pattern}
    if normalizes:
        whole["normalizer"] = {"type": "Replace", "pattern": regex, "content": ""}
    else:
        split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
        whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, whole["pre_tokenizer"]]}
    (model / "tokenizer.json").write_text(json.dumps(whole))
    return Tokenizer.load(model)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("pattern", "normalizes"), [*((each, False) for each in SLOW), (r"\s+$", True), (r"(ab)*c", True)]
)
def test_text_that_a_pattern_takes_long_over_is_refused(tmp_path: Path, pattern: str, normalizes: bool) -> None:
    """32,000 blanks took twenty seconds, and a million would take hours, in a thread that nothing stops. Ordinary
    texts of the same length are encoded.
    """
    tokenizer = tokenizer_with(tmp_path, pattern, normalizes=normalizes)
    assert tokenizer._pace is not None
    assert tokenizer._pace.slow, "encoding would not end"
    with pytest.raises(BadRequest, match="gave up on this text"):
        tokenizer.encode("the quick " * 100 + SLOW[pattern] * 400_000 + "! @ce")
    assert len(tokenizer.encode("the quick brown fox jumps. " * 2_000)) > 2_000


@pytest.mark.parametrize("pattern", ORDINARY)
def test_patterns_of_usual_vocabularies_are_not_slow(tmp_path: Path, pattern: str) -> None:
    tokenizer = tokenizer_with(tmp_path, pattern)
    assert tokenizer._pace is not None
    assert not tokenizer._pace.slow
    assert len(tokenizer.encode(" " * 100_000 + "a" * 100_000)) > 1_000


def test_tokenizer_without_patterns_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path))
    monkeypatch.setattr(tokenizer_pace, "_seconds", lambda read, text: pytest.fail("nothing is to be tried"))
    assert not measured_pace(tokenizer._core, None, {"type": "ByteLevel"}).slow
