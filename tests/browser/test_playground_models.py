"""The Models view of the playground: what can be loaded, with sizes, plans and progress, as far as the key allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser_fixtures import Complaints, Visit
from fault_proxy import Fault, FaultProxy
from live_server import LiveServer, live_server
from model_directory import write_model
from object_stores import BUCKET, running_store
from page_checks import flaws, is_wider_than_the_screen
from playground_page import KEY, until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.full


def open_models(page: Page) -> Locator:
    page.get_by_role("button", name="Models", exact=True).click()
    dialog = page.get_by_role("dialog", name="Models")
    dialog.wait_for()
    return dialog


def row(dialog: Locator, name: str) -> Locator:
    """One of the server's own models."""
    return dialog.locator("#models-served li").filter(has=dialog.page.get_by_text(name, exact=True))


def test_models_are_listed_with_size_plan_and_state_and_can_be_loaded_and_unloaded(
    playground: LiveServer, visit: Visit
) -> None:
    page = visit(playground, reduced_motion="reduce")
    page.wait_for_selector("#model-load:not([hidden]), #model-menu:not([hidden])")
    dialog = open_models(page)
    beta = row(dialog, "org/beta")
    beta.get_by_text("fits: ").wait_for()
    text = beta.inner_text()
    assert "kB" in text
    assert "MiB of " in text
    assert "256 tokens" in text
    unload = beta.get_by_role("button", name="Unload org/beta")
    if unload.is_visible():
        # An earlier test has loaded it.
        unload.click()
        page.get_by_role("dialog", name="Unload org/beta?").get_by_role("button", name="Unload", exact=True).click()
    beta.get_by_text("not loaded").wait_for()
    beta.get_by_role("button", name="Load org/beta").click()
    beta.get_by_text("uses ").wait_for()
    assert beta.locator(".dot").get_attribute("data-state") == "ready"
    unload.click()
    page.get_by_role("dialog", name="Unload org/beta?").get_by_role("button", name="Cancel").click()
    assert beta.locator(".dot").get_attribute("data-state") == "ready"
    # Short names and the cache, which this server does not load from.
    short = dialog.locator("#models-short li").filter(has_text="qwen2.5-coder-0.5b")
    assert "491 MB" in short.inner_text()
    assert not short.get_by_role("button", name="Load").count()
    assert dialog.get_by_role("heading", name="In the cache").is_visible()
    assert flaws(page) == []
    dialog.get_by_role("searchbox", name="Find a model").fill("BETA")
    until(lambda: dialog.locator("#models-served li").count() == 1, "it is not narrowed")
    assert dialog.get_by_text("No short name has these words.").is_visible()
    beta.get_by_role("button", name="Use org/beta").click()
    assert not dialog.is_visible()
    assert page.get_by_label("Model", exact=True).input_value() == "org/beta"


def test_without_the_admin_key_models_are_listed_and_the_rest_is_explained(
    slow_playground: LiveServer, visit: Visit
) -> None:
    page = visit(slow_playground, key=KEY)
    page.wait_for_selector("#model-dot[data-state=ready]")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    dialog = open_models(page)
    dialog.get_by_text("need the admin key").wait_for()
    dialog.locator("#models-served").get_by_text("ready").wait_for()
    assert dialog.get_by_role("button", name="Load").count() == 0
    assert not dialog.get_by_role("heading", name="With a short name").is_visible()
    assert not [url for url in asked if "/admin/" in url], "what would be refused is not asked for"
    dialog.get_by_role("button", name="Give a key…").click()
    assert page.get_by_role("dialog", name="Key").is_visible()


@pytest.fixture(scope="module")
def distant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, FaultProxy]]:
    """A server with a model in a bucket, which is not downloaded yet, and what is between them."""
    directory = tmp_path_factory.mktemp("distant")
    with running_store("gs") as store:
        files = {path.name: path.read_bytes() for path in write_model(directory / "far").iterdir()}
        store.put_model("models/far", files)
        proxy = FaultProxy(store.url)
        environment = {**store.environment(proxy.url), "OSTRO_CACHE": str(directory / "cache")}
        args = ("--ui", "--models", f"gs://{BUCKET}/models/", "--threads", "1")
        try:
            with live_server(directory, *args, env=environment) as live:
                yield live, proxy
        finally:
            proxy.close()


def test_download_shows_its_progress_and_can_be_cancelled(
    distant: tuple[LiveServer, FaultProxy], visit: Visit, complaints: Complaints
) -> None:
    # The request for the load that is cancelled.
    complaints.expected.append("503")
    server, proxy = distant
    page = visit(server, reduced_motion="reduce")
    page.wait_for_selector("#model-load:not([hidden])")
    dialog = open_models(page)
    far = row(dialog, "far")
    far.get_by_text("fits: ").wait_for()
    assert "to download" in far.inner_text()
    assert f"bucket: gs://{BUCKET}/models/far" in far.inner_text()
    # From now on the bucket sends half of each file, and then nothing.
    proxy.always_fail(Fault.STALLED)
    far.get_by_role("button", name="Download and load far").click()
    bar = far.get_by_role("progressbar", name="Downloading far")
    until(lambda: bar.count() == 1 and bar.get_attribute("value") is not None, "there is no progress")
    assert float(bar.get_attribute("max") or 0) > 0
    assert flaws(page) == []
    with server.client() as client:
        [told] = client.get("/admin/stats").json()["models"]
    assert told["state"] == "fetching"
    assert 0 <= told["fetched_bytes"] < told["fetch_bytes"]
    far.get_by_role("button", name="Cancel far").click()
    far.get_by_text("not loaded").wait_for()
    # The page tells why the load ended.
    dialog.get_by_text("was unloaded while it was downloading").wait_for()
    proxy.always_fail(None)
    far.get_by_role("button", name="Download and load far").click()
    far.get_by_text("uses ").wait_for()
    until(lambda: "to download" not in far.inner_text(), "its files are here now")
    with server.client() as client:
        assert "gs://" in json.dumps(client.get("/admin/available").json()["cached"])


def test_on_a_phone_the_models_fit_the_screen(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, viewport={"width": 320, "height": 640}, is_mobile=True, has_touch=True)
    page.wait_for_selector("#model-load:not([hidden]), #model-menu:not([hidden])")
    page.get_by_role("button", name="Models", exact=True).tap()
    dialog = page.get_by_role("dialog", name="Models")
    row(dialog, "alpha").get_by_text("fits: ").wait_for()
    assert not is_wider_than_the_screen(page)
    box = dialog.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 320
    assert not page.evaluate("(e => e.scrollWidth > e.clientWidth)(document.querySelector('.models'))")


def test_failure_is_told_where_it_happened(tmp_path: Path, visit: Visit, complaints: Complaints) -> None:
    broken = tmp_path / "models" / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text('{"model_type": "unheard-of"}')
    write_model(tmp_path / "models" / "good")
    with live_server(tmp_path, "--ui", "--models", str(tmp_path / "models"), "--threads", "1") as live:
        page = visit(live, reduced_motion="reduce")
        page.wait_for_selector("#model-load:not([hidden])")
        dialog = open_models(page)
        with live.client() as client:
            told = client.get("/admin/plan/broken").json()
        assert told["plan"] is None
        row(dialog, "broken").get_by_text(told["unknown"]).wait_for()
        row(dialog, "good").get_by_text("fits: ").wait_for()
        complaints.expected.append("503")
        row(dialog, "broken").get_by_role("button", name="Load broken").click()
        row(dialog, "broken").get_by_text("failed").wait_for()
        dialog.get_by_role("alert").filter(has_text=re.compile("[a-z]")).wait_for()
        page.close()
