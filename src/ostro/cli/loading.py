"""Files for a conversation: texts that become part of a message, and conversations that were saved."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ostro.cli.files import read_text
from ostro.errors import BadRequest

_MOST_BYTES = 16 << 20
_FENCES = re.compile("^ *(`{3,})", re.MULTILINE)
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Attachment:
    name: str
    text: str
    """As it stands in a message, with the file's name."""


@dataclass(frozen=True)
class Saved:
    name: str
    system: str | None
    said: tuple[dict[str, str], ...]


def load(path: Path) -> Attachment | Saved:
    """A saved conversation if it is one, otherwise the file's text."""
    if path.is_dir():
        raise BadRequest(f"{path} is a directory. Name a file in it.")
    if path.is_file() and path.stat().st_size > _MOST_BYTES:
        raise BadRequest(
            f"{path} is larger than {_MOST_BYTES >> 20} MiB, more than any model reads. Load a part of it."
        )
    text = read_text(path)
    if not text.strip():
        raise BadRequest(f"{path} is empty.")
    messages = _messages(text) if path.suffix == ".json" else None
    if messages is None:
        return Attachment(path.name, _fenced(path.name, text))
    is_told = bool(messages) and messages[0]["role"] == "system"
    said = messages[1:] if is_told else messages
    return Saved(path.name, messages[0]["content"] if is_told else None, tuple(said))


def _messages(text: str) -> list[dict[str, str]] | None:
    """Those of a file as /save writes it; None for other JSON."""
    try:
        given = json.loads(text)
    except ValueError:
        return None
    messages = given.get("messages") if isinstance(given, dict) else None
    if not isinstance(messages, list):
        return None
    roles = [each.get("role") for each in messages if isinstance(each, dict) and isinstance(each.get("content"), str)]
    # A system message, then questions and answers.
    start = 1 if roles[:1] == [_ROLES[0]] else 0
    turns = len(messages) - start
    if turns % 2 or roles != [*_ROLES[:start], *_ROLES[1:] * (turns // 2)]:
        return None
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def _fenced(name: str, text: str) -> str:
    """Fenced as code, by more backticks than any fence in it has."""
    longest = max((len(match) for match in _FENCES.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{name}:\n{fence}\n{text.removesuffix(chr(10))}\n{fence}\n\n"
