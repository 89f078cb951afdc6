"""Reasoning, calls of tools and JSON in the playground: scripted answers of a real server, in a real browser."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser_fixtures import Complaints, Visit
from live_server import LiveServer
from page_checks import flaws, is_wider_than_the_screen
from playground_page import act, choose, copied, ran, say, turn, until, until_true, wait_for_answer
from scripted_answers import Scripts
from tool_templates import QWEN

if TYPE_CHECKING:
    from playwright.sync_api import Page

THOUGHT = "The user **greets** me."
SCRIPTS = Scripts()
GREETING = SCRIPTS.add(f"<think>\n{THOUGHT}\n</think>\n\nGood day!")
CALLS = SCRIPTS.add(
    "Let me look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
)
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ONE_CALL = SCRIPTS.add(OSLO)
WEATHER = SCRIPTS.add("Sun and rain.")
AGAIN = SCRIPTS.add("Rain and sun.")
# The server has opened the thought that comes before a format or a call that is asked for.
FORCED_CALL = SCRIPTS.add(f"A city.\n</think>{OSLO}")
PARIS = SCRIPTS.add('A city.\n</think>{"city": "Paris", "country": "France", "population": 2102650}')
INDENTED = '{\n  "city": "Paris",\n  "country": "France",\n  "population": 2102650\n}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The default model with a template that knows tools and thoughts. Steps take a moment, as thoughts do."""
    directory = tmp_path_factory.mktemp("tools")
    (directory / "qwen.jinja").write_text(QWEN)
    template = ("--chat-template", str(directory / "qwen.jinja"))
    with SCRIPTS.served(directory, "--ui", *template, faults="fake,step_seconds=0.005") as live:
        yield live


def fill_example(page: Page, fold: str) -> Any:
    """Opens the fold and takes its example, which is returned."""
    details = page.locator("#parameters details", has_text=fold)
    details.locator("summary").press("Enter")
    details.get_by_role("button", name="Example").click()
    return json.loads(details.locator("textarea").input_value())


def sent_by(page: Page, act: Any) -> dict[str, Any]:
    """The request that comes of an act."""
    with page.expect_request("**/v1/chat/completions") as sent:
        act()
    body: dict[str, Any] = json.loads(sent.value.post_data or "")
    return body


# --- reasoning ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_reasoning_is_folded_away_and_kept_with_the_answer(server: LiveServer, visit: Visit, tmp_path: Path) -> None:
    page = visit(server, permissions=["clipboard-read", "clipboard-write"])
    say(page, f"Hello {GREETING}")
    wait_for_answer(page)

    def shows(page: Page) -> None:
        answer = turn(page, 1)
        assert answer.locator(".prose > .markdown").inner_text() == "Good day!"
        thought = answer.get_by_text("The user greets me.")
        assert not thought.is_visible()
        title = answer.locator("summary")
        assert title.inner_text().startswith("Thought for ")
        title.press("Enter")
        assert thought.is_visible()
        title.click()
        assert not thought.is_visible()

    shows(page)
    assert page.locator("#announcer").text_content() == "Answer: Good day!"
    act(page, 1, "Copy")
    until_true(page, "document.getElementById('announcer').textContent === 'Copied.'")
    assert page.evaluate("navigator.clipboard.readText()") == "Good day!"
    page.reload()
    shows(page)
    with page.expect_download() as download:
        choose(page, "Hello", "Export")
    file = tmp_path / "hello.json"
    download.value.save_as(file)
    elsewhere = visit(server)
    elsewhere.locator("#history-file").set_input_files(file)
    turn(elsewhere, 1).wait_for()
    shows(elsewhere)
    body = sent_by(elsewhere, lambda: say(elsewhere, f"And again {GREETING}"))
    sent = body["messages"][1]
    assert (sent["role"], sent["content"], sent["reasoning_content"].strip()) == ("assistant", "Good day!", THOUGHT)
    wait_for_answer(elsewhere)


