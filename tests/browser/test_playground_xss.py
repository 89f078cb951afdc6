"""A thousand texts that would run a script in a page that took them for HTML, wherever the playground shows a text that
it did not write: answers, thoughts, calls, results, imported conversations, names of models, errors.

Nothing may be run, nothing be fetched, and no element or attribute appear but those that the page makes for text. The
page's Content-Security-Policy is switched off here: what the page does must not depend on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser_fixtures import Complaints, Visit
from live_server import LiveServer
from playground_page import say, until, until_true, wait_until_over
from xss_payloads import payloads

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

COUNTS = [pytest.param(50, id="50"), pytest.param(1000, id="1000", marks=pytest.mark.full)]

CANARY = """
  window.ran = [];
  window.canary = (...given) => window.ran.push(["canary", ...given]);
  window.alert = window.prompt = window.confirm = window.print = window.open = window.canary;
  window.plain = JSON.stringify(Object.getOwnPropertyNames(Object.prototype));
  addEventListener("DOMContentLoaded", () => (window.known = new Set(document.querySelectorAll("*"))));
"""
# What text never becomes, among elements that were not in the page when it was opened.
FORBIDDEN = (
    "script, iframe, frame, object, embed, link:not([href$='/ui/vendor/temml.css']), base, meta, style, img, image, "
    "video, audio, source, track, math:not(.formula > math), semantics, annotation, annotation-xml, maction, mglyph, "
    "template, noscript, marquee, portal, frameset, foreignObject, animate, set, use, applet, xmp, plaintext, x-y"
)
LOOK = """(forbidden) => {
  const fresh = [...document.querySelectorAll("*")].filter((node) => !window.known.has(node));
  const attributes = [...new Set([...document.querySelectorAll("*")].flatMap((node) => node.getAttributeNames()))];
  return {
    ran: window.ran,
    elements: fresh.filter((node) => node.matches(forbidden)).map((node) => node.outerHTML.slice(0, 200)),
    handlers: attributes.filter((name) => /^on|srcdoc|formaction|^xlink|^action/i.test(name)),
    linked: fresh.filter((node) => node.matches("math [href], math [id]")).length,
    links: [...document.querySelectorAll("a")].map((node) => node.href).filter((href) => !/^(http|mailto)/.test(href)),
    styles: fresh.filter((node) => /url|expression/i.test(node.getAttribute("style") ?? "")).length,
    prototype: JSON.stringify(Object.getOwnPropertyNames(Object.prototype)) === window.plain,
    fresh: fresh.length,
  };
}"""


def opened(visit: Visit, server: LiveServer) -> Page:
    """Without the policy that would save a page that makes a mistake."""
    page = visit(server, bypass_csp=True)
    page.context.add_init_script(CANARY)
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog says {dialog.message}"))
    page.on("popup", lambda popup: pytest.fail(f"{popup.url} was opened"))
    page.reload()
    return page


def assert_nothing_ran(page: Page, least: int) -> None:
    """By the whole document, in which at least so many elements are new. Handlers of images run a moment later, and
    formulas are drawn once what reads them is loaded.
    """
    until_true(page, "document.querySelector('script[src$=\"/ui/vendor/temml.min.js\"]') === null")
    page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))")
    found = page.evaluate(LOOK, FORBIDDEN)
    assert found.pop("fresh") >= least
    clean = {"ran": [], "elements": [], "handlers": [], "linked": 0, "links": [], "styles": 0, "prototype": True}
    assert found == clean


@pytest.mark.full
def test_payloads_do_run_in_a_page_that_takes_them_for_html(
    playground: LiveServer, visit: Visit, complaints: Complaints
) -> None:
    """What looks for them finds them: otherwise the tests below would prove nothing."""
    page = opened(visit, playground)
    # Of all kinds.
    complaints.expected.append("")
    page.route(lambda url: not url.startswith(playground.url), lambda route: route.abort())
    page.evaluate(
        """(texts) => {
          for (const text of texts) {
            const shown = document.createElement("div");
            shown.innerHTML = text;
            document.body.append(shown);
          }
        }""",
        [text for text in payloads(300) if "evil.example" not in text and "<base" not in text],
    )
    until(lambda: len(page.evaluate("window.ran")) >= 3, "none of them has run")
    found = page.evaluate(LOOK, FORBIDDEN)
    assert len(found["elements"]) > 30
    assert found["handlers"]


@pytest.mark.parametrize("count", COUNTS)
def test_payloads_in_answers_thoughts_and_calls(playground: LiveServer, visit: Visit, count: int) -> None:
    """Whole, and as far as they had come at every fifth character."""
    page = opened(visit, playground)
    page.evaluate(
        """async (texts) => {
          const { Answer } = await import("/ui/answer.js");
          const { ResultsView, resultsForm } = await import("/ui/calls.js");
          const { takeDelta } = await import("/ui/deltas.js");
          const said = document.querySelector("#chat-turns");
          for (const text of texts) {
            const answer = new Answer();
            const turn = { content: "" };
            said.append(answer.node);
            for (let at = 0; at < text.length; at += 5) {
              takeDelta(turn, { content: text.slice(at, at + 5) });
              answer.update(turn);
            }
            answer.finish(turn);
            const calling = new Answer();
            const called = { content: text };
            const calls = [
              { index: 0, id: text, type: "function", function: { name: text, arguments: text } },
              { index: 1, id: "b", type: "custom", custom: { name: text, input: text } },
            ];
            takeDelta(called, { reasoning_content: text, tool_calls: calls });
            calling.finish(called);
            const results = new ResultsView(called.tool_calls);
            results.finish({ results: [{ tool_call_id: text, content: text }, { tool_call_id: "b", content: text }] });
            said.append(calling.node, results.node, resultsForm(called.tool_calls, { send() {}, cancel() {} }));
          }
        }""",
        list(payloads(count)),
    )
    assert_nothing_ran(page, least=10 * count)


def conversation(index: int, texts: tuple[str, ...]) -> dict[str, Any]:
    """Every field that a file may hold, with a text in it."""
    turns: list[dict[str, Any]] = []
    for text in texts:
        id = len(turns)
        call = {"id": text, "type": "function", "function": {"name": text, "arguments": text, "onerror": text}}
        call |= {"custom": {"name": {"x": text}}, text: text}
        answer = {"content": text, "model": text, "reasoning_content": text, "tool_calls": [call], "thought_ms": 1}
        turns += [
            {"id": id + 1, "parent": id, "role": "user", "content": text, "__proto__": {"canary": text}},
            {"id": id + 2, "parent": id + 1, "role": "assistant", **answer},
            {"id": id + 3, "parent": id + 2, "role": "tool", "results": [{"tool_call_id": text, "content": text}]},
        ]
    return {
        "id": texts[0],
        "title": f"{index} {texts[0]}",
        "turns": turns,
        "shown": {"__proto__": 1},
        "created": texts[0],
    }


@pytest.mark.full
@pytest.mark.parametrize("count", COUNTS)
def test_payloads_in_imported_conversations(playground: LiveServer, visit: Visit, tmp_path: Path, count: int) -> None:
    page = opened(visit, playground)
    texts, each = payloads(count), 50
    listed = [conversation(start, texts[start : start + each]) for start in range(0, count, each)]
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps({"format": "ostro.conversations", "version": 2, "conversations": listed}))
    page.locator("#history-file").set_input_files(file)
    until(lambda: page.locator("#history-list .name").count() == len(listed), "they are not listed")
    for index in range(len(listed)):
        page.locator("#history-list .name").nth(index).click()
        until(lambda: page.locator("#chat-turns > li").count() == 3 * each, "it is not shown")
        assert_nothing_ran(page, least=10 * each)


@pytest.mark.full
@pytest.mark.parametrize("count", COUNTS)
def test_payloads_in_names_of_models(playground: LiveServer, visit: Visit, count: int) -> None:
    page = opened(visit, playground)
    cards = [{"id": text, "object": "model", "state": text, "max_model_len": 9} for text in payloads(count)]
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": cards}))
    page.route(re.compile("/v1/models/"), lambda route: route.fulfill(json=cards[0] | {"sampling_defaults": {}}))
    page.reload()
    until(lambda: page.locator("#model option").count() == count, "they are not listed")
    for value in payloads(count)[:: max(1, count // 20)]:
        page.evaluate(
            """(value) => {
              const picker = document.getElementById("model");
              picker.value = value;
              picker.dispatchEvent(new Event("change"));
            }""",
            value,
        )
    assert_nothing_ran(page, least=count)


def answering(error: dict[str, Any], *, streams: bool) -> Callable[[Route], None]:
    """Answers with the error, as an event of a stream or by the status."""
    if streams:
        return lambda route: route.fulfill(body=f"data: {json.dumps(error)}\n\n", content_type="text/event-stream")
    return lambda route: route.fulfill(json=error, status=400)


@pytest.mark.parametrize("count", COUNTS)
def test_payloads_in_errors(playground: LiveServer, visit: Visit, complaints: Complaints, count: int) -> None:
    """As the server's answer to a question, and in the middle of a stream."""
    page = opened(visit, playground)
    complaints.expected.append("400")
    texts, each = payloads(count), 25
    for start in range(0, count, each):
        error = {"error": {"message": "\n".join(texts[start : start + each]), "type": "x", "param": None, "code": None}}

        page.unroute_all()
        page.route("**/v1/chat/completions", answering(error, streams=start // each % 2 == 0))
        say(page, texts[start])
        wait_until_over(page, "chat")
        shown = page.locator("#chat .notice p").text_content()
        assert shown is not None
        assert shown.startswith(texts[start][:20])
        assert_nothing_ran(page, least=1)


ENTITIES = ("constructor", "toString", "__proto__", "valueOf", "hasOwnProperty", "__defineGetter__", "nosuch")


@pytest.mark.full
def test_names_of_prototypes_are_not_entities(playground: LiveServer, visit: Visit) -> None:
    """&constructor; was shown as the source text of a function of the browser's."""
    page = visit(playground)
    shown = page.evaluate(
        """async (names) => {
          const { Markdown } = await import("/ui/markdown.js");
          const { choicesAmong } = await import("/ui/tools.js");
          const texts = names.map((name) => {
            const markdown = new Markdown();
            markdown.finish(`![&${name};](x) &amp;`);
            return markdown.node.textContent;
          });
          return [texts, choicesAmong(JSON.stringify(names.map((type) => ({ type })))).map(([label]) => label)];
        }""",
        list(ENTITIES),
    )
    assert shown[0] == [f"Image: &{name}; &" for name in ENTITIES]
    assert shown[1] == ["auto", "none", "required"]


@pytest.mark.full
def test_imported_call_holds_nothing_that_was_not_checked(playground: LiveServer, visit: Visit) -> None:
    """A call of one type with fields of the other was drawn by those, whatever they were, and ended the page."""
    page = visit(playground)
    call = {"id": "a", "type": "custom", "custom": {"name": "f", "input": "x", "more": 1}, "function": {"name": {}}}
    turns = [{"id": 1, "parent": 0, "role": "assistant", "content": "", "tool_calls": [call]}]
    kept, refused = page.evaluate(
        """async ([turns, types]) => {
          const { Conversation } = await import("/ui/conversation.js");
          const kept = Conversation.from({ id: "x", turns }).turns[0].tool_calls;
          const refused = types.map((type) => {
            const odd = [{ ...turns[0], tool_calls: [{ id: "a", type, [type]: { name: "f", input: "x" } }] }];
            try {
              return Conversation.from({ id: "x", turns: odd }) && null;
            } catch (error) {
              return error.message;
            }
          });
          return [kept, refused];
        }""",
        [turns, ["constructor", "__proto__", "toString", ["custom"], None, "nosuch"]],
    )
    assert kept == [{"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}]
    assert set(refused) == {"A call in a conversation has no name or no arguments."}
