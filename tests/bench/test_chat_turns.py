"""The chat that shows how much of a prompt is computed again: its arithmetic, and the whole of it on a tiny model."""

from itertools import pairwise
from pathlib import Path

import pytest
from live_server import live_server
from native_models import needs_library

from chat_turns import PAGE_SIZE, TURNS, Turn, message_lengths, play, table, turn_of, write_model

END = 9
OPENING = len("\n<|im_start|>assistant\n".replace("<|im_start|>", "|"))
"""Tokens between a question's end and the thoughts: a character each, and one for the marker."""


def test_messages_end_with_their_last_token_and_what_follows_is_no_message() -> None:
    assert message_lengths([1, 2, END, 3, END, 4], {END}) == [3, 2, 1]
    assert message_lengths([1, END], {END}) == [2, 0]
    assert message_lengths([1, END, 7, 7], {END, 7}) == [2, 1, 1, 0]


def test_all_of_the_first_turn_is_new() -> None:
    turn = turn_of([1, 2, END, 3, END, 4], 0, {END})
    assert (turn.answer, turn.question, turn.again) == (0, 6, 0)
    assert turn.holds(PAGE_SIZE)


def test_later_turn_compares_what_is_computed_again_with_the_answer_before_it() -> None:
    system, question, answer, opening = [1, END], [2, 2, END], [3, 3, 3, END], [4]
    ids = [*system, *question, *answer, *question, *opening]
    turn = turn_of(ids, 4, {END})
    assert (turn.prompt, turn.cached, turn.answer, turn.question) == (13, 4, 4, 4)
    # Thoughts behind the opening parted them.
    again = turn_of(ids, 4, {END}, earlier=[*system, *question, 3, 8, 8])
    assert (again.shared, again.missed) == (6, 2)
    # The answer, and a token of the first question's page.
    assert turn.again == 5
    assert turn.holds(1)
    assert not turn.holds(0)


def test_table_marks_turns_that_compute_too_much() -> None:
    _, first, second, third = table([Turn(9, 0, 0, 9), Turn(50, 20, 10, 10, 25), Turn(90, 20, 10, 10)], PAGE_SIZE)
    assert not first.endswith("too many")
    assert second.split() == ["2", "50", "25", "20", "10", "20", "10", "+", "16"]
    assert third.endswith("too many")


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_library), "torch"])
def test_turn_of_a_chat_computes_at_most_one_message_and_a_page_again(tmp_path: Path, backend: str) -> None:
    """The model keeps states, and its template drops the thinking of earlier turns."""
    model = write_model(tmp_path)
    options = ["--model", str(model), "--backend", backend, "--device", "cpu", "--kv-memory", "64M", "--threads", "1"]
    with live_server(tmp_path, *options, "--page-size", str(PAGE_SIZE), faults="") as server:
        turns = play(server.url)
    assert len(turns) == TURNS
    assert all(turn.holds(PAGE_SIZE) for turn in turns), "\n".join(table(turns, PAGE_SIZE))
    # Less than a page is missed, and what precedes the thoughts in the answer's message.
    assert all(0 <= turn.missed < PAGE_SIZE + OPENING for turn in turns[1:]), "\n".join(table(turns, PAGE_SIZE))
    # Nor do they hold because the template keeps thinking: then answers would be cached with what precedes them.
    assert all(later.cached < earlier.prompt for earlier, later in pairwise(turns))
