"""CONTRIBUTING and CHANGELOG: the places they name exist, and none that they should name is missing."""

import re

from doc_pages import ROOT, code_spans, outside_fences, tables

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
FOLDERS = ("src/", "tests/", "native/", "docs/")


def test_every_file_that_contributing_names_exists() -> None:
    spans = code_spans("\n".join(outside_fences(CONTRIBUTING.read_text(encoding="utf-8"))))
    named = [span for span in spans if span.startswith(FOLDERS)]
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_target_that_tests_is_in_contributing() -> None:
    targets = re.findall(r"^((?:run-)?tests?-?[\w-]*|fuzz-[\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    [table] = [each for each in tables(CONTRIBUTING) if each.head[0] == "target"]
    told = {span.removeprefix("make ") for row in table.rows for span in code_spans(row[0])}
    assert set(targets) - {"test"} - told == set()


def test_newer_versions_stand_above_older_ones_in_the_changelog() -> None:
    headings = re.findall(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    versions = [tuple(map(int, name.split("."))) for name, _ in headings if name != "Unreleased"]
    assert versions == sorted(versions, reverse=True)
    assert [
        date for name, date in headings if name != "Unreleased" and not re.fullmatch(r" - \d{4}-\d\d-\d\d", date)
    ] == []
