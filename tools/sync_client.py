"""Generates `Client` from `AsyncClient`, so that there is one of them to maintain: python tools/sync_client.py."""

import re
import subprocess
import sys
from pathlib import Path

_CLIENT = Path(__file__).parents[1] / "src" / "ostro" / "client"
SOURCE = _CLIENT / "async_client.py"
TARGET = _CLIENT / "client.py"

_DOCSTRING = '"""`Client`: `async_client` over blocking connections. Made by tools/sync_client.py: edit that one."""'
_REPLACEMENTS = (
    (r'\A""".*?"""', _DOCSTRING),
    (r"    def __await__.*?\n\n", ""),
    (r"Coroutine\[Any, Any, (\w+)\]", r"\1"),
    (r", Coroutine, Generator\b", ""),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b__a(iter|enter|exit)__\b", r"__\1__"),
    (r"\ba(close|read|iter_bytes|next)\b", r"\1"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\banyio\b", "time"),
)
# Docstrings name both clients in backticks.
_NAMES = re.compile(r"(?<!`)\bAsync(Client|Stream|Iterator)\b")


def sync_client(source: str) -> str:
    """The blocking counterpart of the asynchronous client's source."""
    for pattern, replacement in _REPLACEMENTS:
        source = re.sub(pattern, replacement, source, flags=re.DOTALL)
    return _formatted(_NAMES.sub(r"\1", source))


def _formatted(text: str) -> str:
    for command in (["check", "--fix-only", "--select=I"], ["format"]):
        run = [sys.executable, "-m", "ruff", *command, "--quiet", f"--stdin-filename={TARGET}", "-"]
        text = subprocess.run(run, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    TARGET.write_text(sync_client(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
