"""Prints what `pyproject.toml` in the working directory depends on, one requirement a line: an image's first layer."""

import argparse
import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """Requirements of the `project` table and of these extras."""
    core, optional = project["dependencies"], project.get("optional-dependencies", {})
    assert isinstance(core, list)
    assert isinstance(optional, dict)
    if unknown := sorted(set(extras) - set(optional)):
        raise SystemExit(f"There is no extra {', '.join(unknown)}. Choose among {', '.join(sorted(optional))}.")
    return [*core, *(each for extra in extras for each in optional[extra])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="", help="separated by commas")
    extras = [name.strip() for name in parser.parse_args().extras.split(",") if name.strip()]
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.stdout.writelines(f"{each}\n" for each in requirements(project, extras))


if __name__ == "__main__":
    main()
