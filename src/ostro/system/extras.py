"""Installation hints for this package's extras: libraries that only some features need."""

from pathlib import Path

_CLONE = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """The command that adds the extra to this installation: an editable clone, or one from a wheel."""
    if not (_CLONE / "pyproject.toml").is_file():
        return f"pip install 'ostro[{extra}]'"
    # A relative path works only from within the clone.
    where = "." if Path.cwd() == _CLONE else str(_CLONE)
    return f"pip install -e '{where}[{extra}]'"


def needs(what: str, extra: str) -> str:
    """The message for a feature whose libraries are missing: what needs them, and how to install them."""
    return f"{what} needs libraries that are not installed. Run: {install_command(extra)}"
