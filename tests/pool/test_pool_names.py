import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.config import is_name
from ostro.errors import ModelNotFound
from ostro.pool.catalog import resolve

LETTERS = string.ascii_letters + string.digits
PARTS = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + "._-", max_size=95)).filter(
    lambda part: ".." not in part
)
NAMES = PARTS | st.builds("{}/{}".format, PARTS, PARTS)


@given(NAMES)
def test_one_or_two_parts_are_a_name(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/..",
        "../a",
        "a..b",
        "a//b",
        "/a",
        "a/",
        "a/b/c",
        ".hidden",
        "a/.hidden",
        "-flag",
        "_a",
        "a b",
        "a\n",
        "a\x00",
        "a:b",
        "a\\b",
        "a%2fb",
        "ä",
        "ａ",
        "٣",
        "a" * 97,
        "a/" + "b" * 97,
    ],
)
def test_other_texts_are_not_names(name: str) -> None:
    assert not is_name(name)


@given(st.text(max_size=20) | st.text("ab./-\\", max_size=8))
def test_name_never_leaves_its_root(text: str) -> None:
    if is_name(text):
        assert text.isascii()
        assert all(part not in ("", ".", "..") for part in text.split("/"))


@given(NAMES, st.sets(NAMES))
def test_exact_name_wins(name: str, others: set[str]) -> None:
    assert resolve(name, others | {name, name.replace("/", "-")}) == name


@given(PARTS, PARTS)
def test_slash_finds_dash_and_dash_finds_slash(org: str, model: str) -> None:
    assert resolve(f"{org}/{model}", {f"{org}-{model}"}) == f"{org}-{model}"
    if is_name(f"{org}-{model}"):
        assert resolve(f"{org}-{model}", {f"{org}/{model}"}) == f"{org}/{model}"


@given(NAMES, st.sets(NAMES))
def test_what_is_found_is_known_and_differs_in_one_letter_at_most(name: str, known: set[str]) -> None:
    try:
        found = resolve(name, known)
    except ModelNotFound:
        return
    if found is not None:
        assert found in known
        assert found.replace("/", "-") == name.replace("/", "-")


def test_name_that_could_be_two_models_is_refused_with_both() -> None:
    with pytest.raises(ModelNotFound, match="'a/b-c' or 'a-b/c'"):
        resolve("a-b-c", ["a/b-c", "a-b/c"])
    assert resolve("a-b-c", ["a/b-c", "a-b/c", "a-b-c"]) == "a-b-c"


@pytest.mark.parametrize("name", ["b", "A", "a/b/c", "../a", "a" * 100_000])
def test_unknown_name_finds_nothing(name: str) -> None:
    assert resolve(name, ["a"]) is None


def test_name_that_was_given_at_the_start_need_not_be_fit_for_a_path() -> None:
    assert resolve("my model (v2)", ["my model (v2)"]) == "my model (v2)"
