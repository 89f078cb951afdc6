"""What a reader makes of raw answers. Each is read at every cut: one character at a time, two, three, five, eight, all
at once, and at random ones.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.answers.events import CallArguments, Event, Reasoning, Text
from ostro.answers.profile import ReasoningMarkers
from ostro.answers.reader import AnswerReader

THINK = ReasoningMarkers("<think>", "</think>")
SIZES = (1, 2, 3, 5, 8, 10_000)


def joined(events: list[Event]) -> list[Event]:
    """With the pieces of each part put together."""
    whole: list[Event] = []
    for event in events:
        match whole[-1] if whole else None, event:
            case Text(before), Text(text):
                whole[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                whole[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                whole[-1] = CallArguments(index, before + text)
            case _:
                whole.append(event)
    return whole


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("raw", "in_reasoning", "reasoning", "text"),
    [
        ("<think>R</think>C", False, "R", "C"),
        ("<think>\nR\nS\n</think>\n\n\nC", False, "R\nS\n", "\nC"),
        ("R</think>C", True, "R", "C"),
        ("R", True, "R", ""),
        ("All of it.", False, "", "All of it."),
        ("\n<think>R</think>C", False, "R", "C"),
        ("Say <think>.", False, "", "Say <think>."),
        ("R </thin", True, "R </thin", ""),
        (" <thin", False, "", " <thin"),
        ("<think></think>C", False, "", "C"),
    ],
)
def test_reasoning_is_split_from_the_text(size: int, raw: str, in_reasoning: bool, reasoning: str, text: str) -> None:
    reader = AnswerReader(markers=THINK, in_reasoning=in_reasoning)
    events = [event for piece in pieces(raw, size) for event in reader.push(piece)]
    events += reader.end(cut=False)
    assert joined(events) == [*([Reasoning(reasoning)] if reasoning else []), *([Text(text)] if text else [])]
    assert (reader.reasoning, reader.text) == (reasoning, text)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "\n", " ", "a", "</", "é"]), max_size=12))
def test_the_cut_never_matters(parts: list[str]) -> None:
    whole, cut = AnswerReader(markers=THINK), AnswerReader(markers=THINK)
    at_once = joined([*whole.push("".join(parts)), *whole.end(cut=False)])
    in_parts = joined([*(event for part in parts for event in cut.push(part)), *cut.end(cut=False)])
    assert at_once == in_parts
    assert (whole.text, whole.reasoning) == (cut.text, cut.reasoning)