@pytest.mark.full
def test_answer_is_shown_as_far_as_it_has_come(server: LiveServer, visit: Visit) -> None:
    """Thoughts first, then text, then calls, whatever the network has cut."""
    page = visit(server)
    seen = page.evaluate(
        """async (deltas) => {
          const { Answer } = await import("/ui/answer.js");
          const { takeDelta } = await import("/ui/deltas.js");
          const answer = new Answer();
          const turn = { content: "" };
          document.body.append(answer.node);
          return deltas.map((delta) => {
            const came = takeDelta(turn, delta);
            answer.update(turn);
            const texts = [...answer.node.querySelectorAll("summary, .markdown, pre")].map((node) => node.textContent);
            return [came, ...texts];
          });
        }""",
        [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "Hm", "reasoning": "Hm"},
            {"reasoning": "m."},
            {"content": '{"a": [1, '},
            {"content": "2"},
            {"tool_calls": [{"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": {}, "y"'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ": 1e400}"}}]},
            {"tool_calls": [{"index": 1, "id": "2", "type": "custom", "custom": {"name": "g", "input": ""}}]},
            {"tool_calls": [{"index": 1, "custom": {"input": '{"as": it is}'}}]},
            {},
        ],
    )
    half, more = '{\n  "a": [\n    1,', '{\n  "a": [\n    1,\n    2'
    thought = ["Thought", "Hmm."]
    calls = ['{\n  "x": {},\n  "y": 1e400\n}', '{"as": it is}']
    assert [[each[0], *("Thought" if text == "Thoughts" else text for text in each[1:])] for each in seen] == [
        [False],
        [True, "Thinking…", "Hm"],
        [True, "Thinking…", "Hmm."],
        [True, *thought, half],
        [True, *thought, more],
        [True, *thought, more, ""],
        [True, *thought, more, '{\n  "x": {},\n  "y"'],
        [True, *thought, more, calls[0]],
        [True, *thought, more, calls[0], ""],
        [True, *thought, more, *calls],
        [False, *thought, more, *calls],
    ]


# --- tools ----------------------------------------------------------------------------------------------------------


def test_calls_are_shown_and_the_model_goes_on_with_their_results(server: LiveServer, visit: Visit) -> None:
    page = visit(server)
    tools = fill_example(page, "Tools")
    asked = {"role": "user", "content": f"The weather? {CALLS}"}
    body = sent_by(page, lambda: say(page, asked["content"]))
    assert (body["tools"], "tool_choice" in body, body["messages"]) == (tools, False, [asked])
    first, second = (page.get_by_label(f"Result of get_weather ({number})") for number in (1, 2))
    first.wait_for()
    assert turn(page, 1).locator(".markdown").inner_text() == "Let me look."
    shown = page.get_by_label("Arguments of get_weather").all_inner_texts()
    assert shown == ['{\n  "city": "Oslo"\n}', '{\n  "city": "Bergen"\n}']
    told = "Answer: Let me look. Call of get_weather (1), get_weather (2). Type the result."
    assert page.locator("#announcer").text_content() == told
    # Nobody is typing anything else, so the result is typed next.
    assert page.evaluate("document.activeElement.placeholder") == "Result of get_weather (1)"
    page.keyboard.type("sun")
    page.keyboard.press("Enter")
    page.keyboard.type(f'{{"sky": {WEATHER}}}')
    body = sent_by(page, lambda: page.keyboard.press("Enter"))
    call, *results = body["messages"][1:]
    ids = [each["id"] for each in call["tool_calls"]]
    functions = [{"name": "get_weather", "arguments": f'{{"city": "{city}"}}'} for city in ("Oslo", "Bergen")]
    assert call == {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {"id": id, "type": "function", "function": each} for id, each in zip(ids, functions, strict=True)
        ],
    }
    assert results == [
        {"role": "tool", "tool_call_id": ids[0], "content": "sun"},
        {"role": "tool", "tool_call_id": ids[1], "content": f'{{"sky": {WEATHER}}}'},
    ]
    wait_for_answer(page)
    page.reload()
    until(lambda: turn(page, 3).locator(".prose").inner_text() == "Sun and rain.", "it is not kept")
    assert page.locator(".result pre").all_inner_texts() == ["sun", f'{{\n  "sky": {WEATHER}\n}}']
    # Another result is another branch; and its fields hold what was there.
    act(page, 2, "Edit")
    assert first.input_value() == "sun"
    second.fill(f"rain {AGAIN}")
    page.get_by_role("button", name="Send results").click()
    until(lambda: turn(page, 3).locator(".prose").inner_text() == "Rain and sun.", "the model does not go on")
    wait_for_answer(page)
    act(page, 2, "Previous version")
    assert turn(page, 3).locator(".prose").inner_text() == "Sun and rain."


@pytest.mark.full
def test_results_are_not_lost_when_the_server_refuses(server: LiveServer, visit: Visit, complaints: Complaints) -> None:
    complaints.expected.append("503")
    page = visit(server)
    fill_example(page, "Tools")
    say(page, f"The weather? {ONE_CALL}")
    field = page.get_by_label("Result of get_weather")
    field.fill(f"rain {WEATHER}")
    refusal = json.dumps({"error": {"message": "No room."}})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, body=refusal))
    field.press("Enter")
    page.get_by_role("alert").get_by_text("No room.").wait_for()
    assert field.input_value() == f"rain {WEATHER}"
    page.unroute_all()
    field.press("Enter")
    wait_for_answer(page)
    assert turn(page, 3).locator(".prose").inner_text() == "Sun and rain."


