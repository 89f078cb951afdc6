import pytest

from ostro.cli.terminal import WordWrap

POEM = "The quick brown fox jumps over the lazy dog, and then it sleeps.\n\n  - an item that has to be wrapped too\n"


def wrapped(text: str, columns: int, size: int) -> str:
    wrap = WordWrap(lambda: columns)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(map(wrap.feed, pieces)) + wrap.end()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("columns", [10, 20, 33, 200])
def test_lines_end_at_words_however_the_text_comes(size: int, columns: int) -> None:
    shown = wrapped(POEM, columns, size)
    assert shown == wrapped(POEM, columns, 1000)
    assert shown.split() == POEM.split()
    assert all(len(line) < columns for line in shown.splitlines())


def test_text_that_fits_is_unchanged() -> None:
    text = "one  two\n\n    three\n"
    assert wrapped(text, 80, 1) == text


def test_code_keeps_its_lines() -> None:
    text = (
        "Try this, which is code:\n```python\nprint('a line that is longer than the window')\n```\nand so it goes on\n"
    )
    shown = wrapped(text, 20, 2)
    assert "\nprint('a line that is longer than the window')\n" in shown
    assert shown.startswith("Try this, which is\ncode:\n```python\n")
    assert shown.endswith("```\nand so it goes on\n")


def test_a_word_is_shown_once_it_is_whole() -> None:
    wrap = WordWrap(lambda: 80)
    assert [wrap.feed(piece) for piece in ("Hel", "lo", " wor", "ld")] == ["", "", "Hello", ""]
    assert wrap.end() == " world"


def test_a_word_longer_than_a_line_is_not_waited_for() -> None:
    wrap = WordWrap(lambda: 10)
    assert wrap.feed("x" * 25) == "x" * 20
    assert wrap.feed("xx yyyyyyyyy ") == "xxxxxxx\nyyyyyyyyy"


def test_wide_characters_take_two_columns_and_may_end_a_line() -> None:
    assert wrapped("日本語の文章です", 10, 1) == "日本語の\n文章です"


def test_a_window_that_changes_is_followed() -> None:
    columns = 40
    wrap = WordWrap(lambda: columns)
    before = wrap.feed("one two three four ")
    columns = 10
    assert before + wrap.feed("five six seven ") + wrap.end() == "one two three four\nfive six\nseven"
