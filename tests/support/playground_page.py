"""A user's actions in the playground, and the state that tests read from the page and its server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from live_server import LiveServer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# Those of the slow server.
KEY, ADMIN_KEY = "secret", "boss"


def give_key(page: Page, key: str) -> None:
    """Types it into the dialog, which opens by itself where the server has just refused a request."""
    if not page.get_by_role("dialog", name="Key").is_visible():
        page.get_by_role("button", name=re.compile("^Key")).click()
    page.get_by_label("API key, or the admin key").fill(key)
    page.get_by_role("button", name="Use").click()


def set_parameter(page: Page, label: str, value: object) -> None:
    field = page.get_by_role("spinbutton", name=label)
    field.fill(str(value))
    field.press("Tab")


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Control+Enter")


def wait_until_over(page: Page, mode: str) -> None:
    page.wait_for_selector(f"#{mode} .composer:not(.busy)")


def wait_for_answer(page: Page) -> None:
    """Waits until the last answer is complete."""
    page.wait_for_selector(".turns > .assistant:last-child:not(.coming) .actions")
    wait_until_over(page, "chat")


def answers(page: Page) -> list[str]:
    return page.locator(".turns .assistant .prose").all_inner_texts()


def names(page: Page) -> list[str]:
    return page.locator("#history-list .name").all_inner_texts()


def turn(page: Page, index: int) -> Locator:
    return page.locator(".turns > li").nth(index)


def act(page: Page, index: int, name: str) -> None:
    turn(page, index).get_by_role("button", name=name, exact=True).click()


def choose(page: Page, name: str, item: str) -> None:
    page.get_by_role("button", name=f"Actions for {name}").click()
    page.get_by_role("menuitem", name=item).click()


def gauge(server: LiveServer, name: str) -> float:
    """The sum over a metric's series."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    # Asked often, and reading the certificates that are not needed here takes longer than the answer.
    answer = httpx.get(server.url + "/metrics", headers=headers, timeout=20, trust_env=False, verify=False)
    lines = answer.text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}\b[{{ ]", line))


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def until_true(page: Page, expression: str) -> None:
    """Asked from outside: the page's policy lets nobody evaluate texts inside, Playwright's waiting included."""
    until(lambda: bool(page.evaluate(expression)), expression)


def until_idle(server: LiveServer) -> None:
    """Waits for the slow server, which refuses a request while another still has bytes to send."""
    until(lambda: gauge(server, "ostro_requests_under_way") == 0, "a request is there still")


def post(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    until_idle(server)
    with server.client(authorization=f"Bearer {KEY}") as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        given: dict[str, Any] = answer.json()
        return given


def streamed(*deltas: str, done: bool = True, finish: str | None = None) -> str:
    choices: list[dict[str, Any]] = [{"delta": {"content": text}, "finish_reason": None} for text in deltas]
    if finish:
        choices.append({"delta": {}, "finish_reason": finish})
    events = [json.dumps({"choices": [{"index": 0, **choice}]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in [*events, *(["[DONE]"] if done else [])])


def fixed_answer(page: Page, *deltas: str, finish: str | None = None) -> None:
    """Answers every chat request with these deltas."""
    body = streamed(*deltas, finish=finish)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def copied(page: Page, language: str) -> str:
    """The program that the page offers for what it would send; needs the clipboard."""
    page.get_by_role("button", name="Copy as…").click()
    page.get_by_role("radio", name=language).check()
    page.get_by_role("dialog").get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("dialog").get_by_text("Copied.").wait_for()
    page.get_by_role("button", name="Close").click()
    return str(page.evaluate("navigator.clipboard.readText()"))


def ran(program: list[str], text: str, directory: Path) -> str:
    """The output of such a program."""
    script = directory / f"snippet{ {'node': '.mjs'}.get(Path(program[0]).name, '.txt') }"
    script.write_text(text, encoding="utf-8")
    # Proxies are for other machines.
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environ |= {"OSTRO_API_KEY": KEY, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([*program, str(script)], capture_output=True, timeout=120, env=environ, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()
