"""Tables and marked places in Markdown. Knows no content."""

import re
from collections.abc import Iterable, Mapping, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def code(text: object) -> str:
    return f"`{text}`"


def codes(texts: Iterable[object]) -> str:
    return ", ".join(code(text) for text in texts)


def fill(page: str, parts: Mapping[str, str]) -> str:
    """The page with each part between its two marks. Raises KeyError for a mark whose part nobody makes."""

    def part(found: re.Match[str]) -> str:
        return f"<!-- generated: {found[1]} -->\n\n{parts[found[1]].strip()}\n\n<!-- end -->"

    return re.sub(r"<!-- generated: ([\w-]+) -->\n.*?<!-- end -->", part, page, flags=re.DOTALL)
