"""Links of the README and the docs lead somewhere."""

from pathlib import Path
from urllib.parse import unquote

import pytest
from doc_pages import ROOT, anchors, docs_pages, links, name_of, pages


@pytest.mark.parametrize("document", pages(), ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(document: Path) -> None:
    lost = []
    for link in links(document.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (document.parent / path).resolve() if path else document
        if not (target.exists() and target.is_relative_to(ROOT) and has_anchor(target, anchor)):
            lost.append(link)
    assert lost == []


def has_anchor(target: Path, anchor: str) -> bool:
    return not anchor or target.suffix != ".md" or anchor in anchors(target.read_text(encoding="utf-8"))


def test_every_page_of_the_docs_is_in_the_sites_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    assert [name for page in docs_pages() if (name := page.relative_to(ROOT / "docs").as_posix()) not in listed] == []
