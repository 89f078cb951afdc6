"""What is read from responses: proper ones, others' variants, and broken ones."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import DONE, delta, event, usage

from ostro.measure.bench.outcomes import Outcome, read
from ostro.measure.bench.wire import Recording

PROPER = [delta("", role="assistant"), delta("a"), delta("b"), delta("c"), delta(None, "length"), usage(7, 3), DONE]


def recording(pieces: list[bytes], *, status: int = 200, kind: bytes = b"text/event-stream") -> Recording:
    """A second lies between one piece and the next."""
    timed = [(101.0 + number, piece) for number, piece in enumerate(pieces)]
    return Recording(
        sent=100.0, ended=101.0 + len(pieces), status=status, headers={b"content-type": kind}, pieces=timed
    )


def outcome(pieces: list[bytes], *, status: int = 200, kind: bytes = b"text/event-stream") -> Outcome:
    return read(recording(pieces, status=status, kind=kind), index=4, began=90.0, max_tokens=3)


def test_proper_answer() -> None:
    found = outcome(PROPER)
    assert found.error is None
    # The role alone, which came first, is no token.
    assert found.arrivals == [2.0, 3.0, 4.0]
    assert (found.index, found.start, found.e2e) == (4, 10.0, 8.0)
    assert (found.ttft, found.gaps, found.itl, found.tpot) == (2.0, [1.0, 1.0], 1.0, 1.0)
    assert (found.input_tokens, found.output_tokens, found.counted_by) == (7, 3, "usage")
    assert found.finish_reason == "length"


def test_lateness_is_measured_from_the_due_time() -> None:
    assert read(recording(PROPER), index=0, began=90.0, max_tokens=3, due=9.5).late == 0.5


def test_completions_have_text() -> None:
    events = [event({"choices": [{"text": word, "finish_reason": None}]}) for word in ("a", "", "b")]
    found = outcome([*events, event({"choices": [{"text": "", "finish_reason": "stop"}]}), DONE])
    assert (found.error, found.arrivals) == (None, [1.0, 3.0])


@pytest.mark.parametrize(
    "first",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
    ],
)
def test_reasoning_and_calls_of_tools_are_tokens_too(first: dict[str, object]) -> None:
    assert outcome([event({"choices": [{"delta": first}]}), *PROPER[1:]]).ttft == 1.0


def test_event_of_several_tokens_is_one_arrival_and_all_are_counted() -> None:
    found = outcome([delta("a b c"), delta("d e f"), delta(None, "stop"), usage(1, 6), DONE])
    assert (len(found.arrivals), found.output_tokens) == (2, 6)
    assert (found.itl, found.tpot) == (1.0, 0.2)


def test_without_usage_tokens_are_counted_by_events() -> None:
    found = outcome([delta("a"), delta("b"), delta(None, "stop"), DONE])
    assert (found.output_tokens, found.counted_by, found.input_tokens) == (2, "events", None)


def test_running_count_of_tokens_ends_with_the_last() -> None:
    counting = [
        event({"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 4, "completion_tokens": number}})
        for number in (1, 2, 3)
    ]
    assert outcome([*counting, delta(None, "stop"), DONE]).output_tokens == 3


def test_cached_prompt_tokens_are_reported() -> None:
    told = {"prompt_tokens": 64, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 48}}
    assert outcome([*PROPER[:5], event({"choices": [], "usage": told}), DONE]).cached_tokens == 48


def test_end_without_done_needs_a_finish_reason() -> None:
    assert outcome(PROPER[:-1]).error is None
    assert outcome(PROPER[:3]).error == "cut off"


def test_server_that_does_not_stream_has_its_answer_at_the_end() -> None:
    choice = {"message": {"role": "assistant", "content": "all"}, "finish_reason": "stop"}
    whole = {"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 9}}
    found = outcome([json.dumps(whole).encode()], kind=b"application/json")
    assert (found.error, found.output_tokens, found.ttft) == (None, 9, found.e2e)


@pytest.mark.parametrize(
    ("pieces", "status", "error", "detail"),
    [
        ([b'{"error": {"message": "full", "code": "queue_full"}}'], 429, "HTTP 429 queue_full", "full"),
        ([b'{"error": {"message": "no", "type": "bad", "code": null}}'], 400, "HTTP 400 bad", "no"),
        ([b'{"error": {"message": "x", "code": 400}}'], 400, "HTTP 400", "x"),
        ([b'{"detail": "Not Found"}'], 404, "HTTP 404", "Not Found"),
        ([b"<h1>Bad\n Gateway</h1>"], 502, "HTTP 502", "<h1>Bad Gateway</h1>"),
        ([], 503, "HTTP 503", ""),
        ([delta("a"), event({"error": {"message": "died", "code": "gone"}})], 200, "error event gone", "died"),
        ([delta("a"), event({"error": "died"})], 200, "error event", "died"),
        ([delta("", role="assistant"), delta(None, "stop"), DONE], 200, "empty answer", "no content"),
        ([DONE], 200, "empty answer", "no content"),
        ([b"data: {oops\n\n"], 200, "not understood", ""),
        ([b"data: [1]\n\n"], 200, "not understood", "[1]"),
        ([b"<html>hello</html>"], 200, "cut off", ""),
    ],
)  # fmt: skip
def test_failure_has_a_kind_and_what_was_said(pieces: list[bytes], status: int, error: str, detail: str) -> None:
    found = outcome(pieces, status=status)
    assert found.error == error
    assert detail in found.detail


def test_broken_connection_keeps_what_came_before() -> None:
    broken = recording(PROPER[:3])
    broken.failure, broken.detail = "timeout", "no whole answer"
    found = read(broken, index=0, began=100.0, max_tokens=3)
    assert (found.error, found.detail, found.arrivals) == ("timeout", "no whole answer", [2.0, 3.0])


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"content": None}, "finish_reason": None}]},
        {"usage": None},
        {"usage": {"prompt_tokens": "7"}},
        {"object": "ping"},
        {},
    ],
)
def test_odd_events_are_passed_over(odd: object) -> None:
    found = outcome([event(odd), *PROPER])
    assert (found.error, found.arrivals, found.output_tokens) == (None, [3.0, 4.0, 5.0], 3)


@given(st.lists(st.integers(1, 400), max_size=12))
def test_how_bytes_are_cut_changes_only_the_times(cuts: list[int]) -> None:
    data = b"".join(PROPER)
    places = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    pieces = [data[start:end] for start, end in pairwise(places)]
    found = outcome(pieces)
    assert (found.error, len(found.arrivals), found.output_tokens, found.finish_reason) == (None, 3, 3, "length")
    assert found.arrivals == sorted(found.arrivals)
