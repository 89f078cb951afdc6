"""Conversations in the playground: kept in the browser, with every version of every turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser_fixtures import Visit
from live_server import LiveServer
from page_checks import is_wider_than_the_screen, nameless, too_faint
from playground_page import (
    KEY,
    act,
    answers,
    choose,
    fixed_answer,
    give_key,
    names,
    say,
    set_parameter,
    streamed,
    turn,
    until,
    until_idle,
    until_true,
    wait_for_answer,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

# Long enough to be looked at while it comes.
LONG = 7000


def number_answers(page: Page) -> list[list[dict[str, str]]]:
    """The first request gets "Answer 1.", and so on; the messages of each are returned as they come."""
    asked: list[list[dict[str, str]]] = []

    def answer(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or "")["messages"])
        route.fulfill(body=streamed(f"Answer {len(asked)}."), content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    return asked


def ask(page: Page, *texts: str) -> None:
    for text in texts:
        say(page, text)
        wait_for_answer(page)


def spoken(page: Page) -> list[str]:
    """All turns that are shown."""
    return page.locator(".turns .prose").all_inner_texts()


def agree(page: Page, act: str) -> None:
    page.get_by_role("dialog").get_by_role("button", name=act).click()


def users(*texts: str) -> Callable[[list[dict[str, str]]], bool]:
    """Whether the messages are these, the user's and the model's in turn."""
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return lambda messages: messages == said


# --- versions of a turn ---------------------------------------------------------------------------------------------


def test_every_turn_can_be_made_again_and_its_versions_stay(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    asked = number_answers(page)
    ask(page, "one", "two")
    act(page, 1, "Regenerate")
    until(lambda: spoken(page) == ["one", "Answer 3."], "what follows belongs to the other version")
    wait_for_answer(page)
    assert users("one")(asked[2])
    assert turn(page, 1).get_by_role("img", name="Version 2 of 2").is_visible()
    ask(page, "three")
    assert users("one", "Answer 3.", "three")(asked[3])
    act(page, 1, "Previous version")
    assert spoken(page) == ["one", "Answer 1.", "two", "Answer 2."]
    turn(page, 1).get_by_role("button", name="Previous version").press("Enter")
    assert turn(page, 1).get_by_role("img", name="Version 1 of 2").is_visible(), "there is none before the first"
    # The message can be answered again, too; and the focus stays on the button that was pressed.
    act(page, 2, "Regenerate")
    wait_for_answer(page)
    assert spoken(page) == ["one", "Answer 1.", "two", "Answer 5."]
    turn(page, 3).get_by_role("button", name="Previous version").press("Enter")
    assert spoken(page)[-1] == "Answer 2."
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Previous version"
    act(page, 1, "Next version")
    assert spoken(page) == ["one", "Answer 3.", "three", "Answer 4."]
    page.reload()
    until(lambda: spoken(page) == ["one", "Answer 3.", "three", "Answer 4."], "the version that is shown is kept")


@pytest.mark.full
def test_messages_and_answers_can_be_edited(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    asked = number_answers(page)
    ask(page, "one", "two")
    act(page, 2, "Edit")
    editor = page.get_by_label("Edit the message")
    assert editor.input_value() == "two"
    page.keyboard.type(" or")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("three")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    assert spoken(page) == ["one", "Answer 1.", "two or\nthree", "Answer 3."]
    assert users("one", "Answer 1.", "two or\nthree")(asked[2])
    assert turn(page, 2).get_by_role("img", name="Version 2 of 2").is_visible()
    # An answer is put right without asking the model; what comes next builds on it.
    act(page, 1, "Edit")
    page.get_by_label("Edit the answer").fill("Forty-two.")
    page.get_by_role("button", name="Save").click()
    assert spoken(page) == ["one", "Forty-two."]
    ask(page, "sure?")
    assert users("one", "Forty-two.", "sure?")(asked[3])
    # Escape leaves everything as it was, and is no word to a running answer.
    act(page, 0, "Edit")
    page.keyboard.type("!!!")
    page.keyboard.press("Escape")
    assert spoken(page) == ["one", "Forty-two.", "sure?", "Answer 4."]
    assert len(asked) == 4


@pytest.mark.full
def test_messages_can_be_copied(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, permissions=["clipboard-read", "clipboard-write"])
    fixed_answer(page, "Some **bold** words.")
    ask(page, "one *two*")
    for index, text in enumerate(("one *two*", "Some **bold** words.")):
        page.evaluate("document.getElementById('announcer').textContent = ''")
        act(page, index, "Copy")
        until_true(page, "document.getElementById('announcer').textContent === 'Copied.'")
        assert page.evaluate("navigator.clipboard.readText()") == text


@pytest.mark.full
def test_model_is_named_only_where_it_changes(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    number_answers(page)
    page.get_by_label("Model", exact=True).locator("option", has_text="org/beta").wait_for(state="attached")
    ask(page, "one", "two")
    assert page.locator(".by").filter(visible=True).count() == 0
    page.get_by_label("Model", exact=True).select_option("org/beta")
    ask(page, "three", "four")
    assert page.locator(".by").filter(visible=True).all_inner_texts() == ["org/beta"]
    assert turn(page, 5).locator(".by").is_visible()


@pytest.mark.full
def test_answer_that_did_not_come_leaves_the_one_before(playground: LiveServer, visit: Visit, complaints: Any) -> None:
    complaints.expected.append("503")
    page = visit(playground)
    number_answers(page)
    ask(page, "one", "two")
    page.unroute_all()
    refusal = json.dumps({"error": {"message": "No room."}})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, body=refusal))
    act(page, 1, "Regenerate")
    page.get_by_role("alert").get_by_text("No room.").wait_for()
    assert spoken(page) == ["one", "Answer 1.", "two", "Answer 2."]
    assert turn(page, 1).get_by_role("button", name="Previous version").count() == 0


# --- the list -------------------------------------------------------------------------------------------------------


def test_conversations_are_listed_opened_renamed_and_deleted(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    asked = number_answers(page)
    assert page.get_by_text("kept in this browser, and nowhere else").is_visible()
    ask(page, "first <b>thing</b>\nand more")
    page.get_by_role("button", name="New", exact=True).click()
    assert spoken(page) == []
    assert page.evaluate("document.activeElement.id") == "chat-input"
    ask(page, "second")
    assert users("second")(asked[1]), "nothing of the other conversation"
    assert names(page) == ["second", "first <b>thing</b>"]
    page.get_by_role("button", name="first <b>thing</b>", exact=True).click()
    assert spoken(page) == ["first <b>thing</b>\nand more", "Answer 1."]
    assert page.locator("#history-list [aria-current]").inner_text() == "first <b>thing</b>"
    choose(page, "first", "Rename…")
    page.get_by_role("dialog").get_by_label("Name").fill("Things")
    page.keyboard.press("Enter")
    until(lambda: "Things" in names(page), "it is not renamed")
    page.reload()
    until(lambda: sorted(names(page)) == ["Things", "second"], "they are gone")
    assert spoken(page)[1] == "Answer 1.", "the one that was open is open again"
    choose(page, "Things", "Delete…")
    agree(page, "Cancel")
    assert len(names(page)) == 2
    choose(page, "Things", "Delete…")
    agree(page, "Delete")
    until(lambda: names(page) == ["second"], "it is there still")
    assert spoken(page) == []
    assert "Things" not in page.evaluate("JSON.stringify(localStorage)")


@pytest.mark.full
def test_clear_asks_first(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    number_answers(page)
    ask(page, "one")
    page.get_by_role("button", name="Clear").click()
    page.keyboard.press("Escape")
    assert spoken(page) == ["one", "Answer 1."]
    page.get_by_role("button", name="Clear").click()
    agree(page, "Delete")
    until(lambda: names(page) == [], "it is there still")
    assert page.get_by_role("heading", name="Say something.").is_visible()
    # There is nothing to lose now.
    page.get_by_role("button", name="Clear").click()
    assert page.get_by_role("dialog").count() == 0


@pytest.mark.full
def test_exported_conversations_can_be_imported_elsewhere(playground: LiveServer, visit: Visit, tmp_path: Path) -> None:
    page = visit(playground)
    number_answers(page)
    ask(page, "one", "two")
    act(page, 1, "Regenerate")
    wait_for_answer(page)
    page.get_by_role("button", name="New", exact=True).click()
    ask(page, "other")
    with page.expect_download() as single:
        choose(page, "one", "Export")
    assert single.value.suggested_filename == "ostro-one.json"
    assert len(json.loads(single.value.path().read_text())["conversations"]) == 1
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "all.json"
    download.value.save_as(file)

    elsewhere = visit(playground)
    elsewhere.locator("#history-file").set_input_files(file)
    until(lambda: sorted(names(elsewhere)) == ["one", "other"], "they are not imported")
    elsewhere.get_by_role("button", name="one", exact=True).click()
    assert spoken(elsewhere) == ["one", "Answer 3."]
    act(elsewhere, 1, "Previous version")
    assert spoken(elsewhere) == ["one", "Answer 1.", "two", "Answer 2."]
    # What is here already is not added again, even if it has gone on and has another name; and the page says so.
    note = elsewhere.get_by_role("status").filter(has_text="Nothing was added")
    elsewhere.locator("#history-file").set_input_files(file)
    note.get_by_text("all 2 are here already").wait_for()
    number_answers(elsewhere)
    ask(elsewhere, "three")
    choose(elsewhere, "other", "Rename…")
    elsewhere.get_by_role("dialog").get_by_label("Name").fill("Another")
    elsewhere.keyboard.press("Enter")
    elsewhere.locator("#history-file").set_input_files(file)
    until(lambda: note.count() == 1, "it does not say so")
    assert sorted(names(elsewhere)) == ["Another", "one"]
    # Deleted conversations come back, and only they.
    choose(elsewhere, "Another", "Delete…")
    agree(elsewhere, "Delete")
    elsewhere.locator("#history-file").set_input_files(file)
    elsewhere.get_by_text("Imported: 1; 1 was here already.").wait_for()
    assert sorted(names(elsewhere)) == ["one", "other"]


@pytest.mark.full
def test_file_that_is_not_an_export_is_refused_in_a_sentence(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    alert = page.locator("#chat [role=alert] p")
    turn = {"id": 1, "parent": 0, "role": "user", "content": "x"}
    broken: list[tuple[Any, str]] = [
        ("{", "It is not JSON."),
        ([1], "This page did not export it."),
        ({"format": "ostro.conversations", "version": 4, "conversations": []}, "version 4"),
    ]
    for turns in (
        [{**turn, "role": "system"}],
        [turn, turn],
        [{**turn, "parent": 7}],
        [{**turn, "content": None}],
        [{**turn, "role": "tool"}],
        [{**turn, "role": "tool", "results": [{"content": "of no call"}]}],
        [{**turn, "role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}],
        [{**turn, "role": "assistant", "settings": ["temperature"]}],
        None,
    ):
        conversations = [{"id": "a", "turns": turns}]
        broken.append(({"format": "ostro.conversations", "version": 1, "conversations": conversations}, "conversation"))
    for content, told in broken:
        text = content if isinstance(content, str) else json.dumps(content)
        file = {"name": "notes.json", "mimeType": "application/json", "buffer": text.encode()}
        page.locator("#history-file").set_input_files(file)  # type: ignore[arg-type]
        alert.get_by_text(told).wait_for()
        assert alert.inner_text().startswith("“notes.json” cannot be imported.")
        page.get_by_role("button", name="Dismiss").click()
    assert names(page) == []


# --- parameters -----------------------------------------------------------------------------------------------------


def shown_parameters(page: Page) -> tuple[str, str]:
    """The system prompt and the temperature."""
    return page.get_by_label("System prompt").input_value(), page.get_by_role(
        "spinbutton", name="Temperature"
    ).input_value()


def set_parameters(page: Page, system: str, temperature: float) -> None:
    page.get_by_label("System prompt").fill(system)
    set_parameter(page, "Temperature", temperature)


@pytest.mark.full
def test_system_prompt_and_parameters_belong_to_the_conversation(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    asked = number_answers(page)
    set_parameters(page, "Speak like a pirate.", 0.25)
    ask(page, "one")
    page.get_by_role("button", name="New", exact=True).click()
    assert shown_parameters(page)[0] == "", "a new one starts with the model's own"
    set_parameters(page, "Be formal.", 1.5)
    page.reload()
    assert shown_parameters(page) == ("Be formal.", "1.5"), "before the first message, too"
    asked = number_answers(page)
    ask(page, "other")
    page.get_by_role("button", name="one", exact=True).click()
    assert shown_parameters(page) == ("Speak like a pirate.", "0.25")
    ask(page, "two")
    assert asked[-1][0] == {"role": "system", "content": "Speak like a pirate."}
    page.get_by_role("button", name="other", exact=True).click()
    assert shown_parameters(page) == ("Be formal.", "1.5")
    # The other modes have their own.
    page.get_by_role("tab", name="Complete").click()
    assert page.get_by_role("spinbutton", name="Temperature").input_value() != "1.5"
    page.get_by_role("tab", name="Chat").click()
    assert shown_parameters(page) == ("Be formal.", "1.5")
    choose(page, "one", "New with its parameters")
    assert shown_parameters(page) == ("Speak like a pirate.", "0.25")
    assert spoken(page) == []


@pytest.mark.full
def test_branches_have_the_parameters_that_they_were_made_with(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    asked = number_answers(page)
    set_parameters(page, "First.", 0.5)
    ask(page, "one")
    set_parameters(page, "Second.", 0.75)
    act(page, 1, "Regenerate")
    wait_for_answer(page)
    assert [messages[0]["content"] for messages in asked] == ["First.", "Second."]
    act(page, 1, "Previous version")
    assert shown_parameters(page) == ("First.", "0.5")
    act(page, 1, "Next version")
    assert shown_parameters(page) == ("Second.", "0.75")
    # What was typed and not used yet is not lost to a look at a branch with the same parameters.
    act(page, 1, "Regenerate")
    wait_for_answer(page)
    set_parameters(page, "Third.", 1.25)
    act(page, 1, "Previous version")
    assert shown_parameters(page) == ("Third.", "1.25")


@pytest.mark.full
def test_exports_have_the_parameters_and_older_ones_are_read(
    playground: LiveServer, visit: Visit, tmp_path: Path
) -> None:
    page = visit(playground)
    number_answers(page)
    set_parameters(page, "First.", 0.5)
    ask(page, "one")
    set_parameters(page, "Second.", 0.75)
    act(page, 1, "Regenerate")
    wait_for_answer(page)
    with page.expect_download() as download:
        choose(page, "one", "Export")
    file = tmp_path / "one.json"
    download.value.save_as(file)
    elsewhere = visit(playground)
    elsewhere.locator("#history-file").set_input_files(file)
    until(lambda: spoken(elsewhere) == ["one", "Answer 2."], "it is not imported")
    assert shown_parameters(elsewhere) == ("Second.", "0.75")
    act(elsewhere, 1, "Previous version")
    assert shown_parameters(elsewhere) == ("First.", "0.5")
    # What no parameter could be is not taken over, and files of earlier pages have none.
    told = json.loads(file.read_text())
    told["conversations"][0] |= {"created": None, "settings": {"temperature": "much", "top_k": 9, "onclick": "x"}}
    told["conversations"][0]["turns"][0]["content"] = "odd"
    old = {"id": "x", "turns": [{"id": 1, "parent": 0, "role": "user", "content": "old"}]}
    for version, given in ((3, told["conversations"]), (2, [old]), (1, [{**old, "created": "2024-01-01"}])):
        file.write_text(json.dumps({"format": "ostro.conversations", "version": version, "conversations": given}))
        elsewhere.locator("#history-file").set_input_files(file)
        if version == 3:
            elsewhere.get_by_role("button", name="odd", exact=True).wait_for()
            assert elsewhere.get_by_role("spinbutton", name="Top k").input_value() == "9"
            assert elsewhere.get_by_role("spinbutton", name="Temperature").input_value() != "much"
    until(lambda: names(elsewhere).count("old") == 2, "older files are not read")
    assert shown_parameters(elsewhere)[0] == ""


# --- finding --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_conversations_are_found_by_titles_and_by_what_was_said(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    asked = number_answers(page)
    ask(page, "Tell me about the Café de Flore", "And the lighthouse of Genoa?")
    act(page, 2, "Edit")
    page.keyboard.press("Control+a")
    page.keyboard.type("And another thing")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    assert len(asked) == 3
    page.get_by_role("button", name="New", exact=True).click()
    ask(page, "Bread <b>and</b> butter")
    field = page.get_by_role("searchbox", name="Find in conversations")
    assert len(names(page)) == 2
    field.fill("cafe FLORE")
    until(lambda: names(page) == ["Tell me about the Café de Flore"], "a title, whatever its accents and case")
    field.fill("butter <b>")
    until(lambda: names(page) == ["Bread <b>and</b> butter"], "not by its title")
    # On a branch that is not shown: it is when the conversation is opened from there.
    field.fill("lighthouse")
    until(lambda: len(names(page)) == 1 and "lighthouse of Genoa?" in names(page)[0], "not by what was said")
    assert page.locator("#history-list mark").inner_text() == "lighthouse"
    page.get_by_text("Found in 1 of 2.").wait_for()
    page.locator("#history-list .name").click()
    until(lambda: "And the lighthouse of Genoa?" in spoken(page), "its branch is not shown")
    field.fill("nowhere at all")
    page.get_by_text("Nothing has all of these words.").wait_for()
    assert names(page) == []
    assert nameless(page) == []
    field.press("Escape")
    until(lambda: len(names(page)) == 2, "they do not come back")
    assert page.locator("#history-note").inner_text() == ""


@pytest.mark.full
def test_titles_come_from_what_was_said_until_they_are_edited(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    number_answers(page)
    titles = {
        "## A **plan** for `tomorrow`": "A plan for tomorrow",
        "```python\nprint(1)\n```\nWhat does this print?": "What does this print?",
        "```\nprint(2)\n```": "print(2)",
        "Why is the sky blue? I have asked everybody whom I know, and nobody has an answer.": "Why is the sky blue?",
        "Explain the difference between a process and a thread on a system with several cores": (
            "Explain the difference between a process and a thread on a…"
        ),
        "[docs](https://example.com/x) say otherwise": "docs say otherwise",
    }
    for text, title in titles.items():
        page.get_by_role("button", name="New", exact=True).click()
        say(page, text)
        wait_for_answer(page)
        until(lambda title=title: names(page)[0] == title, title)  # type: ignore[misc]
    # A greeting is a title only until something better is said.
    page.get_by_role("button", name="New", exact=True).click()
    ask(page, "Hi there!")
    assert names(page)[0] == "Hi there!"
    ask(page, "Bake me a cake")
    assert names(page)[0] == "Bake me a cake"
    page.locator("#history-list .name").first.press("F2")
    field = page.get_by_role("dialog").get_by_label("Name")
    assert field.input_value() == "Bake me a cake"
    field.fill("Cakes")
    page.keyboard.press("Enter")
    until(lambda: names(page)[0] == "Cakes", "it is not renamed")
    # An empty one gives the automatic title back.
    choose(page, "Cakes", "Rename…")
    page.get_by_role("dialog").get_by_label("Name").fill("")
    page.keyboard.press("Enter")
    until(lambda: names(page)[0] == "Bake me a cake", "it has no title")


# --- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_conversation_outlives_a_reload_even_while_the_answer_comes(slow_playground: LiveServer, visit: Visit) -> None:
    page = visit(slow_playground, key=KEY)
    set_parameter(page, "Max tokens", LONG)
    say(page, "Go on for long.")
    until_true(page, "document.querySelector('.turns .assistant .prose').textContent.length > 40")
    page.reload()
    page.wait_for_selector(".turns .assistant .actions")
    assert len(answers(page)[0]) > 20
    assert page.locator(".turns .user .said").inner_text() == "Go on for long."
    until_idle(slow_playground)


@pytest.mark.full
def test_answer_goes_on_while_another_conversation_is_looked_at(slow_playground: LiveServer, visit: Visit) -> None:
    page = visit(slow_playground, key=KEY)
    set_parameter(page, "Max tokens", LONG)
    say(page, "Go on for long.")
    length = "document.querySelector('.turns .assistant .prose').textContent.length"
    until_true(page, f"{length} > 40")
    before = page.evaluate(length)
    page.get_by_role("button", name="New", exact=True).click()
    assert spoken(page) == []
    assert page.get_by_role("button", name="Stop").is_visible()
    page.get_by_role("button", name="Go on for long.", exact=True).click()
    until_true(page, f"{length} > {before} + 40")
    for button in ("Edit", "Regenerate"):
        assert turn(page, 0).get_by_role("button", name=button).is_disabled(), "one answer at a time"
    # It is deleted while it comes, and stays so.
    choose(page, "Go on for long.", "Delete…")
    agree(page, "Delete")
    page.get_by_role("button", name="Send").wait_for()
    until_idle(slow_playground)
    assert names(page) == []
    page.reload()
    give_key(page, KEY)
    page.wait_for_selector("#model-dot[data-state=ready]")
    assert names(page) == []


@pytest.mark.full
def test_browser_that_cannot_store_says_so_and_goes_on(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    number_answers(page)
    ask(page, "one", "two")
    page.get_by_role("alert").get_by_text("its storage is full or blocked").wait_for()
    assert spoken(page) == ["one", "Answer 1.", "two", "Answer 2."]
    assert names(page) == ["one"]


@pytest.mark.full
def test_two_tabs_have_one_list(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    number_answers(page)
    other = page.context.new_page()
    other.goto(playground.url + "/")
    ask(page, "one")
    until(lambda: names(other) == ["one"], "the other tab does not hear of it")
    assert spoken(other) == [], "it is not made to look at it"
    other.get_by_role("button", name="one", exact=True).click()
    ask(page, "two")
    until(lambda: spoken(other) == ["one", "Answer 1.", "two", "Answer 2."], "the other tab shows what it was")


@pytest.mark.full
def test_data_stored_by_other_programs_is_left_alone(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    page.evaluate("localStorage.setItem('ostro.conversation.x', '{broken')")
    page.reload()
    number_answers(page)
    ask(page, "one")
    assert names(page) == ["one"]
    assert page.evaluate("localStorage.getItem('ostro.conversation.x')") == "{broken"


# --- for everybody --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_list_and_versions_have_names_and_can_be_read(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, reduced_motion="reduce")
    number_answers(page)
    ask(page, "one")
    act(page, 1, "Regenerate")
    wait_for_answer(page)
    for look in ("versions", "editor", "menu", "question"):
        if look == "editor":
            act(page, 0, "Edit")
        elif look == "menu":
            page.get_by_role("button", name="Actions for one").press("Enter")
        elif look == "question":
            page.keyboard.press("End")
            page.keyboard.press("Enter")
            page.get_by_role("dialog", name=re.compile("Delete")).wait_for()
        assert nameless(page) == [], look
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert too_faint(page) == [], (look, scheme)


@pytest.mark.full
def test_on_a_phone_the_list_opens_over_the_chat(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, viewport={"width": 320, "height": 640}, is_mobile=True, has_touch=True)
    number_answers(page)
    page.get_by_label("Message").fill("one")
    page.get_by_role("button", name="Send").tap()
    wait_for_answer(page)
    assert not page.locator("#history").is_visible()
    opener = page.get_by_role("button", name="Conversations")
    opener.tap()
    page.get_by_role("button", name="New", exact=True).tap()
    assert not page.locator("#history").is_visible()
    assert spoken(page) == []
    opener.tap()
    page.get_by_role("button", name="one", exact=True).tap()
    assert spoken(page) == ["one", "Answer 1."]
    assert not is_wider_than_the_screen(page)
    opener.tap()
    page.get_by_role("button", name="Actions for one").tap()
    page.get_by_role("menuitem", name="Delete…").tap()
    agree(page, "Delete")
    until(lambda: spoken(page) == [], "it is there still")
    assert not is_wider_than_the_screen(page)
