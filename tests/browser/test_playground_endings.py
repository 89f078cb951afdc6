"""Answers that ended early: the page marks them, keeps the mark, and lets the model go on with the same answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser_fixtures import Complaints, Visit
from live_server import LiveServer
from page_checks import flaws, is_wider_than_the_screen
from playground_page import (
    KEY,
    act,
    answers,
    choose,
    fixed_answer,
    names,
    post,
    say,
    set_parameter,
    streamed,
    turn,
    until,
    until_idle,
    until_true,
    wait_for_answer,
    wait_until_over,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.full

CUT = "This answer was cut off: max tokens reached, or the context is full."
STOPPED = "You stopped this answer."
LOST = "This answer broke off: the connection or the server failed."
LEFT = "This page was closed before the answer was complete."


def mark(page: Page) -> str:
    """What the page says of the last answer's end."""
    return page.locator(".turns > .assistant").last.locator(".ended").inner_text().removeprefix("✂").strip()


def proceed(page: Page) -> dict[str, Any]:
    """Continues the last answer; returns the request's body."""
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Continue", exact=True).click()
    wait_for_answer(page)
    body: dict[str, Any] = json.loads(sent.value.post_data or "")
    return body


def test_cut_answer_is_continued_by_the_model(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    set_parameter(page, "Temperature", 0)
    set_parameter(page, "Max tokens", 8)
    say(page, "the quick brown fox")
    wait_for_answer(page)
    assert mark(page) == CUT
    [begun] = answers(page)
    body = proceed(page)
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert [each["role"] for each in body["messages"]] == ["user", "assistant"]
    assert body["messages"][-1]["content"].split() == begun.split()
    expected = post(playground, "/v1/chat/completions", {**body, "stream": False, "stream_options": None})
    whole = body["messages"][-1]["content"] + expected["choices"][0]["message"]["content"]
    assert ["".join(text.split()) for text in answers(page)] == ["".join(whole.split())], "it is one answer"
    assert page.locator(".versions button").count() == 0


def test_stopped_answer_is_marked_and_can_be_continued(slow_playground: LiveServer, visit: Visit) -> None:
    page = visit(slow_playground, key=KEY)
    set_parameter(page, "Max tokens", 7000)
    say(page, "Go on for long.")
    length = "document.querySelector('.turns .assistant .prose').textContent.length"
    until_true(page, f"{length} > 40")
    assert page.get_by_role("button", name="Continue", exact=True).count() == 0
    page.keyboard.press("Escape")
    wait_until_over(page, "chat")
    until_idle(slow_playground)
    assert mark(page) == STOPPED
    begun = page.evaluate(length)
    page.get_by_role("button", name="Continue", exact=True).click()
    until_true(page, f"{length} > {begun} + 40")
    assert page.locator(".ended").filter(visible=True).count() == 0, "it goes on"
    # The page is closed in the middle of it.
    page.reload()
    page.wait_for_selector(".turns .assistant .actions")
    assert mark(page) == LEFT
    assert page.evaluate(length) > begun
    until_idle(slow_playground)


def test_answer_that_broke_off_is_marked_and_continued(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)

    def cut(route: Route) -> None:
        route.fulfill(body=streamed("Half an ", done=False), content_type="text/event-stream")

    page.route("**/v1/chat/completions", cut)
    say(page, "Hello?")
    wait_for_answer(page)
    assert mark(page) == LOST
    # A second failure leaves it as it was.
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="", content_type="text/event-stream"))
    proceed(page)
    assert (answers(page), mark(page)) == (["Half an"], LOST)
    page.unroute_all()
    fixed_answer(page, "answer.", finish="stop")
    proceed(page)
    assert answers(page) == ["Half an answer."]
    assert page.locator(".ended").filter(visible=True).count() == 0
    assert page.get_by_role("button", name="Continue", exact=True).count() == 0
    assert page.get_by_role("alert").inner_text() == ""


