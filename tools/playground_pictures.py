"""Takes the pictures of the page that the documentation shows: python tools/playground_pictures.py

Starts a server with the default model and asks it, greedily, in a headless Chromium. Take them on a quiet machine, as
speeds are in them, and look at them before they are committed: a small model may answer anything.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
ANSWER_MS = 180_000
CHAT = ("What is the capital of France?", "Write a Python function that returns the square of a number.")
COMPLETE = "The three primary colours are red, blue and"
SCORE_PROMPT, CONTINUATIONS = "The capital of France is", ("Paris", "London", "Rome", "Berlin", "cheese")


@contextmanager
def served() -> Iterator[str]:
    """The address of a server with the default model."""
    command = [sys.executable, "-m", "ostro", "serve", "--ui", "--port", "0", "--log-format", "json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.search(r"http://[\w.:]+", line):
                yield found[0]
                return
        raise SystemExit("the server ended before it said its address")
    finally:
        server.terminate()
        server.wait()


def opened(browser: Browser, url: str, size: dict[str, int], *, dark: bool = False, scale: int = 1) -> Page:
    page = browser.new_page(
        viewport={"width": size["width"], "height": size["height"]},
        color_scheme="dark" if dark else "light",
        device_scale_factor=scale,
        reduced_motion="reduce",
    )
    page.goto(url)
    page.wait_for_selector("#model-dot[data-state=ready]", timeout=ANSWER_MS)
    return page


def greedy(page: Page, max_tokens: int) -> None:
    for label, value in (("Temperature", "0"), ("Max tokens", str(max_tokens))):
        page.get_by_role("spinbutton", name=label).fill(value)
        page.get_by_role("spinbutton", name=label).press("Tab")


def send(page: Page, label: str, text: str, mode: str) -> None:
    field = page.get_by_role("textbox", name=label, exact=True)
    field.fill(text)
    field.press("Control+Enter")
    page.wait_for_selector(f"#{mode} .composer:not(.busy)", timeout=ANSWER_MS)


def take(page: Page, name: str) -> None:
    page.screenshot(path=IMAGES / f"playground-{name}.png")
    page.close()


def main() -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = opened(browser, url, DESKTOP)
        greedy(page, 160)
        for text in CHAT:
            send(page, "Message", text, "chat")
        take(page, "chat")

        page = opened(browser, url, DESKTOP, dark=True)
        page.get_by_role("tab", name="Complete").click()
        greedy(page, 75)
        send(page, "Prompt", COMPLETE, "complete")
        page.locator(".token").nth(1).hover()
        page.get_by_role("tooltip").wait_for()
        take(page, "complete")

        page = opened(browser, url, DESKTOP)
        page.get_by_role("tab", name="Score").click()
        page.get_by_role("textbox", name="Prompt", exact=True).fill(SCORE_PROMPT)
        send(page, "Continuations, one a line", "\n".join(CONTINUATIONS), "score")
        take(page, "score")

        page = opened(browser, url, PHONE, scale=2)
        send(page, "Message", CHAT[0], "chat")
        take(page, "phone")
        browser.close()


if __name__ == "__main__":
    main()
