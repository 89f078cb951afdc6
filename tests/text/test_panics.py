"""A pattern that backtracks without end makes the tokenizers library panic: an error that names the model, no more."""

import json
from pathlib import Path

import pytest
from model_directory import write_model

from ostro.errors import BadCheckpoint, BadRequest, ModelError
from ostro.text.tokenizer import Tokenizer

# Each takes the library to its limit of tries, on texts that differ.
CATASTROPHIC = ("(a+)+$", r"(\w+\s?)*$", "(1+)+$", "( +)+$")


def with_pattern(directory: Path, pattern: str, *, where: str = "pre_tokenizer") -> Path:
    path = write_model(directory) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    if where == "pre_tokenizer":
        tokenizer[where] = {"type": "Sequence", "pretokenizers": [split, tokenizer[where]]}
    else:
        tokenizer[where] = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    path.write_text(json.dumps(tokenizer))
    return directory


@pytest.mark.full
@pytest.mark.parametrize("where", ["pre_tokenizer", "normalizer"])
def test_a_catastrophic_pattern_is_refused_at_load_with_the_models_name(tmp_path: Path, where: str) -> None:
    directory = with_pattern(tmp_path / "regex-bomb", CATASTROPHIC[0], where=where)
    with pytest.raises(BadCheckpoint, match=r"The tokenizer of .*regex-bomb cannot encode plain text") as caught:
        Tokenizer.load(directory)
    assert "--tokenizer" in caught.value.message


@pytest.mark.full
@pytest.mark.parametrize("pattern", CATASTROPHIC[1:])
def test_probes_find_repetitions_of_several_kinds(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(BadCheckpoint, match="cannot encode plain text"):
        Tokenizer.load(with_pattern(tmp_path, pattern))


def test_an_invalid_pattern_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json is not a valid tokenizer"):
        Tokenizer.load(with_pattern(tmp_path, "("))


@pytest.mark.full
def test_a_text_that_a_tokenizer_gives_up_on_fails_alone(tmp_path: Path) -> None:
    """Shorter than any probe, or as long: the request fails, and the next one is served."""
    tokenizer = Tokenizer.load(with_pattern(tmp_path / "slow-on-z", "(z+)+$"))
    expected = tokenizer.encode("plain text")
    bad, gave_up = "z" * 30 + "!", pytest.raises(ModelError, match=r"The tokenizer of .*slow-on-z gave up on this text")
    with gave_up:
        tokenizer.encode(bad)
    with gave_up:
        tokenizer.encode(bad, allow_special=False)
    with pytest.raises(BadRequest, match=r"The model's tokenizer gave up on this text"):
        tokenizer.encode("z" * 40 + "!")
    with pytest.raises(BadRequest, match=r"The model's tokenizer gave up on this text"):
        tokenizer.encode_chat([{"role": "user", "content": f"<|im_start|>{bad}"}])
    assert tokenizer.encode("plain text") == expected
