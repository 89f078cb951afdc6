"""Prints the notes of a release: its section of CHANGELOG.md. Refuses a tag that is not the package's version.

python tools/release_notes.py v1.2.3
python tools/release_notes.py           # of the package's version, whatever is tagged
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(changelog: str, version: str) -> str:
    """The section under the version's heading, without the heading. Raises ValueError where there is none."""
    heading = re.compile(rf"^## {re.escape(version)}(?: .*)?$", re.MULTILINE)
    if (start := heading.search(changelog)) is None:
        raise ValueError(f'CHANGELOG.md has no section {version}. Rename "Unreleased" to "{version} - YYYY-MM-DD".')
    section = changelog[start.end() :]
    following = re.search(r"^## ", section, re.MULTILINE)
    text = section[: following.start() if following else None].strip()
    if not text:
        raise ValueError(f"CHANGELOG.md says nothing about {version}. Write what changed for users.")
    return text


def main(tag: str | None) -> int:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag not in (None, f"v{version}"):
        print(f"The tag is {tag}, but pyproject.toml has version {version}. Tag v{version}.", file=sys.stderr)
        return 1
    try:
        print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit("Usage: python tools/release_notes.py [v1.2.3]")
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else None))
