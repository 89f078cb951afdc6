"""What Ostro needs of this machine: a supported platform, and the libraries of extras that only some features use."""

import sys
from pathlib import Path

from ostro.errors import Unsupported

_CLONE = Path(__file__).parents[3]
# The Dockerfile puts it there.
_IMAGE = Path(sys.prefix) / "etc" / "ostro-image"
_TARGETS = {"jax": "tpu", "torch": "hrm-serve, or cuda for a GPU"}


def install_command(extra: str) -> str:
    """The command that adds the extra to this installation: an editable clone, or one from a wheel."""
    if not (_CLONE / "pyproject.toml").is_file():
        return f"pip install 'ostro[{extra}]'"
    # A relative path works only from within the clone.
    where = "." if Path.cwd() == _CLONE else str(_CLONE)
    return f"pip install -e '{where}[{extra}]'"


def needs(what: str, extra: str) -> str:
    """The message for a feature whose libraries are missing: what needs them, and how to get them."""
    if _IMAGE.is_file():
        # What is installed into a container is gone with it.
        other = _TARGETS.get(extra)
        how = f"Use the Dockerfile's target {other}." if other else f"Build it with {extra} among its argument EXTRAS."
        return f"{what} needs libraries that this image does not have. {how}"
    return f"{what} needs libraries that are not installed. Run: {install_command(extra)}"


# Commands that only talk to servers.
_ANYWHERE = ("bench",)


def check_platform(command: str | None) -> None:
    """Raises Unsupported for a command that this platform cannot run.

    Engines are process groups with inherited sockets, and Unix file locks guard the cache. Windows has no drop-in
    replacement for either, so Ostro runs within WSL there.
    """
    if sys.platform == "win32" and command is not None and command not in _ANYWHERE:
        raise Unsupported(
            f"ostro {command} needs Linux or macOS. On Windows run it within WSL: `wsl --install`, then install Ostro "
            "there; clients on Windows reach it at http://127.0.0.1:8000."
        )