@pytest.mark.full
def test_tool_can_be_chosen_as_long_as_it_is_there(server: LiveServer, visit: Visit) -> None:
    page = visit(server)
    tools = fill_example(page, "Tools")
    choice = page.get_by_label("Tool choice")
    choice.select_option("get_weather")
    page.reload()
    assert choice.locator("option:checked").inner_text() == "get_weather"
    body = sent_by(page, lambda: say(page, f"The weather? {FORCED_CALL}"))
    assert body["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    # The finish reason of a named choice is stop, and the call is one all the same.
    page.get_by_label("Result of get_weather").wait_for()
    tools[0]["function"]["name"] = "rain"
    page.get_by_label("Tools as JSON").fill(json.dumps(tools))
    assert choice.locator("option").all_inner_texts() == ["auto", "none", "required", "rain"]
    assert choice.locator("option:checked").inner_text() == "auto"
    choice.select_option("none")
    body = sent_by(page, lambda: say(page, f"Never mind {WEATHER}"))
    assert (body["tools"], body["tool_choice"]) == (tools, "none")
    wait_for_answer(page)
    page.get_by_role("button", name="Reset").click()
    body = sent_by(page, lambda: say(page, f"So what {WEATHER}"))
    assert not {"tools", "tool_choice", "response_format"} & body.keys()
    wait_for_answer(page)


# --- JSON -----------------------------------------------------------------------------------------------------------


def test_schema_is_sent_and_its_answer_laid_out(server: LiveServer, visit: Visit) -> None:
    page = visit(server)
    schema = fill_example(page, "JSON schema")
    body = sent_by(page, lambda: say(page, f"Paris? {PARIS}"))
    strict = {"name": "answer", "strict": True, "schema": schema}
    assert body["response_format"] == {"type": "json_schema", "json_schema": strict}
    wait_for_answer(page)
    assert turn(page, 1).locator(".prose pre").inner_text() == INDENTED
    page.get_by_label("Strict").uncheck()
    body = sent_by(page, lambda: act(page, 1, "Regenerate"))
    assert body["response_format"]["json_schema"]["strict"] is False
    wait_for_answer(page)
    # What is no JSON is not sent, and neither field nor message is lost.
    field = page.get_by_label("Schema as JSON")
    alert = page.locator("#chat [role=alert] p")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if "completions" in request.url else None)
    for text, flaw in (('{"type": ', "This is not JSON."), ("[1]", "This must be an object")):
        field.fill("")
        field.press_sequentially(text)
        assert page.locator("#parameter-schema-flaw").inner_text() == "", "it is being typed"
        field.press("Tab")
        assert flaw in page.locator("#parameter-schema-flaw").inner_text()
        assert field.get_attribute("aria-invalid") == "true"
        say(page, "Well?")
        alert.get_by_text(flaw).wait_for()
        assert alert.inner_text().startswith("JSON schema: ")
        assert page.get_by_label("Message").input_value() == "Well?"
        page.get_by_role("button", name="Dismiss").click()
        page.get_by_role("button", name="Copy as…").click()
        assert flaw in page.locator("#code-text").inner_text()
        page.get_by_role("button", name="Close").click()
    # A completion can be held to one, too: the parameters there are its own.
    page.get_by_role("tab", name="Complete").click()
    assert field.input_value() == ""
    field.fill("[1]")
    page.get_by_role("textbox", name="Prompt", exact=True).fill("Paris:")
    page.keyboard.press("Control+Enter")
    page.locator("#complete [role=alert]").get_by_text("JSON schema: This must be an object").wait_for()
    assert sent == []
    field.fill(json.dumps(schema))
    assert page.locator("#parameter-schema-flaw").inner_text() == ""
    with page.expect_request("**/v1/completions") as completing:
        page.keyboard.press("Control+Enter")
    assert json.loads(completing.value.post_data or "")["response_format"]["json_schema"]["schema"] == schema
    page.wait_for_selector("#complete .token")
    page.keyboard.press("Escape")


