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


def generated() -> list[Path]:
    """Pages with a generated part, and the one file that is generated whole."""
    found = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [*(path for path in found if "<!-- generated: " in path.read_text(encoding="utf-8")), chart_schema.PATH]


@cache
def pages() -> dict[Path, str]:
    """What each of `generated` should contain."""
    return {
        path: chart_schema.text() if path == chart_schema.PATH else fill(path.read_text(encoding="utf-8"), parts())
        for path in generated()
    }
