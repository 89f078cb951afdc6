"""Text files in the playground: dropped or chosen, they become part of the message, with size and tokens told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser_fixtures import Complaints, Visit
from live_server import LiveServer
from page_checks import flaws, is_wider_than_the_screen
from playground_page import act, choose, fixed_answer, names, post, say, turn, until, wait_for_answer

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.full

NOTES = "the quick brown fox\n```\njumps\n```\n"
SENT = "notes.md:\n\n````md\nthe quick brown fox\n```\njumps\n```\n````"


def given(name: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": "application/octet-stream", "buffer": content}


def add(page: Page, *files: dict[str, Any]) -> None:
    # Which model counts is known once they are listed.
    page.locator("#model option", has_text="alpha").wait_for(state="attached")
    page.locator("#chat-file").set_input_files(list(files))  # type: ignore[arg-type]


def listed(page: Page) -> list[str]:
    """The files of the message being written, once all are counted."""
    rows = page.get_by_role("list", name="Files to send").get_by_role("listitem")
    until(lambda: "counting" not in " ".join(rows.all_inner_texts()), "they are not counted")
    return [" ".join(text.replace("✕", "").split()) for text in rows.all_inner_texts()]


def drop(page: Page, *files: tuple[str, str]) -> None:
    """As a browser has it when files are dropped on the conversation."""
    page.evaluate(
        """(files) => {
          const dataTransfer = new DataTransfer();
          for (const [name, text] of files) dataTransfer.items.add(new File([text], name));
          const target = document.getElementById("chat-log");
          const over = new DragEvent("dragover", { bubbles: true, cancelable: true, dataTransfer });
          window.wasTaken = !target.dispatchEvent(over);
          window.wasMarked = document.getElementById("chat").classList.contains("dropping");
          target.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer }));
        }""",
        [list(each) for each in files],
    )
    assert page.evaluate("[window.wasTaken, window.wasMarked]") == [True, True]
    assert page.locator(".dropping").count() == 0


def sent_by(page: Page, text: str) -> list[dict[str, str]]:
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, text)
    wait_for_answer(page)
    messages: list[dict[str, str]] = json.loads(sent.value.post_data or "")["messages"]
    return messages


def test_dropped_file_becomes_part_of_the_message(playground: LiveServer, visit: Visit, tmp_path: Path) -> None:
    page = visit(playground)
    fixed_answer(page, "Yes.")
    page.locator("#model option", has_text="alpha").wait_for(state="attached")
    drop(page, ("notes.md", NOTES))
    body = {"model": "alpha", "prompt": NOTES, "add_special_tokens": False}
    count = post(playground, "/tokenize", body)["count"]
    until(lambda: listed(page) == [f"notes.md {len(NOTES)} bytes, {count} tokens"], "it is not listed")
    assert sent_by(page, "What is this?") == [{"role": "user", "content": f"{SENT}\n\nWhat is this?"}]
    assert listed(page) == []
    # The message shows what was typed, and the file folded.
    assert turn(page, 0).locator(".said").inner_text() == "What is this?"
    file = turn(page, 0).locator(".file")
    assert file.locator("summary").inner_text() == f"notes.md {len(NOTES)} bytes, {count} tokens"
    file.locator("summary").click()
    assert file.locator("pre").text_content() == NOTES
    # It is part of whatever follows, of an edited message, and of what is kept.
    assert sent_by(page, "And?")[0]["content"] == f"{SENT}\n\nWhat is this?"
    act(page, 0, "Edit")
    page.get_by_label("Edit the message").fill("Who jumps?")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    assert json.loads(sent.value.post_data or "")["messages"][0]["content"] == f"{SENT}\n\nWho jumps?"
    wait_for_answer(page)
    with page.expect_download() as download:
        choose(page, "What is this?", "Export")
    download.value.save_as(tmp_path / "kept.json")
    elsewhere = visit(playground)
    elsewhere.locator("#history-file").set_input_files(tmp_path / "kept.json")
    until(lambda: names(elsewhere) == ["What is this?"], "it is not imported")
    assert turn(elsewhere, 0).locator(".file summary").inner_text().startswith("notes.md")


def test_files_can_be_chosen_removed_and_sent_alone(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    fixed_answer(page, "Yes.")
    page.locator("#model option", has_text="alpha").wait_for(state="attached")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add file…").click()
    utf16 = b"\xff\xfe" + "brown\r\n".encode("utf-16le")
    chooser.value.set_files([given("a.txt", b"the quick"), given("b.txt", utf16)])  # type: ignore[arg-type]
    until(lambda: len(listed(page)) == 2, "they are not listed")
    page.get_by_role("button", name="Remove a.txt").click()
    assert [row.split()[0] for row in listed(page)] == ["b.txt"]
    assert page.evaluate("document.activeElement.id") == "chat-input"
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    wait_for_answer(page)
    messages = json.loads(sent.value.post_data or "")["messages"]
    assert messages == [{"role": "user", "content": "b.txt:\n\n```txt\nbrown\n```"}]
    assert names(page) == ["b.txt"]


REFUSED = [
    (given("x.png", b"\x89PNG\r\n\x1a\n\x00\x00"), "“x.png” cannot be added: it is not a text file."),
    (given("x.dat", b"text\x00text"), "“x.dat” cannot be added: it is not a text file."),
    (given("latin.txt", "Größe".encode("latin-1")), "“latin.txt” cannot be added: it is not a text file."),
    (given("none.txt", b" \n"), "“none.txt” cannot be added: it is empty."),
    (given("big.txt", b"a" * 1_000_001), "“big.txt” cannot be added: 1.0 MB are too much: a file may have up to 1 MB."),
]


def test_binary_empty_and_large_files_are_refused_in_a_sentence(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    add(page, *(file for file, _ in REFUSED), given("good.txt", b"fox"))
    page.get_by_role("alert").get_by_text("big.txt").wait_for()
    assert page.locator("#chat [role=alert] p").inner_text() == " ".join(told for _, told in REFUSED)
    assert [row.split()[0] for row in listed(page)] == ["good.txt"]


def test_file_that_does_not_fit_into_the_context_is_refused(
    playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    page = visit(playground)
    page.locator("#model option", has_text="alpha").wait_for(state="attached")
    alert = page.locator("#chat [role=alert] p")
    add(page, given("long.txt", b"the dog " * 300))
    alert.get_by_text("the context of alpha ends at 256 tokens").wait_for()
    assert alert.inner_text().startswith("“long.txt” cannot be added: it has ")
    assert listed(page) == []
    # Nor two that fit one by one.
    body = {"model": "alpha", "prompt": "the dog " * 50, "add_special_tokens": False}
    half = b"the dog " * (50 * 150 // post(playground, "/tokenize", body)["count"])
    add(page, given("one.txt", half))
    until(lambda: len(listed(page)) == 1, "it is not listed")
    add(page, given("two.txt", half))
    alert.get_by_text("“two.txt” cannot be added: with the other files it makes").wait_for()
    assert [row.split()[0] for row in listed(page)] == ["one.txt"]
    # What the server refuses to count, it would refuse to read.
    complaints.expected.append("400")
    refusal = {
        "error": {"message": "prompt is too long.", "type": "invalid_request_error", "param": "prompt", "code": None}
    }
    page.route("**/tokenize", lambda route: route.fulfill(status=400, json=refusal))
    add(page, given("three.txt", b"fox"))
    alert.get_by_text("“three.txt” cannot be added: prompt is too long.").wait_for()
    assert [row.split()[0] for row in listed(page)] == ["one.txt"]


def test_file_is_added_uncounted_if_the_server_cannot_count(
    playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected.append("ERR_FAILED")
    page = visit(playground)
    page.route("**/tokenize", lambda route: route.abort())
    add(page, given("a.txt", b"fox"))
    page.get_by_role("alert").get_by_text("The server cannot be reached.").wait_for()
    assert listed(page) == ["a.txt 3 bytes"]


def test_message_without_an_answer_gets_its_files_back(
    playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected.append("503")
    page = visit(playground)
    add(page, given("a.txt", b"fox"))
    until(lambda: len(listed(page)) == 1, "it is not listed")
    refusal = json.dumps({"error": {"message": "No room."}})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, body=refusal))
    say(page, "What is it?")
    page.get_by_role("alert").get_by_text("No room.").wait_for()
    assert page.get_by_label("Message").input_value() == "What is it?"
    assert [row.split()[0] for row in listed(page)] == ["a.txt"]
    assert names(page) == []


def test_imported_file_holds_nothing_that_was_not_checked(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    results = page.evaluate(
        """async (lists) => {
          const { Conversation } = await import("/ui/conversation.js");
          return lists.map((files) => {
            const turn = { id: 1, parent: 0, role: "user", content: "x", files };
            try {
              return Conversation.from({ id: "x", turns: [turn] }).turns[0].files;
            } catch (error) {
              return error.message;
            }
          });
        }""",
        [
            [{"name": "a", "text": "b", "size": 1, "tokens": "many", "more": 1}],
            [{"name": "a", "text": "b", "size": 1, "tokens": 2}],
            [{"name": {}, "text": "b", "size": 1}],
            [{"name": "a", "size": 1}],
            "a",
        ],
    )
    told = "A file in a conversation has no name or no text."
    good = {"name": "a", "text": "b", "size": 1}
    assert results == [[good], [{**good, "tokens": 2}], told, told, told]


@pytest.mark.parametrize("width", [1440, 390])
def test_files_can_be_read_and_fit(playground: LiveServer, visit: Visit, width: int) -> None:
    page = visit(playground, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 844})
    fixed_answer(page, "Yes.")
    add(page, given(f"{'measurements-' * 9}2026.csv", b"fox,dog\n1,2\n"), given("b.txt", b"fox"))
    until(lambda: len(listed(page)) == 2, "they are not listed")
    assert flaws(page) == []
    assert not is_wider_than_the_screen(page)
    say(page, "Which?")
    wait_for_answer(page)
    page.locator(".file summary").first.click()
    assert flaws(page) == []
    assert not is_wider_than_the_screen(page)