JSON_TEXTS = ["{}", "[ ]", '{"a":[],"b":{"c":[1,{"d":"e, \\"[{: \\\\"}]},"n":-1.5}', '[[[]],"é🙂 ü",null,true]']
PROSE = ["", "Yes.", "[x](https://a.b)", "[ ] to do", '{"a": 1} is JSON', "{a}", "[1]: note", "12", '"x"']


@pytest.mark.full
def test_json_is_told_from_prose_and_indented_from_its_first_character_on(server: LiveServer, visit: Visit) -> None:
    page = visit(server)
    found = page.evaluate(
        """async (texts) => {
          const { indented, isJson } = await import("/ui/json-text.js");
          const prefixes = (text) => ["", ...[...text].map((_, at, all) => all.slice(0, at + 1).join(""))];
          return texts.map((text) => [isJson(text), prefixes(text).map(indented)]);
        }""",
        [*JSON_TEXTS, *PROSE, '{"cut": [1, '],
    )
    assert [is_json for is_json, _ in found] == [True] * len(JSON_TEXTS) + [False] * len(PROSE) + [True]
    for text, (_, prefixes) in zip(JSON_TEXTS, found, strict=False):
        whole = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        assert prefixes[-1] == whole
        assert all(whole.startswith(each) for each in prefixes)


# --- the same request elsewhere, and for everybody ------------------------------------------------------------------


@pytest.mark.full
def test_copied_programs_send_tools_and_formats_and_print_calls(
    server: LiveServer, visit: Visit, tmp_path: Path
) -> None:
    page = visit(server, permissions=["clipboard-read", "clipboard-write"])
    page.wait_for_selector("#model-dot[data-state=ready]")
    fill_example(page, "Tools")
    fill_example(page, "JSON schema")
    page.get_by_label("Message").fill(f"The weather? {FORCED_CALL}")
    programs = {language: copied(page, language) for language in ("curl", "Python", "JavaScript")}
    body = sent_by(page, lambda: page.get_by_label("Message").press("Control+Enter"))
    assert {"tools", "response_format"} <= body.keys()
    assert json.loads(programs["JavaScript"].split("const body = ")[1].split(";\nconst response")[0]) == body
    assert ran([sys.executable], programs["Python"], tmp_path).strip() == 'get_weather{"city": "Oslo"}'
    if shutil.which("node"):
        assert ran(["node"], programs["JavaScript"], tmp_path) == 'get_weather{"city": "Oslo"}'
    # With the result, the conversation up to it is what is sent.
    page.get_by_label("Result of get_weather").fill(f"rain {PARIS}")
    body = sent_by(page, lambda: page.keyboard.press("Enter"))
    wait_for_answer(page)
    assert json.loads(copied(page, "curl").split("-d '")[1].rsplit("'", 1)[0]) == body


@pytest.mark.full
def test_calls_forms_and_flaws_can_be_read_and_fit_on_a_phone(server: LiveServer, visit: Visit) -> None:
    page = visit(server, reduced_motion="reduce")
    fill_example(page, "Tools")
    fill_example(page, "JSON schema")
    page.get_by_label("Schema as JSON").fill("")
    say(page, f"The weather? {ONE_CALL}")
    field = page.get_by_label("Result of get_weather")
    field.wait_for()
    page.get_by_label("Schema as JSON").fill("{")
    page.get_by_label("Schema as JSON").press("Tab")
    assert flaws(page) == []
    page.set_viewport_size({"width": 320, "height": 640})
    assert not is_wider_than_the_screen(page)
    page.get_by_label("Schema as JSON").fill("")
    field.fill(f"rain {GREETING}" + " and so on" * 30)
    field.press("Enter")
    wait_for_answer(page)
    page.locator(".thought summary").click()
    assert flaws(page) == []
    assert not is_wider_than_the_screen(page)
