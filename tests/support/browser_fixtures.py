"""A real browser on real servers with the page of `--ui`, for tests; what it complains about fails a test."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from page_checks import WATCH_SHIFTS
from playground_page import ADMIN_KEY, KEY, give_key

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_MS = 60_000

Visit = Callable[..., "Page"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[dev]'")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium; Debian's package is chromium")
    # Chromium's sandbox refuses to run for root.
    args = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield launched
        launched.close()


BETA_DEFAULTS = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 33}


@pytest.fixture(scope="session")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two tiny models that are loaded when asked for; open to all. The second has sampling defaults of its own."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("alpha", "org/beta")):
        # On torch, which is slow enough for answers to come token by token.
        write_model(root / name, seed=seed, heads=4)
    (root / "org/beta/generation_config.json").write_text(json.dumps(BETA_DEFAULTS))
    directory = tmp_path_factory.mktemp("tiny")
    with live_server(directory, "--ui", "--models", str(root), "--threads", "1", faults="") as live:
        yield live


@pytest.fixture(scope="session")
def slow_playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One request at a time, some tokens a second, none without a key."""
    limits = ("--max-concurrent-requests", "1", "--max-queue-requests", "0", "--request-timeout", "3600")
    keys = ("--api-key", KEY, "--admin-key", ADMIN_KEY)
    faults = "fake,step_seconds=0.015"
    with live_server(tmp_path_factory.mktemp("slow"), "--ui", *limits, *keys, faults=faults) as live:
        yield live


class Complaints:
    """Errors in a browser's console, and requests of the page to other origins."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.expected: list[str] = []

    def watch(self, page: Page, origin: str) -> Callable[[], None]:
        """Collects complaints until the returned function is called."""
        listeners = (
            ("console", self._hear),
            ("pageerror", lambda error: self.found.append(str(error))),
            ("request", lambda request: self._check(request.url, origin)),
        )
        for event, listener in listeners:
            page.on(event, listener)  # type: ignore[call-overload]

        def unwatch() -> None:
            for event, listener in listeners:
                page.remove_listener(event, listener)

        return unwatch

    def _hear(self, message: ConsoleMessage) -> None:
        # The page names its icon. What was open before it (see `make_as_new`) does not: the browser then asks for one,
        # and may hear only now that it gets none.
        asks_for_icon = message.location["url"].endswith("/favicon.ico")
        if message.type in ("error", "warning") and not asks_for_icon:
            self.found.append(message.text)

    def _check(self, url: str, origin: str) -> None:
        if not url.startswith(origin + "/") or KEY in url or ADMIN_KEY in url:
            self.found.append(f"asks for {url}")

    def unexpected(self) -> list[str]:
        return [each for each in self.found if not any(word in each for word in self.expected)]


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    """A test says which it expects; all others fail it."""
    noted = Complaints()
    yield noted
    assert noted.unexpected() == []


@pytest.fixture(scope="module")
def kept_page(chromium: Browser) -> Iterator[Page]:
    """One page reused by all visits: opening a new window takes the browser a second."""
    page = new_page(chromium)
    yield page
    page.context.close()


def new_page(chromium: Browser, **options: Any) -> Page:
    context = chromium.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(WATCH_SHIFTS)
    return context.new_page()


def make_as_new(page: Page, server: LiveServer) -> None:
    """Removes everything that an earlier test stored, routed or set."""
    page.unroute_all(behavior="ignoreErrors")
    for other in page.context.pages:
        if other is not page:
            other.close()
    page.context.set_offline(False)
    page.context.clear_permissions()
    page.emulate_media(color_scheme="null", reduced_motion="null")
    page.set_viewport_size({"width": 1280, "height": 720})
    # Of the same origin, but not the page, which could remember something while it is left.
    page.goto(server.url + "/healthz")
    page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")


@pytest.fixture
def visit(chromium: Browser, complaints: Complaints, kept_page: Page) -> Iterator[Visit]:
    """Opens the page of a server, with a key as its user would give it."""
    with ExitStack() as stack:

        def opened(server: LiveServer, *, key: str | None = None, **options: Any) -> Page:
            if options.keys() - {"permissions"} or kept_page in visited:
                page = new_page(chromium, **options)
                stack.callback(page.context.close)
            else:
                page = kept_page
                stack.callback(make_as_new, page, server)
                page.context.grant_permissions(options.get("permissions", []))
            visited.append(page)
            stack.callback(complaints.watch(page, server.url))
            if key is not None:
                # Before it has a key the page is refused once, which browsers tell.
                complaints.expected.append("401")
            page.goto(server.url + "/")
            if key is not None:
                page.get_by_role("dialog", name="Key").wait_for()
                give_key(page, key)
                page.get_by_role("dialog", name="Key").wait_for(state="hidden")
            return page

        visited: list[Page] = []
        yield opened
