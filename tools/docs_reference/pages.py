"""Every page and file with a generated part, as it should be."""

from functools import cache
from pathlib import Path

from docs_reference import (
    api_tables,
    chart_schema,
    family_tables,
    feature_matrix,
    figure_tables,
    recipe_tables,
    settings_tables,
)
from docs_reference.markup import fill

ROOT = Path(__file__).parents[2]


_MAKERS = (settings_tables, api_tables, family_tables, recipe_tables, feature_matrix, figure_tables)


@cache
def parts() -> dict[str, str]:
    """All generated parts, by name."""
    return {name: text for maker in _MAKERS for name, text in maker.parts().items()}


@cache
def pages() -> dict[Path, str]:
    found = {
        path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    }
    filled = {path: fill(text, parts()) for path, text in found.items() if "<!-- generated: " in text}
    return filled | {chart_schema.PATH: chart_schema.text()}
