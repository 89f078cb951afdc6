"""The playground in a real browser, against real servers: what a user does with it, and that anybody can."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser_fixtures import Complaints, Visit
from live_server import LiveServer
from page_checks import flaws, forget_shifts, is_wider_than_the_screen, shifted, too_faint
from playground_page import (
    ADMIN_KEY,
    KEY,
    answers,
    copied,
    fixed_answer,
    gauge,
    post,
    ran,
    say,
    set_parameter,
    streamed,
    until,
    until_idle,
    until_true,
    wait_for_answer,
    wait_until_over,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

# Long enough to be looked at while it comes.
LONG = 7000


# --- chat -----------------------------------------------------------------------------------------------------------


def test_chat_streams_the_answer_that_the_api_gives_and_remembers_what_was_said(
    playground: LiveServer, visit: Visit
) -> None:
    page = visit(playground)
    set_parameter(page, "Temperature", 0)
    set_parameter(page, "Max tokens", 8)
    page.get_by_label("System prompt").fill("the lazy dog")
    said: list[dict[str, str]] = [{"role": "system", "content": "the lazy dog"}]
    for number, words in enumerate(("the quick", "brown fox"), 1):
        with page.expect_request("**/v1/chat/completions") as sent:
            say(page, words)
        said.append({"role": "user", "content": words})
        body = sent.value.post_data_json
        assert body is not None
        assert (body["model"], body["messages"], body["stream"]) == ("alpha", said, True)
        wait_until_over(page, "chat")
        wait_for_answer(page)
        expected = post(playground, "/v1/chat/completions", {**body, "stream": False, "stream_options": None})
        text = expected["choices"][0]["message"]["content"]
        assert len(answers(page)) == number
        assert "".join(answers(page)[-1].split()) == "".join(text.split())
        said.append({"role": "assistant", "content": text})
    facts = page.locator("#chat .facts").inner_text()
    # Tokens that a busy machine brings all at once have no rate.
    assert re.search(r"to the first token · ([\d.]+ tokens/s · )?\d+ in \(\d+ cached\) · 8 out", facts)
    assert page.locator("#announcer").text_content() == f"Answer: {text}"
    # The request has loaded the model, and the page has seen that.
    page.wait_for_selector("#model-dot[data-state=ready]")
    assert page.locator("#model-fact").inner_text() == "256 tokens"


@pytest.mark.full
def test_enter_sends_and_shift_enter_starts_a_new_line(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    fixed_answer(page, "Yes.")
    # Nobody has clicked anywhere yet.
    page.keyboard.type("the quick")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("brown fox")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    assert sent.value.post_data_json is not None
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "the quick\nbrown fox"}]
    wait_for_answer(page)
    page.keyboard.type("and")
    assert page.get_by_label("Message").input_value() == "and", "the next message is typed at once"
    page.get_by_role("button", name="Send").click()
    wait_until_over(page, "chat")
    page.keyboard.type("so on")
    assert page.get_by_label("Message").input_value() == "so on"
    assert page.locator(".turns .user .said").all_inner_texts() == ["the quick\nbrown fox", "and"]


@pytest.mark.full
def test_enter_that_ends_a_composition_sends_nothing(playground: LiveServer, visit: Visit) -> None:
    """With an input method for Chinese, say, Enter takes the word that is offered."""
    page = visit(playground)
    fixed_answer(page, "是。")
    session = page.context.new_cdp_session(page)
    session.send("Input.imeSetComposition", {"text": "ni", "selectionStart": 2, "selectionEnd": 2})
    # As an input method has it: the key goes down, but no character comes of it.
    session.send("Input.dispatchKeyEvent", {"type": "rawKeyDown", "key": "Enter", "windowsVirtualKeyCode": 13})
    session.send("Input.insertText", {"text": "你"})
    assert page.get_by_label("Message").input_value() == "你"
    page.keyboard.press("Enter")
    wait_for_answer(page)
    assert page.locator(".turns .user .said").inner_text() == "你"


@pytest.mark.full
def test_on_a_touch_screen_enter_starts_a_new_line(playground: LiveServer, visit: Visit) -> None:
    """There is no Shift+Enter there; and a field that is focused by itself would bring up the keyboard."""
    page = visit(playground, viewport={"width": 390, "height": 700}, is_mobile=True, has_touch=True)
    fixed_answer(page, "Yes.")
    assert page.evaluate("document.activeElement.id") != "chat-input"
    page.get_by_label("Message").tap()
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    page.get_by_role("button", name="Send").tap()
    wait_for_answer(page)
    assert page.locator(".turns .user .said").inner_text() == "one\ntwo"


def test_escape_stops_the_answer_and_the_server_sees_it(slow_playground: LiveServer, visit: Visit) -> None:
    page = visit(slow_playground, key=KEY)
    set_parameter(page, "Max tokens", LONG)
    say(page, "Go on for long.")
    until_true(page, "document.querySelector('.turns .assistant .prose').textContent.length > 40")
    assert page.get_by_role("button", name="Stop").is_visible()
    until(lambda: gauge(slow_playground, "vllm:num_requests_running") == 1, "the server does not run it")
    until_true(page, "document.querySelector('[data-gauge=running] dd').textContent === '1'")
    until_true(page, "Number(document.querySelector('[data-gauge=speed] dd').textContent) > 0")
    page.keyboard.press("Escape")
    wait_until_over(page, "chat")
    until(lambda: gauge(slow_playground, "vllm:num_requests_running") == 0, "the server runs it still")
    until_idle(slow_playground)
    assert "stopped" in page.locator("#chat .facts").inner_text()
    assert len(answers(page)[0]) > 20


@pytest.mark.full
def test_nothing_moves_while_an_answer_comes(slow_playground: LiveServer, visit: Visit) -> None:
    page = visit(slow_playground, key=KEY, viewport={"width": 1280, "height": 520})
    set_parameter(page, "Max tokens", LONG)
    say(page, "Go on for long.")
    until_true(page, "(document.querySelector('.turns .assistant .prose')?.textContent.length ?? 0) > 20")
    forget_shifts(page)
    # Until it has to scroll.
    until_true(page, "(log => log.scrollTop > 40)(document.getElementById('chat-log'))")
    moved, nodes = shifted(page)
    assert moved < 0.01, nodes
    # What comes while another tab is shown is followed, too.
    seen = page.evaluate("document.getElementById('chat-log').scrollHeight")
    page.get_by_role("tab", name="Complete").click()
    answer = "document.querySelector('.turns .assistant .prose').textContent.length"
    until_true(page, f"{answer} > {page.evaluate(answer)} + 400")
    page.get_by_role("tab", name="Chat").click()
    until_true(
        page,
        f"(log => log.scrollHeight > {seen} && log.scrollHeight - log.scrollTop - log.clientHeight < 80)"
        "(document.getElementById('chat-log'))",
    )
    page.get_by_role("button", name="Stop").click()
    wait_until_over(page, "chat")
    until_idle(slow_playground)


# --- completion and score -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_completion_colours_its_tokens_and_shows_the_alternatives(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    page.get_by_role("tab", name="Complete").click()
    set_parameter(page, "Temperature", 0)
    set_parameter(page, "Max tokens", 12)
    set_parameter(page, "Alternatives", 3)
    page.get_by_role("textbox", name="Prompt", exact=True).fill("the quick")
    with page.expect_request("**/v1/completions") as sent:
        page.get_by_role("button", name="Complete", exact=True).click()
    wait_until_over(page, "complete")
    body = sent.value.post_data_json
    assert body is not None
    expected = post(playground, "/v1/completions", {**body, "stream": False, "stream_options": None})["choices"][0]
    tokens = page.locator("#complete-tokens .token")
    assert tokens.count() == len(expected["logprobs"]["tokens"])
    shown = page.locator("#complete-document").text_content()
    assert shown is not None
    assert shown.replace("·", "").replace("⏹", "") == "the quick" + expected["text"]
    assert len({each.split()[1] for each in tokens.evaluate_all("nodes => nodes.map(n => n.className)")}) > 1
    box = page.get_by_role("tooltip")
    assert not box.is_visible()
    tokens.nth(2).hover()
    names = box.locator(".name").all_inner_texts()
    top = expected["logprobs"]["top_logprobs"][2]
    visible = {name.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") for name in top}
    assert set(names) == visible
    assert box.locator(".chosen").count() == 1
    page.mouse.move(0, 0)
    box.wait_for(state="hidden")
    # The same without a mouse.
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert box.locator(".name").all_inner_texts() == names
    assert "instead: " in (tokens.nth(2).get_attribute("aria-label") or "")
    tokens.nth(4).click()
    page.keyboard.press("ArrowRight")
    assert tokens.evaluate_all("nodes => nodes.map(n => n.tabIndex).indexOf(0)") == 5
    assert page.locator("#complete-tokens [tabindex='0']").count() == 1
    page.keyboard.press("Escape")
    box.wait_for(state="hidden")


@pytest.mark.full
def test_scores_are_the_apis_and_the_likeliest_comes_first(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    page.get_by_role("tab", name="Score").click()
    page.get_by_role("textbox", name="Prompt", exact=True).fill("the quick brown")
    endings = ["fox", "dog and the dog", "lazy"]
    page.get_by_label("Continuations, one a line").fill("\n".join(endings) + "\n\n")
    page.get_by_role("button", name="Score", exact=True).click()
    rows = page.locator("#score-table tbody tr")
    rows.nth(2).wait_for()
    body = {"model": "alpha", "prompts": ["the quick brown"] * 3, "continuations": [f" {each}" for each in endings]}
    sums = post(playground, "/loglikelihood", body)["ll"]
    ranked = sorted(zip(sums, endings, strict=True), reverse=True)
    for row, (value, text) in zip(rows.all(), ranked, strict=True):
        cells = row.locator("th, td").all_inner_texts()
        assert cells[0].startswith(text)
        assert float(cells[1].replace("−", "-")) == pytest.approx(value, abs=2e-3)
    shares = page.locator("#score-table .meter").evaluate_all("nodes => nodes.map(n => n.offsetWidth)")
    assert len(shares) == 3


# --- keys, errors, models -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_full_queue_is_a_sentence_with_a_time_and_the_message_is_not_lost(
    slow_playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected.append("429")
    page = visit(slow_playground, key=KEY)
    body = {"prompt": "busy", "max_tokens": LONG, "stream": True}
    with (
        slow_playground.client(authorization=f"Bearer {KEY}") as client,
        client.stream("POST", "/v1/completions", json=body) as busy,
    ):
        assert busy.status_code == 200
        say(page, "Is there room?")
        page.locator("#chat [role=alert]").get_by_text(re.compile(r"Try again in \d+ seconds?\.")).wait_for()
    assert page.get_by_label("Message").input_value() == "Is there room?"
    page.get_by_role("button", name="Dismiss").click()
    assert page.locator("#chat [role=alert]").inner_text() == ""
    until_idle(slow_playground)


@pytest.mark.full
def test_server_refusals_are_reported_in_its_own_words(
    playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected.append("400")
    page = visit(playground)
    say(page, "the dog " * 300)
    alert = page.locator("#chat [role=alert] p")
    alert.wait_for()
    assert "256" in alert.inner_text()


@pytest.mark.full
def test_lost_connection_is_a_sentence(playground: LiveServer, visit: Visit, complaints: Complaints) -> None:
    complaints.expected += ["ERR_INTERNET_DISCONNECTED"]
    page = visit(playground)
    until_true(page, "document.querySelector('[data-gauge=running] dd').textContent === '0'")
    page.context.set_offline(True)
    say(page, "Hello?")
    page.get_by_text("The server cannot be reached.").wait_for()
    page.get_by_text("No numbers: the server does not answer.").wait_for()
    page.wait_for_selector("#model-dot[data-state=unknown]")
    page.context.set_offline(False)
    page.wait_for_selector("#model-dot:not([data-state=unknown])")
    until_true(page, "document.querySelector('[data-gauge=running] dd').textContent === '0'")

    def cut(route: Route) -> None:
        route.fulfill(body=streamed("Half an ", done=False), content_type="text/event-stream")

    page.route("**/v1/chat/completions", cut)
    page.keyboard.press("Control+Enter")
    page.get_by_text("The connection broke off before the answer was complete.").wait_for()
    assert answers(page) == ["Half an"]
    assert "broken off" in page.locator("#chat .facts").inner_text()


@pytest.mark.full
def test_notice_of_a_lost_server_goes_when_it_is_back(
    playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected += ["ERR_INTERNET_DISCONNECTED"]
    page = visit(playground)
    page.wait_for_selector("#model-load:not([hidden]), #model-menu:not([hidden])")
    page.context.set_offline(True)
    say(page, "Hello?")
    notice = page.get_by_text("The server cannot be reached.")
    notice.wait_for()
    page.context.set_offline(False)
    notice.wait_for(state="hidden")
    assert page.get_by_label("Message").input_value() == "Hello?"
    # Any other notice stays until it is read.
    page.context.set_offline(True)
    say(page, "Hello?")
    notice.wait_for()
    page.get_by_role("button", name="Dismiss").click()
    page.get_by_role("tab", name="Score").click()
    page.get_by_role("button", name="Score", exact=True).click()
    page.context.set_offline(False)
    page.wait_for_selector("#model-dot:not([data-state=unknown])")
    assert page.get_by_text("Write a prompt and at least one continuation.").is_visible()


@pytest.mark.full
def test_model_is_unloaded_and_loaded(slow_playground: LiveServer, visit: Visit) -> None:
    def states() -> list[str]:
        with slow_playground.client(authorization=f"Bearer {KEY}") as client:
            return [card["state"] for card in client.get("/v1/models").json()["data"]]

    page = visit(slow_playground, key=ADMIN_KEY)
    page.get_by_role("button", name="Model actions").click()
    page.get_by_role("menuitem", name="Unload…").click()
    page.get_by_role("dialog", name=re.compile("^Unload .*\\?$")).get_by_role("button", name="Cancel").click()
    assert states() == ["ready"], "nothing happens before the question is answered"
    page.get_by_role("button", name="Model actions").press("Enter")
    page.keyboard.press("Escape")
    assert page.get_by_role("menuitem").count() == 0
    assert page.evaluate("document.activeElement.id") == "model-menu"
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    page.wait_for_selector("#model-dot[data-state=available]")
    assert states() == ["available"]
    page.get_by_role("button", name="Load", exact=True).click()
    page.wait_for_selector("#model-dot[data-state=ready]")
    assert states() == ["ready"]
    assert page.locator("#model-fact").inner_text() == "8,192 tokens"
    assert page.get_by_role("spinbutton", name="Max tokens").get_attribute("max") == "8192"


@pytest.mark.full
def test_model_that_is_picked_is_asked_and_stays_picked(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    picker = page.get_by_label("Model", exact=True)
    picker.locator("option", has_text="org/beta").wait_for(state="attached")
    picker.select_option("org/beta")
    page.reload()
    picker.locator("option", has_text="org/beta").wait_for(state="attached")
    assert picker.input_value() == "org/beta"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=streamed("Yes."), content_type="text/plain"))
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Who are you?")
    assert sent.value.post_data_json is not None
    assert sent.value.post_data_json["model"] == "org/beta"


@pytest.mark.full
def test_settings_outlive_a_reload_and_can_be_reset(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    # Before that nobody knows the model's defaults, to which the fields are reset.
    load(page)
    set_parameter(page, "Max tokens", 8)
    set_parameter(page, "Temperature", 9)
    assert page.get_by_role("spinbutton", name="Temperature").input_value() == "2"
    set_parameter(page, "Top k", 40)
    # The slider ends before the API does.
    set_parameter(page, "Top n sigma", 7.5)
    page.get_by_label("Stop at").fill("END\\n\nSTOP")
    page.get_by_label("Seed").fill("12")
    page.get_by_label("Seed").press("Tab")
    page.get_by_role("tab", name="Complete").click()
    page.reload()
    assert page.get_by_role("tab", name="Complete").get_attribute("aria-selected") == "true"
    page.get_by_role("tab", name="Chat").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "the quick")
    body = sent.value.post_data_json
    assert body is not None
    given = {name: body.get(name) for name in ("temperature", "top_k", "top_n_sigma", "stop", "seed", "top_p")}
    assert given == {
        "temperature": 2,
        "top_k": 40,
        "top_n_sigma": 7.5,
        "stop": ["END\n", "STOP"],
        "seed": 12,
        # This model recommends no sampling, so the page does.
        "top_p": 0.95,
    }
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Reset").click()
    assert page.get_by_role("spinbutton", name="Top k").input_value() == "0"
    assert page.get_by_label("Stop at").input_value() == ""
    wait_until_over(page, "chat")
    page.get_by_label("Message").fill("the quick")
    set_parameter(page, "Max tokens", 8)
    page.get_by_role("spinbutton", name="Temperature").fill("0.1")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Control+Enter")
    assert sent.value.post_data_json is not None
    assert sent.value.post_data_json["temperature"] == 0.1, "what stands in the field, though it was not left"
    page.keyboard.press("Escape")


@pytest.mark.full
def test_sliders_show_the_models_own_defaults_and_send_only_what_was_touched(
    playground: LiveServer, visit: Visit
) -> None:
    page = visit(playground)
    fixed_answer(page, "Yes.")
    sliders = {name: page.get_by_role("spinbutton", name=name) for name in ("Temperature", "Top k", "Max tokens")}

    def shown() -> list[str]:
        return [each.input_value() for each in sliders.values()]

    def sent(text: str) -> dict[str, Any]:
        with page.expect_request("**/v1/chat/completions") as request:
            say(page, text)
        wait_for_answer(page)
        body: dict[str, Any] = json.loads(request.value.post_data or "")
        return {name: body[name] for name in sorted(body) if name not in ("messages", "stream", "stream_options")}

    picker = page.get_by_label("Model", exact=True)
    picker.select_option("org/beta")
    until(lambda: shown() == ["0.25", "7", "33"], "what generation_config.json says, loaded or not")
    load(page)
    assert shown() == ["0.25", "7", "33"]
    assert sent("the quick") == {"model": "org/beta"}
    set_parameter(page, "Temperature", 0.5)
    assert sent("brown fox") == {"model": "org/beta", "temperature": 0.5}
    page.reload()
    until(lambda: shown() == ["0.5", "7", "33"], "what was touched stays, the rest is the model's")
    picker.select_option("alpha")
    load(page)
    assert shown() == ["0.5", "0", ""], "this model has no defaults of its own, and the temperature is the user's"
    assert sliders["Max tokens"].get_attribute("placeholder") == "no limit"
    # An empty field is not touched any more.
    set_parameter(page, "Temperature", "")
    assert shown() == ["0.6", "0", ""]
    note = page.get_by_text("The model recommends no sampling. This page uses temperature 0.6, top_p 0.95")
    assert note.is_visible()
    assert sent("jumps") == {"model": "alpha", "temperature": 0.6, "top_p": 0.95}
    picker.select_option("org/beta")
    assert shown() == ["0.25", "7", "33"]
    assert not note.is_visible()


def load(page: Page) -> None:
    """Unless it is loaded already."""
    page.wait_for_selector("#model-load:not([hidden]), #model-menu:not([hidden])")
    if page.locator("#model-load").is_visible():
        page.locator("#model-load").click()
    page.wait_for_selector("#model-dot[data-state=ready]")


@pytest.mark.full
def test_early_end_of_an_answer_is_explained(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    for finish, told in (("repetition", "the answer was repeating itself"), ("length", "max tokens reached")):
        fixed_answer(page, "la ", "la ", "la", finish=finish)
        say(page, "Sing!")
        wait_for_answer(page)
        assert f"stopped: {told}" in page.locator("#chat .facts").inner_text()
        page.unroute_all()


# --- the same request elsewhere -------------------------------------------------------------------------------------


def text_of_events(events: str) -> str:
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


@pytest.mark.full
def test_copied_programs_send_what_the_page_sends(slow_playground: LiveServer, visit: Visit, tmp_path: Path) -> None:
    page = visit(slow_playground, key=KEY, permissions=["clipboard-read", "clipboard-write"])
    page.wait_for_selector("#model-dot[data-state=ready]")
    set_parameter(page, "Temperature", 0)
    set_parameter(page, "Max tokens", 6)
    page.get_by_label("Message").fill('It\'s "quoted", costs $HOME `date` \\ and\nends with 漢字 🌬')
    programs = {language: copied(page, language) for language in ("curl", "Python", "JavaScript")}
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_label("Message").press("Control+Enter")
    wait_until_over(page, "chat")
    body = sent.value.post_data_json
    assert body is not None
    assert json.loads(programs["JavaScript"].split("const body = ")[1].split(";\nconst response")[0]) == body
    assert not any(KEY in text for text in programs.values())
    expected = post(slow_playground, "/v1/chat/completions", {**body, "stream": False, "stream_options": None})
    answer = expected["choices"][0]["message"]["content"]
    until_idle(slow_playground)
    assert ran([sys.executable], programs["Python"], tmp_path).rstrip("\n") == answer.rstrip("\n")
    if shutil.which("curl"):
        until_idle(slow_playground)
        assert text_of_events(ran(["sh"], programs["curl"], tmp_path)) == answer
    if shutil.which("node"):
        until_idle(slow_playground)
        assert ran(["node"], programs["JavaScript"], tmp_path) == answer
    # What was sent last, if nothing new is written.
    assert copied(page, "curl") == programs["curl"]


@pytest.mark.full
def test_scores_and_completions_can_be_copied_too(playground: LiveServer, visit: Visit, tmp_path: Path) -> None:
    page = visit(playground, permissions=["clipboard-read", "clipboard-write"])
    page.locator("#model option", has_text="alpha").wait_for(state="attached")
    page.get_by_role("tab", name="Score").click()
    page.get_by_role("textbox", name="Prompt", exact=True).fill("the quick")
    page.get_by_label("Continuations, one a line").fill("fox\ndog")
    scored = ran([sys.executable], copied(page, "Python"), tmp_path)
    body = {"model": "alpha", "prompts": ["the quick"] * 2, "continuations": [" fox", " dog"]}
    assert scored.strip() == str(post(playground, "/loglikelihood", body))
    page.get_by_role("tab", name="Complete").click()
    set_parameter(page, "Temperature", 0)
    set_parameter(page, "Max tokens", 5)
    page.get_by_role("textbox", name="Prompt", exact=True).fill("the quick")
    completed = ran([sys.executable], copied(page, "Python"), tmp_path)
    expected = post(
        playground, "/v1/completions", {"model": "alpha", "prompt": "the quick", "temperature": 0, "max_tokens": 5}
    )
    assert completed.rstrip("\n") == expected["choices"][0]["text"].rstrip("\n")


# --- for everybody --------------------------------------------------------------------------------------------------


def fill_all_modes(page: Page) -> None:
    """Something to look at in each."""
    # Greedily: what is drawn may end at once.
    set_parameter(page, "Temperature", 0)
    set_parameter(page, "Max tokens", 40)
    say(page, "the quick brown fox " * 4)
    wait_for_answer(page)
    page.get_by_role("tab", name="Complete").click()
    set_parameter(page, "Temperature", 0)
    set_parameter(page, "Max tokens", 40)
    page.get_by_role("textbox", name="Prompt", exact=True).fill("the quick")
    page.keyboard.press("Control+Enter")
    until_true(page, "document.querySelectorAll('.token').length > 4")
    wait_until_over(page, "complete")
    page.get_by_role("tab", name="Score").click()
    page.get_by_role("textbox", name="Prompt", exact=True).fill("the quick")
    page.get_by_label("Continuations, one a line").fill("fox\n" + "dog" * 40)
    page.keyboard.press("Control+Enter")
    page.locator("#score-table").wait_for()


@pytest.mark.full
def test_everything_has_a_name_and_can_be_read_by_day_and_by_night(
    playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    complaints.expected.append("404")
    page = visit(playground, reduced_motion="reduce")
    assert flaws(page) == []
    fill_all_modes(page)
    for mode in ("Score", "Complete", "Chat"):
        page.get_by_role("tab", name=mode).click()
        if mode == "Complete":
            page.locator(".token").nth(3).focus()
            page.get_by_role("tooltip").wait_for()
        assert flaws(page) == [], mode
    refusal = {"error": {"message": "There is no such model.", "type": "invalid_request_error", "code": None}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=404, json=refusal))
    say(page, "Is anybody there?")
    page.get_by_role("alert").locator("p").wait_for()
    assert flaws(page) == []
    for opener in ("Copy as…", "Key", "Models"):
        page.get_by_role("button", name=opener).click()
        assert flaws(page) == [], opener
        page.keyboard.press("Escape")


@pytest.mark.full
def test_colours_can_be_chosen_and_stay_readable(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, reduced_motion="reduce")
    page.emulate_media(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)

    def choose_colours(name: str) -> None:
        page.get_by_role("button", name="Colours").click()
        assert flaws(page) == []
        page.get_by_role("menuitemradio", name=name).click()

    page.emulate_media(color_scheme="light")
    choose_colours("Dark")
    page.emulate_media(color_scheme="light")
    dark = page.evaluate(paper)
    assert dark != light
    assert too_faint(page) == []
    page.reload()
    assert page.evaluate(paper) == dark, "the choice is kept"
    page.emulate_media(color_scheme="dark")
    choose_colours("Light")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(paper) == light, "whatever the system says"
    assert too_faint(page) == []
    page.get_by_role("button", name="Colours").click()
    assert page.locator("[role=menuitemradio][aria-checked=true]").inner_text() == "Light"
    page.keyboard.press("Escape")
    choose_colours("As the system")
    for scheme, colour in (("light", light), ("dark", dark)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert page.evaluate(paper) == colour


@pytest.mark.full
def test_phone_shows_everything_without_scrolling_sideways(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, viewport={"width": 390, "height": 700}, is_mobile=True, has_touch=True)
    assert not is_wider_than_the_screen(page)
    fill_all_modes(page)
    for width, mode in itertools.product((390, 320), ("Score", "Complete", "Chat")):
        page.set_viewport_size({"width": width, "height": 700})
        page.get_by_role("tab", name=mode).tap()
        assert not is_wider_than_the_screen(page), (width, mode)
        button = page.get_by_role("button", name={"Chat": "Send"}.get(mode, mode), exact=True)
        page.evaluate("scrollTo(0, 0)")
        box = button.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 700, "the button is on the first screen"
    page.get_by_role("link", name="Parameters").tap()
    page.get_by_role("button", name="Copy as…").tap()
    assert not is_wider_than_the_screen(page)


@pytest.mark.full
def test_keyboard_alone_reaches_everything_and_shows_where_it_is(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    # Greedily: what is drawn may end at once.
    page.get_by_role("tab", name="Complete").click()
    set_parameter(page, "Temperature", 0)
    set_parameter(page, "Max tokens", 8)
    page.get_by_role("tab", name="Chat").click()
    page.reload()
    page.get_by_role("button", name=re.compile("^(Load|Model actions)$")).wait_for()
    assert page.evaluate("document.activeElement.id") == "chat-input"
    for _ in range(20):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent") == "Skip to the conversation":
            break
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-complete"
    page.keyboard.press("ArrowLeft")
    visited = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen = page.evaluate(
            "(e => [e.tagName === 'BODY', e.id || e.textContent.trim(), getComputedStyle(e).outlineStyle])"
            "(document.activeElement)"
        )
        if seen[0]:
            break
        assert seen[2] != "none", f"{seen[1]} does not show that it is focused"
        visited.append(seen[1])
    wanted = {"model", "key-open", "chat-input", "Send", "parameters-reset", "parameter-temperature", "parameter-stop"}
    assert wanted <= set(visited), "the walk ends before all was reached"
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "complete-input":
            break
    page.keyboard.type("the quick")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#complete .token")
    wait_until_over(page, "complete")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.className.split(' ')[0]") == "token"
    assert page.get_by_role("tooltip").is_visible()