def test_refusal_to_continue_is_told_and_the_answer_stays(
    playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected.append("400")
    page = visit(playground)
    fixed_answer(page, "the dog " * 300, finish="length")
    say(page, "Bark!")
    wait_for_answer(page)
    page.unroute_all()
    page.get_by_role("button", name="Continue", exact=True).click()
    alert = page.locator("#chat [role=alert] p")
    alert.wait_for()
    assert "256" in alert.inner_text(), "the context is full"
    assert (mark(page), answers(page)[0][:7]) == (CUT, "the dog")


def test_mark_is_kept_exported_and_imported(playground: LiveServer, visit: Visit, tmp_path: Path) -> None:
    page = visit(playground)
    fixed_answer(page, "Once", finish="length")
    say(page, "Tell me.")
    wait_for_answer(page)
    page.reload()
    until(lambda: mark(page) == CUT, "a reload loses it")
    file = tmp_path / "cut.json"
    with page.expect_download() as download:
        choose(page, "Tell me.", "Export")
    download.value.save_as(file)
    elsewhere = visit(playground)
    elsewhere.locator("#history-file").set_input_files(file)
    until(lambda: names(elsewhere) == ["Tell me."], "it is not imported")
    assert mark(elsewhere) == CUT
    fixed_answer(elsewhere, " upon a time.", finish="stop")
    proceed(elsewhere)
    assert answers(elsewhere) == ["Once upon a time."]
    # A file cannot bring a mark that there is not.
    kept = elsewhere.evaluate(
        """async (marks) => {
          const { Conversation } = await import("/ui/conversation.js");
          const turn = { id: 1, parent: 0, role: "assistant", content: "x" };
          const read = (ended) => Conversation.from({ id: "x", turns: [{ ...turn, ended }] }).turns[0];
          return marks.map((ended) => read(ended).ended ?? null);
        }""",
        ["length", "constructor", "__proto__", ["length"], 1],
    )
    assert kept == ["length", None, None, None, None]


def test_only_the_last_answer_can_be_continued_and_each_version_has_its_mark(
    playground: LiveServer, visit: Visit
) -> None:
    page = visit(playground)
    fixed_answer(page, "one", finish="length")
    say(page, "Count.")
    wait_for_answer(page)
    page.unroute_all()
    fixed_answer(page, "two", finish="stop")
    act(page, 1, "Regenerate")
    wait_for_answer(page)
    assert page.locator(".ended").filter(visible=True).count() == 0
    act(page, 1, "Previous version")
    assert mark(page) == CUT
    say(page, "And?")
    wait_for_answer(page)
    assert turn(page, 1).locator(".ended").is_visible()
    assert page.get_by_role("button", name="Continue", exact=True).count() == 0


def test_constraints_on_a_whole_answer_are_left_out_when_it_is_continued(playground: LiveServer, visit: Visit) -> None:
    """A schema would have the rest begin with a brace of its own; reasoning is continued as the text that it was."""
    page = visit(playground)
    bodies = page.evaluate(
        """async (messages) => {
          const { continuing } = await import("/ui/endings.js");
          const constraints = { response_format: { type: "json_object" }, tool_choice: "required" };
          const bodies = messages.map((last) => ({ ...constraints, seed: 1, messages: [last] }));
          return bodies.map((body) => continuing({ path: "/", body }).body);
        }""",
        [
            {"role": "assistant", "content": '{"a": '},
            {"role": "assistant", "content": "So", "reasoning_content": "Well"},
            {"role": "assistant", "content": "", "reasoning_content": "Well"},
        ],
    )
    for body in bodies:
        assert body.keys() == {"seed", "messages", "continue_final_message", "add_generation_prompt"}
    assert [body["messages"][-1] for body in bodies] == [
        {"role": "assistant", "content": '{"a": '},
        {"role": "assistant", "content": "So", "reasoning_content": "Well"},
        {"role": "assistant", "content": "<think>\nWell"},
    ]


@pytest.mark.parametrize("width", [1440, 390])
def test_marks_can_be_read_and_fit(playground: LiveServer, visit: Visit, width: int) -> None:
    page = visit(playground, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 844})
    fixed_answer(page, "Once", finish="length")
    say(page, "Tell me.")
    wait_for_answer(page)
    page.get_by_role("button", name="Continue", exact=True).focus()
    assert flaws(page) == []
    assert not is_wider_than_the_screen(page)
    page.keyboard.press("Enter")
    wait_for_answer(page)
    assert answers(page) == ["OnceOnce"]
