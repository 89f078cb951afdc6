"""/docs in a real browser: it shows the API, asks nobody else for anything, and the console stays silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser_fixtures import PATIENCE_MS, Complaints
from live_server import LiveServer, live_server

from ostro import __version__

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("docs")) as live:
        yield live


@pytest.fixture
def page(chromium: Browser, complaints: Complaints, server: LiveServer) -> Iterator[Page]:
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints.watch(page, server.url)
    yield page
    context.close()


def test_the_root_leads_to_swagger_which_shows_every_endpoint_and_tries_one(page: Page, server: LiveServer) -> None:
    page.goto(server.url)
    page.get_by_role("link", name="its documentation").click()
    page.wait_for_url(f"{server.url}/docs")
    with server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    page.locator(".opblock").first.wait_for()
    shown = page.locator(".opblock-summary-path").all_inner_texts()
    assert sorted(text.replace("\u200b", "") for text in shown) == sorted(p for p, each in paths.items() for _ in each)
    page.locator("#operations-health-get_version_version_get .opblock-summary-control").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    answer = page.locator(".live-responses-table tbody .response-col_description")
    assert f'"version": "{__version__}"' in answer.first.inner_text()


def test_with_keys_set_the_page_asks_for_one_and_uses_it(
    chromium: Browser, complaints: Complaints, tmp_path: Path
) -> None:
    with live_server(tmp_path, "--api-key", "hush", ready=False) as live:
        context = chromium.new_context()
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        complaints.expected = ["401"]
        complaints.watch(page, live.url)
        page.goto(f"{live.url}/docs")
        field = page.get_by_label("This server needs an API key")
        field.fill("wrong")
        field.press("Enter")
        page.get_by_role("alert").filter(has_text="This API key is unknown here").wait_for()
        field.fill("hush")
        page.get_by_role("button", name="Show the API").click()
        page.locator("#operations-models-list_models_v1_models_get .opblock-summary-control").click()
        assert not field.is_visible()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        answer = page.locator(".live-responses-table tbody .response-col_description")
        assert '"object": "list"' in answer.first.inner_text()
        context.close()
