"""The docs' site is built without a complaint, and asks nothing of anybody."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install -e '.[docs]'")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return directory


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    fetched = []
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched += re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="((?:https?:)?//[^"]*)"', text)
        fetched += re.findall(r'<link[^>]*\shref="((?:https?:)?//[^"]*)"', text)
    for sheet in site.rglob("*.css"):
        found = re.findall(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]*)", sheet.read_text(encoding="utf-8"))
        fetched += found
    assert fetched == []


def test_pages_link_to_files_of_the_repository_that_are_copied(site: Path) -> None:
    assert 'href="repository/bench/results/hrm.json"' in (site / "hrm.html").read_text(encoding="utf-8")
    assert (site / "repository/bench/results/hrm.json").is_file()
    assert 'href="index.html"' in (site / "unsupported.html").read_text(encoding="utf-8")


def test_pages_that_moved_lead_to_what_took_their_place(site: Path) -> None:
    stubs = [page for page in site.rglob("*.html") if 'http-equiv="refresh"' in page.read_text(encoding="utf-8")]
    assert stubs
    for stub in stubs:
        [target] = re.findall(r'<a href="([^"]+)">Moved</a>', stub.read_text(encoding="utf-8"))
        path, _, anchor = target.partition("#")
        page = stub.parent / path
        assert page.is_file(), f"{stub.name} leads to {target}"
        assert not anchor or f'id="{anchor}"' in page.read_text(encoding="utf-8"), f"{stub.name} leads to {target}"


@pytest.mark.parametrize("target", ["docs", "docs-serve"])
def test_make_docs_installs_nothing_into_the_serving_environment(target: str) -> None:
    command = ["make", "--dry-run", "--always-make", target, "PYTHON=python3"]
    # Those of a make that runs the tests.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    steps = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "build/docs/bin/mkdocs" in steps
    assert "install.py" not in steps
    assert ".venv" not in steps
