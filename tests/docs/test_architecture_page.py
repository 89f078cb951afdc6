"""docs/architecture.md names the packages and modules that there are."""

import re
from pathlib import Path

import pytest
from doc_pages import ROOT, all_blocks, code_spans, outside_fences

PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "ostro"


def packages() -> set[str]:
    found = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    return found | {path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__")}


def modules_named() -> list[str]:
    dotted = re.compile(r"[a-z_]+(\.\w+)+")
    prose = "\n".join(outside_fences(PAGE.read_text(encoding="utf-8")))
    spans = {span for span in code_spans(prose) if dotted.fullmatch(span)}
    return sorted(span for span in spans if span.partition(".")[0] in packages())


def test_the_map_has_every_package() -> None:
    [layers] = [
        block for block in all_blocks() if block.page == "docs/architecture.md" and "\ncli " in f"\n{block.text}"
    ]
    named = {name for line in layers.text.splitlines() for name in re.split(r",\s*", re.split(r"\s{2,}", line)[0])}
    assert named == packages()


@pytest.mark.parametrize("name", modules_named())
def test_every_module_that_the_page_names_exists(name: str) -> None:
    path: Path = SOURCE
    parts = name.split(".")
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").is_file():
        path /= f"{parts.pop(0)}.py"
    text = (path if path.is_file() else path / "__init__.py").read_text(encoding="utf-8")
    assert all(re.search(rf"\b{part}\b", text) for part in parts), f"there is no {parts} in {path.name}"
