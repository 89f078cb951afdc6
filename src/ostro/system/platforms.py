"""Supported platforms. Engines are process groups with inherited sockets, and Unix file locks guard the cache. Windows
has no drop-in replacement for either, so Ostro runs within WSL there.
"""

import sys

from ostro.errors import Unsupported

# These only talk to servers.
_ANYWHERE = ("bench",)


def check_platform(command: str | None) -> None:
    """Raises Unsupported for a command that this platform cannot run."""
    if sys.platform == "win32" and command is not None and command not in _ANYWHERE:
        raise Unsupported(
            f"ostro {command} needs Linux or macOS. On Windows run it within WSL: `wsl --install`, then install Ostro "
            "there; clients on Windows reach it at http://127.0.0.1:8000."
        )
