"""Stop strings, held to a plain search over the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ostro.errors import BadRequest
from ostro.text.stream import StopMatcher, StopResult


def whole_text_verdict(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The earliest stop, of those at one place the longest."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[: start + len(stop) if include_stop else start], stop


def streamed(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = []
    for piece in pieces:
        result = matcher.push(piece)
        shown.append(result.text)
        if result.stop is not None:
            break
    else:
        shown.append(matcher.flush())
    return "".join(shown), matcher.matched


small_text = st.text(alphabet="abc", max_size=12)


@given(st.lists(small_text), st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4), st.booleans())
@example(["a", "b", "d"], ["ab", "abc"], True)
@example(["ab", "c"], ["abcd", "c"], False)
def test_verdict_is_that_of_the_whole_text_however_it_is_cut(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    assert streamed(pieces, stops, include_stop) == whole_text_verdict("".join(pieces), stops, include_stop)


@given(st.lists(small_text), st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_text_is_held_back_only_while_it_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_text = shown = ""
    for piece in pieces:
        given_text += piece
        result = matcher.push(piece)
        shown += result.text
        if result.stop is not None:
            return
        held = given_text[len(shown) :]
        assert not held or any(stop.startswith(held) or held.startswith(stop) for stop in stops)


def test_stop_is_found_across_pieces_and_nothing_after_it_is_shown() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Fine.\nUs") == StopResult("Fine.", None)
    assert matcher.push("er: and") == StopResult("", "\nUser:")
    assert matcher.push("more") == StopResult("", "\nUser:")
    assert matcher.flush() == ""


def test_partial_stop_string_is_released_as_soon_as_it_fails_to_match() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("a </").text == "a "
    assert matcher.push("b").text == "</b"


def test_included_stop_is_the_end_of_the_text() -> None:
    assert streamed(["one. two"], ["."], include_stop=True) == ("one.", ".")


def test_stop_completed_only_at_the_end_is_reported_by_matched() -> None:
    matcher = StopMatcher(["ab", "abc"])
    assert matcher.push("xab") == StopResult("x", None)
    assert matcher.flush() == ""
    assert matcher.matched == "ab"


def test_without_stops_text_passes_at_once() -> None:
    assert StopMatcher([]).push("text") == StopResult("text", None)


def test_empty_stop_is_refused() -> None:
    with pytest.raises(BadRequest, match="non-empty"):
        StopMatcher([""])
