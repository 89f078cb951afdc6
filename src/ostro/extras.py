"""How to install an extra of this package: the libraries that one of its parts needs, and that others do without."""

from pathlib import Path

_CLONE = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """The command that adds the extra to this very installation: an editable one of a clone, or one from a wheel."""
    if not (_CLONE / "pyproject.toml").is_file():
        return f"pip install 'ostro[{extra}]'"
    # A relative path is for whoever stands in the clone.
    where = "." if Path.cwd() == _CLONE else str(_CLONE)
    return f"pip install -e '{where}[{extra}]'"


def needs(what: str, extra: str) -> str:
    """The message for a part whose libraries are missing: what needs them, and how to install them."""
    return f"{what} needs libraries that are not installed. Run: {install_command(extra)}"
