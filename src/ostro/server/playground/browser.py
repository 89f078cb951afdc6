"""Opens the page in a browser if someone is at this machine. Knows displays; knows no server."""

import os
import sys
import threading
import webbrowser
from collections.abc import Mapping


def is_at_hand(*, terminal: bool, environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> bool:
    """Whether a browser would open where the user is: there is a terminal and a display, and both are here."""
    if not terminal or "SSH_CONNECTION" in environ or "CI" in environ:
        return False
    return platform in ("darwin", "win32") or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def show(url: str) -> None:
    """Returns at once: some browsers are slow to start, and some never return."""
    threading.Thread(target=webbrowser.open, args=(url,), name="browser", daemon=True).start()


def page_url(host: str, port: int) -> str:
    """The page's URL for a browser on this machine. Wildcard addresses such as 0.0.0.0 become loopback addresses."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/"
