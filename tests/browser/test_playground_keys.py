"""The key dialog of the playground: opens where the server wants a key, checks it, and keeps it out of all else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from browser_fixtures import Complaints, Visit
from live_server import LiveServer
from page_checks import flaws
from playground_page import ADMIN_KEY, KEY, fixed_answer, give_key, say, set_parameter, until_true, wait_for_answer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.full

STORED = "JSON.stringify([Object.entries(localStorage), Object.entries(sessionStorage)])"


def dialog_of(page: Page) -> Locator:
    return page.get_by_role("dialog", name="Key")


def use(page: Page, key: str, *, remember: bool = False) -> None:
    dialog = dialog_of(page)
    dialog.get_by_label("API key, or the admin key").fill(key)
    dialog.get_by_label("Remember it in this browser").set_checked(remember)
    dialog.get_by_role("button", name="Use").click()


def test_key_is_asked_for_checked_and_then_what_was_refused_is_tried_again(
    slow_playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected.append("401")
    page = visit(slow_playground)
    dialog = dialog_of(page)
    dialog.wait_for()
    assert "This server wants a key." in dialog.inner_text()
    use(page, "wrong")
    dialog.get_by_text("This API key is unknown here. Check the key.").wait_for()
    assert flaws(page) == []
    use(page, "ключ")
    assert dialog.is_visible(), "no header could carry it"
    use(page, KEY)
    dialog.wait_for(state="hidden")
    page.wait_for_selector("#model-dot[data-state=ready]")
    assert page.locator("#chat [role=alert]").inner_text() == ""
    until_true(page, "document.querySelector('[data-gauge=running] dd').textContent === '0'")
    # A key that is refused in the middle of the work: the message is not lost, and is sent with the next key.
    page.evaluate("sessionStorage.setItem('ostro.key', 'withdrawn')")
    page.reload()
    dialog.get_by_text("This API key is unknown here.").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("You can type it under “Key”").wait_for()
    set_parameter(page, "Max tokens", 3)
    say(page, "the quick")
    dialog.wait_for()
    use(page, KEY)
    wait_for_answer(page)
    assert page.locator("#chat [role=alert]").inner_text() == ""


def test_key_stays_in_its_tab_unless_it_is_to_be_remembered(
    slow_playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected.append("401")
    page = visit(slow_playground, key=KEY)
    fixed_answer(page, "Yes.")
    say(page, "one")
    wait_for_answer(page)
    kept, of_tab = json.loads(page.evaluate(STORED))
    assert KEY not in json.dumps(kept)
    assert ["ostro.key", KEY] in of_tab
    assert KEY not in page.evaluate("document.cookie + location.href")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    assert KEY not in download.value.path().read_text()
    other = page.context.new_page()
    other.goto(slow_playground.url + "/")
    dialog_of(other).wait_for()
    other.close()
    page.get_by_role("button", name="Key set").click()
    use(page, KEY, remember=True)
    dialog_of(page).wait_for(state="hidden")
    kept, of_tab = json.loads(page.evaluate(STORED))
    assert ["ostro.key", KEY] in kept
    assert KEY not in json.dumps(of_tab)
    other = page.context.new_page()
    other.goto(slow_playground.url + "/")
    other.wait_for_selector("#model-dot[data-state=ready]")
    other.close()
    page.get_by_role("button", name="Key set").click()
    assert dialog_of(page).get_by_label("Remember it in this browser").is_checked()
    page.get_by_role("button", name="Forget").click()
    dialog_of(page).get_by_text("This server wants a key.").wait_for()
    assert KEY not in page.evaluate(STORED)


def test_cancelled_dialog_leaves_a_sentence_and_comes_back_only_when_asked(
    slow_playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected.append("401")
    page = visit(slow_playground)
    dialog_of(page).wait_for()
    page.get_by_role("button", name="Cancel").click()
    alert = page.locator("#chat [role=alert]")
    alert.get_by_text("The request has no API key.").wait_for()
    page.get_by_text("These numbers need a key.").wait_for()
    assert not dialog_of(page).is_visible()
    page.get_by_role("tab", name="Complete").click()
    give_key(page, KEY)
    page.wait_for_selector("#model-dot[data-state=ready]")
    page.get_by_role("tab", name="Chat").click()
    assert alert.inner_text() == ""
    assert not page.locator("#model-load, #model-menu").filter(visible=True).count()
    give_key(page, ADMIN_KEY)
    page.get_by_role("button", name="Model actions").wait_for()
    page.reload()
    page.wait_for_selector("#model-dot[data-state=ready]")
