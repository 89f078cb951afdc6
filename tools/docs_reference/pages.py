"""Every page and file with a generated part, as it should be."""

from functools import cache
from pathlib import Path

from docs_reference import api_tables, chart_schema, family_tables, settings_tables
from docs_reference.markup import fill

ROOT = Path(__file__).parents[2]


@cache
def pages() -> dict[Path, str]:
    parts = settings_tables.parts() | api_tables.parts() | family_tables.parts()
    found = {
        path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    }
    filled = {path: fill(text, parts) for path, text in found.items() if "<!-- generated: " in text}
    return filled | {chart_schema.PATH: chart_schema.text()}
